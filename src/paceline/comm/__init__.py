"""What moves between ranks, and what it costs.

`collectives` sum over a group; `routes` say along which path and `codecs` in which form; `reduction` turns
gradients into sums; `channel` carries messages.
"""

from paceline.comm.codecs import Codec
from paceline.comm.collectives import CodedCollective, Collective
from paceline.comm.cost import Cost, cost, hierarchical_cost
from paceline.comm.handle import Handle
from paceline.comm.ledger import ByteLedger, Entry
from paceline.comm.net import Net
from paceline.comm.reduction import Gradients, GradientSink, LocalReducer, Reducer, Reduction
from paceline.comm.routes import NativeCollective
from paceline.comm.shard_tally import ShardTally
from paceline.comm.tally import Tally

__all__ = [
    "ByteLedger",
    "Codec",
    "CodedCollective",
    "Collective",
    "Cost",
    "Entry",
    "GradientSink",
    "Gradients",
    "Handle",
    "LocalReducer",
    "NativeCollective",
    "Net",
    "Reducer",
    "Reduction",
    "ShardTally",
    "Tally",
    "cost",
    "hierarchical_cost",
]
