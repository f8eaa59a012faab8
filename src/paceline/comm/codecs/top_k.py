"""The sparse codecs top-k, random-k and deep gradient compression: some values of a row, each with its index.

Without error feedback they lose most of a gradient for good; `comm.collectives.coded_collective` keeps what
is left out and sends it later. The values themselves may be encoded by another codec: `topk:0.01+int4`. The
largest values are found with a threshold from a sample, so that only few values have to be ranked.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from paceline.comm.codecs.bf16_fp16 import row_max_abs
from paceline.comm.codecs.codec_kernels import CodecKernels, load_kernels
from paceline.comm.codecs.codec_protocol import Codec, CodecKeys, bytes_of, values_of
from paceline.comm.workspace import Workspace
from paceline.recipe.registry import DgcArgument

# Rows longer than this are searched for a threshold first.
_MIN_SAMPLED_VALUES = 1 << 14
_NUM_SAMPLES = 1 << 13
_SAMPLE_MARGIN, _SAMPLE_EXTRA = 1.25, 16
# Room for candidates beside twice k, in units of the values that one of the sample stands for.
_CANDIDATES_PER_SAMPLE = 64


def select_largest(x: Tensor, num_kept: int, out: Tensor, workspace: Workspace) -> None:
    """Write the indices of the `kept` largest magnitudes of `x` [n], ascending, into `out` int64 [kept]; the
    first of equals.

    A sample gives a threshold that a few more values reach than are needed; only these are ranked. If too few
    reach it, all are. Values that are not finite count as largest.
    """
    if not num_kept:
        return
    candidates = _candidate_positions(x, num_kept, workspace)
    if candidates is None:
        out.copy_(_select_among(x, num_kept, x.numel(), workspace))
        return
    room = max_candidates(x.numel(), num_kept)
    values = workspace.take("topk.likely", candidates.shape, x.dtype, x.device, room=room)
    torch.index_select(x, 0, candidates, out=values)
    torch.index_select(candidates, 0, _select_among(values, num_kept, room, workspace), out=out)


def _select_among(values: Tensor, num_kept: int, room: int, workspace: Workspace) -> Tensor:
    """Return the indices of the largest magnitudes of `values` [n], ascending; the first of those that are
    equal to the least.

    A sort would find the same, but allocate memory.
    """
    sizes, larger, equal = (
        workspace.take(f"topk.{name}", values.shape, dtype, values.device, room=room)
        for name, dtype in (("sizes", values.dtype), ("larger", torch.bool), ("equal", torch.bool))
    )
    torch.abs(values, out=sizes).nan_to_num_(torch.inf, torch.inf)
    least = _largest_values(sizes, num_kept, workspace).min()
    torch.gt(sizes, least, out=larger)
    torch.eq(sizes, least, out=equal)
    # Of values as large as the smallest that is kept, the first are taken, so all devices choose the same.
    missing = num_kept - int(larger.count_nonzero())
    larger.index_fill_(0, _mask_positions(equal, room, workspace, "topk.ties")[:missing], True)
    return _mask_positions(larger, room, workspace, "topk.first")


def _largest_values(sizes: Tensor, wanted: int, workspace: Workspace) -> Tensor:
    """Return the `wanted` largest of some magnitudes, in any order."""
    values = workspace.take("topk.most", (wanted,), sizes.dtype, sizes.device)
    indices = workspace.take("topk.where", (wanted,), torch.int64, sizes.device)
    torch.topk(sizes, wanted, sorted=False, out=(values, indices))
    return values


def sample_values(x: Tensor, num_kept: int, workspace: Workspace) -> Tensor:
    """Return some values of `x` [n], evenly spread; none where looking at all of them is cheaper."""
    num_values = x.numel()
    # Short rows are ranked faster than sampled, and a large share of a row leaves no threshold to find.
    if num_values < _MIN_SAMPLED_VALUES or num_kept > num_values // 4:
        return x[:0]
    sample = x[:: num_values // _NUM_SAMPLES]
    return workspace.like("topk.sample", sample).copy_(sample)


def num_wanted_in_sample(num_values: int, num_kept: int, num_samples: int) -> int:
    """Return the rank in a sample of a magnitude that `kept` of all values, and a few more, reach; pure."""
    return (
        min(num_samples, ceil(_SAMPLE_MARGIN * num_kept * num_samples / num_values) + _SAMPLE_EXTRA)
        if num_samples
        else 0
    )


def _candidate_positions(x: Tensor, num_kept: int, workspace: Workspace) -> Tensor | None:
    """Return indices that contain the `kept` largest, ascending; None: all values have to be ranked."""
    sample = sample_values(x, num_kept, workspace)
    if not sample.numel():
        return None
    wanted = num_wanted_in_sample(x.numel(), num_kept, sample.numel())
    threshold = _largest_values(sample.abs_().nan_to_num_(torch.inf), wanted, workspace).min()
    reaches = workspace.take("topk.reaches", x.shape, torch.bool, x.device)
    # `not less` and not `greater or equal`: a NaN has to be a candidate.
    if threshold > 0:
        torch.lt(torch.abs(x, out=workspace.like("topk.all", x)), threshold, out=reaches).logical_not_()
    else:
        _fill_mask(torch.ne(x, 0, out=reaches), num_kept, workspace)
    candidates = _mask_positions(reaches, max_candidates(x.numel(), num_kept), workspace, "topk.reaching")
    return candidates if candidates.numel() >= num_kept else None


def _fill_mask(holds: Tensor, num_kept: int, workspace: Workspace) -> None:
    """Set further positions of a mask [n], from the beginning, until at least `kept` are set."""
    missing = num_kept - int(holds.count_nonzero())
    if missing > 0:
        others = workspace.take("topk.others", (num_kept,), torch.bool, holds.device)
        torch.logical_not(holds[:num_kept], out=others)
        holds.index_fill_(0, _mask_positions(others, num_kept, workspace, "topk.zeros")[:missing], True)


def _mask_positions(holds: Tensor, room: int, workspace: Workspace, name: str) -> Tensor:
    """Return the indices at which a mask [n] is true, ascending."""
    indices = workspace.take(name, (int(holds.count_nonzero()), 1), torch.int64, holds.device, room=room)
    return torch.nonzero(holds, out=indices).view(-1)


def max_candidates(num_values: int, num_kept: int) -> int:
    """Return how many values may reach the threshold of a sample; if more do, all are ranked. Pure."""
    return 2 * num_kept + _CANDIDATES_PER_SAMPLE * (num_values // _NUM_SAMPLES)


KeepCount = Callable[[int], int]
"""A function from the number of values of a row to the number of those that are kept."""

DGC_MOMENTUM = 0.9
"""Momentum of `dgc` if its argument gives none."""


class Float32Codec:
    """A codec that copies float32 values."""

    needs_error_feedback = ragged = False
    block = 1

    def num_bytes(self, num_values: int) -> int:
        """Return 4 n."""
        return 4 * num_values

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        return bytes_of(workspace.copy("floats", x, torch.float32))

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        out.copy_(values_of(payload, torch.float32, workspace))


class TopKCodec:
    """A codec of the k values of a row that have the largest magnitude; of equal ones the first.

    Args:
        num_kept: k.
        values: codec of the k values.
        kernels: compiled search in rows of float32; None: PyTorch is used, with the same result.
    Source: Aji and Heafield 2017, Sparse Communication for Distributed Gradient Descent, arXiv:1704.05021,
    section 3; Stich et al. 2018, Sparsified SGD with Memory, arXiv:1809.07599, Algorithm 1 (memory).
    """

    needs_error_feedback, ragged, block = True, False, 0

    def __init__(
        self, num_kept: KeepCount, values: Codec | None = None, kernels: CodecKernels | None = None
    ) -> None:
        self.num_kept, self._values, self._kernels = num_kept, values or Float32Codec(), kernels

    def with_values(self, values: Codec) -> TopKCodec:
        """Return the same selection with another codec for the values."""
        return TopKCodec(self.num_kept, values, self._kernels)

    def num_bytes(self, num_values: int) -> int:
        """Return the bytes of k values, and of k indices of 1 to 4 bytes, as many as n - 1 needs."""
        num_kept = self.num_kept(num_values)
        return self._values.num_bytes(num_kept) + num_kept * index_bytes(num_values)

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """Write the encoded values of each row, then their indices, ascending."""
        rows, num_values = x.shape
        num_kept, width = self.num_kept(num_values), index_bytes(num_values)
        indices = workspace.take("topk.places", (rows, num_kept), torch.int64, x.device)
        for row, row_indices in zip(x, indices, strict=True):
            self._largest(row, num_kept, row_indices, workspace)
        chosen = torch.gather(
            x, 1, indices, out=workspace.take("topk.values", indices.shape, x.dtype, x.device)
        )
        out = workspace.take("topk", (rows, self.num_bytes(num_values)), torch.uint8, x.device)
        first = self._values.num_bytes(num_kept)
        out[:, :first] = self._values.encode(chosen, keys, workspace)
        # Indices are int32 in memory; only their lowest `width` bytes are sent.
        short = workspace.take("topk.short", indices.shape, torch.int32, x.device).copy_(indices)
        out[:, first:].view(rows, num_kept, width).copy_(
            short.view(torch.uint8).view(rows, num_kept, 4)[:, :, :width]
        )
        return out

    def _largest(self, x: Tensor, num_kept: int, out: Tensor, workspace: Workspace) -> None:
        if self._kernels is None or not self._kernels.take(x):
            select_largest(x, num_kept, out, workspace)
            return
        sample = sample_values(x, num_kept, workspace)
        room = max_candidates(x.numel(), num_kept)
        indices = workspace.take("topk.room", (room,), torch.int64)
        values = workspace.take("topk.candidates", (room,), torch.float32)
        self._kernels.largest(
            x, num_kept, indices, values, sample, num_wanted_in_sample(x.numel(), num_kept, sample.numel())
        )
        out.copy_(indices[:num_kept])

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """Write the values at their indices, and zeros elsewhere."""
        rows, num_values = out.shape
        num_kept, width = self.num_kept(num_values), index_bytes(num_values)
        first = self._values.num_bytes(num_kept)
        short = workspace.take("topk.read", (rows, num_kept, 4), torch.uint8, out.device).zero_()
        short[:, :, :width] = payload[:, first:].view(rows, num_kept, width)
        indices = workspace.take("topk.places", (rows, num_kept), torch.int64, out.device)
        indices.copy_(short.view(torch.int32).view(rows, num_kept))
        values = workspace.take("topk.values", indices.shape, out.dtype, out.device)
        self._values.decode(payload[:, :first], values, keys, workspace)
        out.zero_().scatter_(1, indices, values)


class RandomKCodec:
    """A codec of k values of a row, at positions that depend on seed, step and buffer, so only values are
    sent.

    They are not scaled up: with error feedback the others are sent later.

    Args:
        num_kept: k.
        values: codec of the k values.
    Source: Stich et al. 2018, Sparsified SGD with Memory, arXiv:1809.07599, Definition 2.1 (rand-k).
    """

    needs_error_feedback, ragged, block = True, False, 0

    def __init__(self, num_kept: KeepCount, values: Codec | None = None) -> None:
        self.num_kept, self._values = num_kept, values or Float32Codec()

    def with_values(self, values: Codec) -> RandomKCodec:
        """Return the same selection with another codec for the values."""
        return RandomKCodec(self.num_kept, values)

    def num_bytes(self, num_values: int) -> int:
        """Return the bytes of k values, and one that says whether all of the row is finite."""
        return 1 + self._values.num_bytes(self.num_kept(num_values))

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """Write a byte that says whether the row is finite, then the values at the drawn positions."""
        rows, num_values = x.shape
        indices = self._draw_indices(num_values, keys, workspace, x.device)
        chosen = workspace.take("randomk.values", (rows, len(indices)), x.dtype, x.device)
        torch.index_select(x, 1, indices, out=chosen)
        out = workspace.take("randomk", (rows, self.num_bytes(num_values)), torch.uint8, x.device)
        out[:, :1] = row_max_abs(x).isfinite()
        out[:, 1:] = self._values.encode(chosen, keys, workspace)
        return out

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        rows, num_values = out.shape
        indices = self._draw_indices(num_values, keys, workspace, out.device)
        values = workspace.take("randomk.values", (rows, len(indices)), out.dtype, out.device)
        self._values.decode(payload[:, 1:], values, keys, workspace)
        # The drawn positions may all miss a value that is not finite, so one byte says whether there is one.
        values.masked_fill_(payload[:, :1] == 0, torch.nan)
        out.zero_().index_copy_(1, indices, values)

    def _draw_indices(
        self, num_values: int, keys: CodecKeys, workspace: Workspace, device: torch.device
    ) -> Tensor:
        """Draw k different positions, one in each of k runs whose lengths differ by at most one."""
        num_kept = self.num_kept(num_values)
        ends = torch.arange(num_kept + 1, out=workspace.take("randomk.ends", (num_kept + 1,), torch.int64))
        ends.mul_(num_values).floor_divide_(max(1, num_kept))
        # The shared key: every rank has to draw the positions that the sender drew.
        draw = torch.Generator().manual_seed(keys.shared)
        within = workspace.take("randomk.within", (num_kept,), torch.float64)
        torch.rand(num_kept, generator=draw, dtype=torch.float64, out=within)
        indices = workspace.take("randomk.places", (num_kept,), torch.int64)
        torch.sub(ends[1:], ends[:-1], out=indices)
        wide = workspace.take("randomk.wide", (num_kept,), torch.float64).copy_(indices)
        indices.copy_(within.mul_(wide)).add_(ends[:-1])
        return indices.to(device)


def index_bytes(num_values: int) -> int:
    """Return the bytes of an index into a row, 1 to 4."""
    return max(1, -(-max(0, num_values - 1).bit_length() // 8))


def make_keep_count(count_or_share: int | float) -> KeepCount:
    """Return k of a row for a count (an int), or for a share of the row that is rounded up (a float)."""
    if isinstance(count_or_share, int):
        return lambda num_values: min(num_values, count_or_share)
    return lambda num_values: min(num_values, ceil(count_or_share * num_values))


def top_k(argument: int | float) -> Codec:
    """Build the codec of the word `topk:K`."""
    return TopKCodec(make_keep_count(argument), kernels=load_kernels())


def deep_gradient_compression_codec(argument: DgcArgument) -> Codec:
    """Build the codec of the word `dgc:K:M:C`: the encoding is that of `topk:K`; sums add momentum before
    it.
    """
    return top_k(argument.kept)


def random_k(argument: int | float) -> Codec:
    """Build the codec of the word `randomk:K`."""
    return RandomKCodec(make_keep_count(argument))


def code_kept_values(choice: TopKCodec | RandomKCodec, values: Codec) -> Codec:
    """Build the codec of `topk:K+int4`: a selection whose values are encoded by another codec."""
    return choice.with_values(values)
