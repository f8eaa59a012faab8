"""Layouts: turn micro-batches into gradients of a model that is replicated, sharded or split over ranks."""

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
