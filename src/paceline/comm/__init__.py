"""What moves between ranks, and what it costs."""

from paceline.comm.cost import Cost, cost
from paceline.comm.handle import Handle
from paceline.comm.ledger import ByteLedger, Entry
from paceline.comm.net import Net
from paceline.comm.reducer import BucketReducer, Gradients, LocalReducer, Reducer, build_reducer
from paceline.comm.tally import Tally

__all__ = [
    "BucketReducer",
    "ByteLedger",
    "Cost",
    "Entry",
    "Gradients",
    "Handle",
    "LocalReducer",
    "Net",
    "Reducer",
    "Tally",
    "build_reducer",
    "cost",
]
