"""Contract suites: what every codec, wire, reducer, channel, layout and rule must keep, ours or a user's.

A suite is a class of tests; derive from it in a test module, name it `Test...`, and return your own piece
from its one abstract method. Real processes, real collectives. Sources: `comm.codec.Codec`, `comm.wire.Wire`,
`comm.reducer.Reducer`, `layout.placed.Placed`, `sync.rule.Rule`.
"""

from paceline.testing.contracts.channel import ChannelContract
from paceline.testing.contracts.codec import CodecContract
from paceline.testing.contracts.layout import LayoutContract
from paceline.testing.contracts.reducer import ReducerContract
from paceline.testing.contracts.rule import RuleContract
from paceline.testing.contracts.wire import WireContract

__all__ = [
    "ChannelContract",
    "CodecContract",
    "LayoutContract",
    "ReducerContract",
    "RuleContract",
    "WireContract",
]
