"""Reductions: from the gradients of this rank to the sums of the parameters that it updates."""

from paceline.comm.reduction.bucket_buffers import PartBuffer, scatter_buffer_prefix
from paceline.comm.reduction.bucket_reducer import (
    BucketReducer,
    BucketSum,
    TreeReducer,
    UnorderedSum,
)
from paceline.comm.reduction.gradient_norm import CanonicalNorm, LocalClip, SharedNorm, joint_norm, local_norm
from paceline.comm.reduction.gradients import (
    CombinedReduction,
    GradientReduction,
    Gradients,
    GradientSink,
    LocalReducer,
)
from paceline.comm.reduction.pending_residual import GradientUnit, PendingResidual, sum_residuals
from paceline.comm.reduction.scatter_reducer import ScatterOrder, ScatterReducer
from paceline.comm.reduction.scatter_schedule import (
    ScatterPacer,
    ScatterPaths,
    ScatterWindow,
    unconfirmed_bytes,
)
from paceline.comm.reduction.summation_tree import (
    TreeNodeOwners,
    TreeSumByMessages,
    TreeSumInMemory,
    covering_nodes,
)
from paceline.comm.reduction.tied_gradients import TiedGradientReduction

__all__ = [
    "BucketReducer",
    "BucketSum",
    "CanonicalNorm",
    "CombinedReduction",
    "GradientReduction",
    "GradientSink",
    "GradientUnit",
    "Gradients",
    "LocalClip",
    "LocalReducer",
    "PartBuffer",
    "PendingResidual",
    "ScatterOrder",
    "ScatterPacer",
    "ScatterPaths",
    "ScatterReducer",
    "ScatterWindow",
    "SharedNorm",
    "TiedGradientReduction",
    "TreeNodeOwners",
    "TreeReducer",
    "TreeSumByMessages",
    "TreeSumInMemory",
    "UnorderedSum",
    "covering_nodes",
    "joint_norm",
    "local_norm",
    "scatter_buffer_prefix",
    "sum_residuals",
    "unconfirmed_bytes",
]
