"""The largest magnitudes of a row: a sample says where to look, so that few values are sorted."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from paceline.comm.workspace import Workspace

_SAMPLED_FROM = 1 << 14  # rows longer than this are searched for a threshold first
_SAMPLES = 1 << 13
_MARGIN, _MORE = 1.25, 16
_MOST_MORE = 64  # times the values that one of a sample stands for: room for candidates, beside twice k


def largest(x: Tensor, kept: int, out: Tensor, workspace: Workspace) -> None:
    """Write the places of the `kept` largest magnitudes of `x` [n], ascending, into `out` int64 [kept]; among
    equals the first.

    A sample gives a threshold that a few more values reach than are wanted; these alone are sorted. If too
    few do, all are. What is not finite counts as largest.
    """
    candidates = _likely(x, kept, workspace)
    sizes = (x if candidates is None else x[candidates]).abs().nan_to_num_(torch.inf, torch.inf)
    order = torch.sort(sizes, descending=True, stable=True).indices[:kept]
    out.copy_((order if candidates is None else candidates[order]).sort().values)


def sample_of(x: Tensor, kept: int, workspace: Workspace) -> Tensor:
    """Some values of `x` [n], evenly spread; none where looking at all of them costs less."""
    num_values = x.numel()
    if num_values < _SAMPLED_FROM or kept > num_values // 4:
        return x[:0]
    sample = x[:: num_values // _SAMPLES]
    return workspace.like("topk.sample", sample).copy_(sample)


def num_wanted(num_values: int, kept: int, num_samples: int) -> int:
    """How many of a sample lie above a size that `kept` of all values, and a few more, reach; pure."""
    return min(num_samples, ceil(_MARGIN * kept * num_samples / num_values) + _MORE) if num_samples else 0


def _likely(x: Tensor, kept: int, workspace: Workspace) -> Tensor | None:
    """Places that hold the `kept` largest, ascending; None: look at all."""
    sample = sample_of(x, kept, workspace)
    if not sample.numel():
        return None
    wanted = num_wanted(x.numel(), kept, sample.numel())
    threshold = sample.abs_().nan_to_num_(torch.inf).topk(wanted, sorted=False).values.min()
    if threshold > 0:
        sizes = torch.abs(x, out=workspace.like("topk.sizes", x))
        below = torch.lt(sizes, threshold, out=workspace.take("topk.below", x.shape, torch.bool, x.device))
        found = below.logical_not_().nonzero().view(-1)
    else:
        found = (x != 0).nonzero().view(-1)
    if found.numel() >= kept:
        return found
    return _with_zeros(x, found, kept) if threshold == 0 else None


def _with_zeros(x: Tensor, found: Tensor, kept: int) -> Tensor:
    """All that are not zero, and the first zeros."""
    zeros = (x == 0).nonzero().view(-1)[: kept - found.numel()]
    return torch.cat([found, zeros]).sort().values


def num_candidates(num_values: int, kept: int) -> int:
    """How many values may reach the size that a sample gives; where more do, all are looked at. Pure."""
    return 2 * kept + _MOST_MORE * (num_values // _SAMPLES)
