"""The largest magnitudes of a row: a sample says where to look, so that few values are ranked."""

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

    A sample gives a threshold that a few more values reach than are wanted; only these are ranked. If too
    few do, all are. What is not finite counts as largest.
    """
    if not kept:
        return
    candidates = _likely(x, kept, workspace)
    if candidates is None:
        out.copy_(_first_largest(x, kept, x.numel(), workspace))
        return
    room = num_candidates(x.numel(), kept)
    values = workspace.take("topk.likely", candidates.shape, x.dtype, x.device, room=room)
    torch.index_select(x, 0, candidates, out=values)
    torch.index_select(candidates, 0, _first_largest(values, kept, room, workspace), out=out)


def _first_largest(values: Tensor, kept: int, room: int, workspace: Workspace) -> Tensor:
    """Places in `values` [n], ascending: what is larger than the smallest that is kept, and the first of its
    size. A sort would find the same, and allocate.
    """
    sizes, larger, equal = (
        workspace.take(f"topk.{name}", values.shape, dtype, values.device, room=room)
        for name, dtype in (("sizes", values.dtype), ("larger", torch.bool), ("equal", torch.bool))
    )
    torch.abs(values, out=sizes).nan_to_num_(torch.inf, torch.inf)
    least = _most(sizes, kept, workspace).min()
    torch.gt(sizes, least, out=larger)
    torch.eq(sizes, least, out=equal)
    missing = kept - int(larger.count_nonzero())
    larger.index_fill_(0, _places_of(equal, room, workspace, "topk.ties")[:missing], True)
    return _places_of(larger, room, workspace, "topk.first")


def _most(sizes: Tensor, wanted: int, workspace: Workspace) -> Tensor:
    """The largest of some sizes, in any order."""
    found = workspace.take("topk.most", (wanted,), sizes.dtype, sizes.device)
    where = workspace.take("topk.where", (wanted,), torch.int64, sizes.device)
    torch.topk(sizes, wanted, sorted=False, out=(found, where))
    return found


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
    threshold = _most(sample.abs_().nan_to_num_(torch.inf), wanted, workspace).min()
    reaches = workspace.take("topk.reaches", x.shape, torch.bool, x.device)
    if threshold > 0:
        torch.lt(torch.abs(x, out=workspace.like("topk.all", x)), threshold, out=reaches).logical_not_()
    else:
        _fill_up(torch.ne(x, 0, out=reaches), kept, workspace)
    found = _places_of(reaches, num_candidates(x.numel(), kept), workspace, "topk.reaching")
    return found if found.numel() >= kept else None


def _fill_up(holds: Tensor, kept: int, workspace: Workspace) -> None:
    """Let a mask [n] hold at `kept` places: where it does, and at the first others, all among as many."""
    missing = kept - int(holds.count_nonzero())
    if missing > 0:
        others = workspace.take("topk.others", (kept,), torch.bool, holds.device)
        torch.logical_not(holds[:kept], out=others)
        holds.index_fill_(0, _places_of(others, kept, workspace, "topk.zeros")[:missing], True)


def _places_of(holds: Tensor, room: int, workspace: Workspace, name: str) -> Tensor:
    """Where a mask [n] is true, ascending."""
    place = workspace.take(name, (int(holds.count_nonzero()), 1), torch.int64, holds.device, room=room)
    return torch.nonzero(holds, out=place).view(-1)


def num_candidates(num_values: int, kept: int) -> int:
    """How many values may reach the size that a sample gives; where more do, all are looked at. Pure."""
    return 2 * kept + _MOST_MORE * (num_values // _SAMPLES)
