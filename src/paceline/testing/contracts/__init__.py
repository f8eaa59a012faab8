"""Contract suites: what every codec, collective, reducer, channel, layout and rule must keep, ours or a
user's.

A suite is a class of tests; derive from it in a test module, name it `Test...`, and return your own piece
from its one abstract method. Real processes, real collectives. Sources: `comm.codec.Codec`,
`comm.collectives.Collective`, `comm.reduction.Reduction`, `layout.placed.Placed`, `sync.rule.Rule`.
"""

from paceline.testing.contracts.channel import ChannelContract
from paceline.testing.contracts.codec import CodecContract
from paceline.testing.contracts.collective import CollectiveContract
from paceline.testing.contracts.layout import LayoutContract
from paceline.testing.contracts.reducer import ReducerContract
from paceline.testing.contracts.rule import RuleContract

__all__ = [
    "ChannelContract",
    "CodecContract",
    "CollectiveContract",
    "LayoutContract",
    "ReducerContract",
    "RuleContract",
]
