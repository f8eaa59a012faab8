"""Tensor: large tensors are cut, and every rank of the axis computes its part of each sample."""

from paceline.layout.tensor.apply import apply_cuts
from paceline.layout.tensor.cuts import TensorCuts, cuts_of, transform_of
from paceline.layout.tensor.plan import PlanEntry, entries_of

__all__ = ["PlanEntry", "TensorCuts", "apply_cuts", "cuts_of", "entries_of", "transform_of"]
