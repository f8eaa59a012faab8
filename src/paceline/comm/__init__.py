"""Communication between ranks, and what it costs.

`collectives` sum over a group; a route (`routes`) is the path of the bytes and a codec (`codecs`) their
encoding. `reduction` turns gradients into sums, and `channel` carries point-to-point messages.
"""

from paceline.comm.codecs import Codec
from paceline.comm.collective_cost import CollectiveCost, hierarchical_cost, native_cost
from paceline.comm.collectives import CodedCollective, Collective
from paceline.comm.handle import Handle
from paceline.comm.ledger import ByteLedger, LedgerEntry
from paceline.comm.net import Net
from paceline.comm.reduction import BucketReducer, GradientReduction, Gradients, GradientSink, LocalReducer
from paceline.comm.routes import NativeCollective
from paceline.comm.tally import ShardTally, StepTally

__all__ = [
    "BucketReducer",
    "ByteLedger",
    "Codec",
    "CodedCollective",
    "Collective",
    "CollectiveCost",
    "GradientReduction",
    "GradientSink",
    "Gradients",
    "Handle",
    "LedgerEntry",
    "LocalReducer",
    "NativeCollective",
    "Net",
    "ShardTally",
    "StepTally",
    "hierarchical_cost",
    "native_cost",
]
