"""Contract suites: what every codec, collective, reducer, channel, layout and rule must keep, ours or a
user's.

A suite is a class of tests; derive from it in a test module, name it `Test...`, and return your own piece
from its one abstract method. Real processes, real collectives. Sources: `comm.codec.Codec`,
`comm.collectives.Collective`, `comm.reduction.Reduction`, `layout.placed.Placed`, `sync.rule.Rule`.
"""

from paceline.testing.contracts.channel_contract import ChannelContract
from paceline.testing.contracts.codec_contract import CodecContract
from paceline.testing.contracts.collective_contract import CollectiveContract
from paceline.testing.contracts.reducer_contract import ReducerContract
from paceline.testing.contracts.training_contracts import LayoutContract, RuleContract

__all__ = [
    "ChannelContract",
    "CodecContract",
    "CollectiveContract",
    "LayoutContract",
    "ReducerContract",
    "RuleContract",
]
