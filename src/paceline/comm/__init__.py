"""What moves between ranks, and what it costs."""

from paceline.comm.buckets import BucketReducer, build_reducer
from paceline.comm.codec import Codec, Int8
from paceline.comm.cost import Cost, cost, hierarchical_cost
from paceline.comm.handle import Handle
from paceline.comm.hierarchical import HierarchicalWire
from paceline.comm.host_meeting import meet_on_host
from paceline.comm.ledger import ByteLedger, Entry
from paceline.comm.net import Net
from paceline.comm.norm import CanonicalNorm
from paceline.comm.ordered import OrderedReducer, SpreadReducer
from paceline.comm.reducer import Gradients, LocalReducer, Reducer
from paceline.comm.shard_tally import ShardTally
from paceline.comm.sharded import AgreedNorm, ParameterGather, ShardedReducer
from paceline.comm.shared_memory import SharedMemoryWire
from paceline.comm.tally import Tally
from paceline.comm.wire import CodedWire, PlainWire, Wire

__all__ = [
    "AgreedNorm",
    "BucketReducer",
    "ByteLedger",
    "CanonicalNorm",
    "Codec",
    "CodedWire",
    "Cost",
    "Entry",
    "Gradients",
    "Handle",
    "HierarchicalWire",
    "Int8",
    "LocalReducer",
    "Net",
    "OrderedReducer",
    "ParameterGather",
    "PlainWire",
    "Reducer",
    "ShardTally",
    "ShardedReducer",
    "SharedMemoryWire",
    "SpreadReducer",
    "Tally",
    "Wire",
    "build_reducer",
    "cost",
    "hierarchical_cost",
    "meet_on_host",
]
