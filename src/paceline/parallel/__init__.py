"""Where state lives. A layout turns micro-batches into gradients and knows nothing of the optimizer."""

from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import LossSums, ModelRunner
from paceline.parallel.sharded_model import ModelPartition, ShardedModel
from paceline.parallel.thread_workers import ThreadedRunner

__all__ = [
    "LossSums",
    "MicroBatchBuffers",
    "MixedPrecision",
    "ModelPartition",
    "ModelRunner",
    "ReplicatedRunner",
    "ShardedModel",
    "ThreadedRunner",
]
