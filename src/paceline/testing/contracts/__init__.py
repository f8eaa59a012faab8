"""Contract suites for the pieces that another package can add: codecs, collectives, reducers, channels,
layouts, sync rules, optimizers and sinks.

A suite is a class of tests. Derive from it in a test module, name it `Test...`, and return your own piece
from its one abstract method; layouts and rules set the text of a strategy instead, and an optimizer gives its
scalar reference. The suites use real
processes and real collectives. Each suite tests a protocol: `comm.codecs.codec_protocol.Codec`,
`comm.collectives.collective_protocol.Collective`, `comm.reduction.GradientReduction`,
`comm.channel.MessageChannel`, `parallel.model_layout.ModelRunner`, `sync.sync_rule.SyncRule` and
`observe.sinks.Sink`.
"""

from paceline.testing.contracts.channel_contract import ChannelContract
from paceline.testing.contracts.codec_contract import CodecContract
from paceline.testing.contracts.collective_contract import CollectiveContract
from paceline.testing.contracts.optimizer_contract import OptimizerContract
from paceline.testing.contracts.reducer_contract import ReducerContract
from paceline.testing.contracts.sink_contract import SinkContract
from paceline.testing.contracts.training_contracts import LayoutContract, RuleContract

__all__ = [
    "ChannelContract",
    "CodecContract",
    "CollectiveContract",
    "LayoutContract",
    "OptimizerContract",
    "ReducerContract",
    "RuleContract",
    "SinkContract",
]
