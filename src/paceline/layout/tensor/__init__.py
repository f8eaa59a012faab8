"""Tensor: large tensors are cut, and every rank of the axis computes its part of each sample."""

from paceline.layout.tensor.linear import make_column, make_row
from paceline.layout.tensor.plan import PlanEntry, apply_plan, dims_of, plan_of

__all__ = ["PlanEntry", "apply_plan", "dims_of", "make_column", "make_row", "plan_of"]
