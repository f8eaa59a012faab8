"""Tensor parallelism: large tensors are split, and every rank of the axis computes its part of each
sample.
"""

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
