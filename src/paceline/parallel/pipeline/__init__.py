"""Pipeline parallelism: consecutive layers on consecutive ranks, run in the order of a schedule table."""

from paceline.parallel.pipeline.forward_backward import InFlightMicroBatch
from paceline.parallel.pipeline.model_chain import module_chain
from paceline.parallel.pipeline.p2p import (
    HostMemoryTransport,
    MultiHostTransport,
    NetTransport,
    StageTransport,
)
from paceline.parallel.pipeline.pipeline_runner import PipelineRunner, ThreadedPipelineRunner
from paceline.parallel.pipeline.stage_partition import StagePartition, partition_evenly, partition_model

__all__ = [
    "HostMemoryTransport",
    "InFlightMicroBatch",
    "MultiHostTransport",
    "NetTransport",
    "PipelineRunner",
    "StagePartition",
    "StageTransport",
    "ThreadedPipelineRunner",
    "module_chain",
    "partition_evenly",
    "partition_model",
]
