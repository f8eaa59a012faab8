"""Data: the samples of each step, the processes that read them, and their way to the device.

`sample_order` and `work` decide (pure), `loader` reads; `text_corpus`, `token_file` and `tokenizer` make a
source of text, and `stream` one of samples that can only be read in order.
"""

from paceline.data.loader import GeneratedBatches, SampleLoader, collate_samples, to_device
from paceline.data.sample_order import BatchOrder, KeyedOrder, KeyedPermutation
from paceline.data.sample_reader import seeded_generators
from paceline.data.task_data import build_order, prepare_data, read_held_out
from paceline.data.work import (
    BatchReader,
    BatchStream,
    LoadedBatch,
    LockstepWork,
    MicroBatch,
    MicroBatchWork,
    TrainingFeed,
    split_evenly,
)

__all__ = [
    "BatchOrder",
    "BatchReader",
    "BatchStream",
    "GeneratedBatches",
    "KeyedOrder",
    "KeyedPermutation",
    "LoadedBatch",
    "LockstepWork",
    "MicroBatch",
    "MicroBatchWork",
    "SampleLoader",
    "TrainingFeed",
    "build_order",
    "collate_samples",
    "prepare_data",
    "read_held_out",
    "seeded_generators",
    "split_evenly",
    "to_device",
]
