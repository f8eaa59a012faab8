"""Tensor parallelism: ranks of the tensor axis hold parts of large tensors and share every sample."""

from paceline.parallel.tensor.tensor_plan import (
    TensorCuts,
    TensorPlanEntry,
    apply_tensor_cuts,
    plan_tensor_cuts,
    plan_tensor_transform,
    resolve_tensor_plan,
)

__all__ = [
    "TensorCuts",
    "TensorPlanEntry",
    "apply_tensor_cuts",
    "plan_tensor_cuts",
    "plan_tensor_transform",
    "resolve_tensor_plan",
]
