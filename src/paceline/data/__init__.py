"""Data: which samples a step trains on, who reads them, and how they reach the device.

`order` and `work` decide (pure), `loader` acts; `text` and `tokens` make a source of text.
"""

from paceline.data.device import to_device
from paceline.data.feed import Feed, Reader, Stream, longest_stretch
from paceline.data.loader import Loader
from paceline.data.order import Batches, Order, Permutation
from paceline.data.produced import Produced
from paceline.data.reader import seeded
from paceline.data.samples import collate_samples
from paceline.data.settled import build_order, in_memory, settled
from paceline.data.work import LoadedBatch, LockstepWork, MicroBatch, Work, split

__all__ = [
    "Batches",
    "Feed",
    "LoadedBatch",
    "Loader",
    "LockstepWork",
    "MicroBatch",
    "Order",
    "Permutation",
    "Produced",
    "Reader",
    "Stream",
    "Work",
    "build_order",
    "collate_samples",
    "in_memory",
    "longest_stretch",
    "seeded",
    "settled",
    "split",
    "to_device",
]
