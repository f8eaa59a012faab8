"""The largest magnitudes of a row: a sample says where to look, so that few values are ranked.

Some values of a row, each with its place; the others count as zero.

Without error feedback this loses most of a gradient for good; `comm.collectives.coded` keeps what is left out
and sends it later. How the values themselves travel is another codec's matter: `topk:0.01+int4`.
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
from paceline.errors import StrategyError

_MIN_SAMPLED_VALUES = 1 << 14  # rows longer than this are searched for a threshold first
_NUM_SAMPLES = 1 << 13
_SAMPLE_MARGIN, _SAMPLE_EXTRA = 1.25, 16
_CANDIDATES_PER_SAMPLE = (
    64  # times the values that one of a sample stands for: room for candidates, beside twice k
)


def select_largest(x: Tensor, kept: int, out: Tensor, workspace: Workspace) -> None:
    """Write the places of the `kept` largest magnitudes of `x` [n], ascending, into `out` int64 [kept]; among
    equals the first.

    A sample gives a threshold that a few more values reach than are wanted; only these are ranked. If too
    few do, all are. What is not finite counts as largest.
    """
    if not kept:
        return
    candidates = _candidate_positions(x, kept, workspace)
    if candidates is None:
        out.copy_(_select_among(x, kept, x.numel(), workspace))
        return
    room = max_candidates(x.numel(), kept)
    values = workspace.take("topk.likely", candidates.shape, x.dtype, x.device, room=room)
    torch.index_select(x, 0, candidates, out=values)
    torch.index_select(candidates, 0, _select_among(values, kept, room, workspace), out=out)


def _select_among(values: Tensor, kept: int, room: int, workspace: Workspace) -> Tensor:
    """Places in `values` [n], ascending: what is larger than the smallest that is kept, and the first of its
    size. A sort would find the same, and allocate.
    """
    sizes, larger, equal = (
        workspace.take(f"topk.{name}", values.shape, dtype, values.device, room=room)
        for name, dtype in (("sizes", values.dtype), ("larger", torch.bool), ("equal", torch.bool))
    )
    torch.abs(values, out=sizes).nan_to_num_(torch.inf, torch.inf)
    least = _largest_values(sizes, kept, workspace).min()
    torch.gt(sizes, least, out=larger)
    torch.eq(sizes, least, out=equal)
    missing = kept - int(larger.count_nonzero())
    larger.index_fill_(0, _mask_positions(equal, room, workspace, "topk.ties")[:missing], True)
    return _mask_positions(larger, room, workspace, "topk.first")


def _largest_values(sizes: Tensor, wanted: int, workspace: Workspace) -> Tensor:
    """The largest of some sizes, in any order."""
    found = workspace.take("topk.most", (wanted,), sizes.dtype, sizes.device)
    where = workspace.take("topk.where", (wanted,), torch.int64, sizes.device)
    torch.topk(sizes, wanted, sorted=False, out=(found, where))
    return found


def sample_values(x: Tensor, kept: int, workspace: Workspace) -> Tensor:
    """Some values of `x` [n], evenly spread; none where looking at all of them costs less."""
    num_values = x.numel()
    if num_values < _MIN_SAMPLED_VALUES or kept > num_values // 4:
        return x[:0]
    sample = x[:: num_values // _NUM_SAMPLES]
    return workspace.like("topk.sample", sample).copy_(sample)


def num_wanted_in_sample(num_values: int, kept: int, num_samples: int) -> int:
    """How many of a sample lie above a size that `kept` of all values, and a few more, reach; pure."""
    return (
        min(num_samples, ceil(_SAMPLE_MARGIN * kept * num_samples / num_values) + _SAMPLE_EXTRA)
        if num_samples
        else 0
    )


def _candidate_positions(x: Tensor, kept: int, workspace: Workspace) -> Tensor | None:
    """Places that hold the `kept` largest, ascending; None: look at all."""
    sample = sample_values(x, kept, workspace)
    if not sample.numel():
        return None
    wanted = num_wanted_in_sample(x.numel(), kept, sample.numel())
    threshold = _largest_values(sample.abs_().nan_to_num_(torch.inf), wanted, workspace).min()
    reaches = workspace.take("topk.reaches", x.shape, torch.bool, x.device)
    if threshold > 0:
        torch.lt(torch.abs(x, out=workspace.like("topk.all", x)), threshold, out=reaches).logical_not_()
    else:
        _fill_mask(torch.ne(x, 0, out=reaches), kept, workspace)
    found = _mask_positions(reaches, max_candidates(x.numel(), kept), workspace, "topk.reaching")
    return found if found.numel() >= kept else None


def _fill_mask(holds: Tensor, kept: int, workspace: Workspace) -> None:
    """Let a mask [n] hold at `kept` places: where it does, and at the first others, all among as many."""
    missing = kept - int(holds.count_nonzero())
    if missing > 0:
        others = workspace.take("topk.others", (kept,), torch.bool, holds.device)
        torch.logical_not(holds[:kept], out=others)
        holds.index_fill_(0, _mask_positions(others, kept, workspace, "topk.zeros")[:missing], True)


def _mask_positions(holds: Tensor, room: int, workspace: Workspace, name: str) -> Tensor:
    """Where a mask [n] is true, ascending."""
    place = workspace.take(name, (int(holds.count_nonzero()), 1), torch.int64, holds.device, room=room)
    return torch.nonzero(holds, out=place).view(-1)


def max_candidates(num_values: int, kept: int) -> int:
    """How many values may reach the size that a sample gives; where more do, all are looked at. Pure."""
    return 2 * kept + _CANDIDATES_PER_SAMPLE * (num_values // _NUM_SAMPLES)


KeepCount = Callable[[int], int]
"""How many values of a row of so many are kept."""

DGC_MOMENTUM = "0.9"
"""Of `dgc`, where the argument does not say."""


class Float32Codec:
    """float32, as it is."""

    needs_error_feedback = ragged = False
    block = 1

    def num_bytes(self, num_values: int) -> int:
        """4 n."""
        return 4 * num_values

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """See `Codec`."""
        return bytes_of(workspace.copy("floats", x, torch.float32))

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """See `Codec`."""
        out.copy_(values_of(payload, torch.float32, workspace))


class TopKCodec:
    """The k values of a row that have the largest magnitude; among equals the first.

    Args:
        num_kept: k.
        values: the form in which they travel.
        kernels: look for them in rows of float32; None: PyTorch does, and finds the same.
    Source: Aji and Heafield 2017, Sparse Communication for Distributed Gradient Descent, arXiv:1704.05021,
    section 3; Stich et al. 2018, Sparsified SGD with Memory, arXiv:1809.07599, Algorithm 1 (memory).
    """

    needs_error_feedback, ragged, block = True, False, 0

    def __init__(
        self, num_kept: KeepCount, values: Codec | None = None, kernels: CodecKernels | None = None
    ) -> None:
        self.num_kept, self._values, self._kernels = num_kept, values or Float32Codec(), kernels

    def with_values(self, values: Codec) -> TopKCodec:
        """The same choice, in another form."""
        return TopKCodec(self.num_kept, values, self._kernels)

    def num_bytes(self, num_values: int) -> int:
        """The bytes of k values, and k places of 1 to 4 bytes, as many as n - 1 needs."""
        kept = self.num_kept(num_values)
        return self._values.num_bytes(kept) + kept * index_bytes(num_values)

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """See `Codec`; places ascend."""
        rows, num_values = x.shape
        kept, width = self.num_kept(num_values), index_bytes(num_values)
        places = workspace.take("topk.places", (rows, kept), torch.int64, x.device)
        for row, found in zip(x, places, strict=True):
            self._largest(row, kept, found, workspace)
        chosen = torch.gather(
            x, 1, places, out=workspace.take("topk.values", places.shape, x.dtype, x.device)
        )
        out = workspace.take("topk", (rows, self.num_bytes(num_values)), torch.uint8, x.device)
        first = self._values.num_bytes(kept)
        out[:, :first] = self._values.encode(chosen, keys, workspace)
        short = workspace.take("topk.short", places.shape, torch.int32, x.device).copy_(places)
        out[:, first:].view(rows, kept, width).copy_(
            short.view(torch.uint8).view(rows, kept, 4)[:, :, :width]
        )
        return out

    def _largest(self, x: Tensor, kept: int, out: Tensor, workspace: Workspace) -> None:
        if self._kernels is None or not self._kernels.take(x):
            select_largest(x, kept, out, workspace)
            return
        sample = sample_values(x, kept, workspace)
        room = max_candidates(x.numel(), kept)
        places = workspace.take("topk.room", (room,), torch.int64)
        values = workspace.take("topk.candidates", (room,), torch.float32)
        self._kernels.largest(
            x, kept, places, values, sample, num_wanted_in_sample(x.numel(), kept, sample.numel())
        )
        out.copy_(places[:kept])

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """See `Codec`."""
        rows, num_values = out.shape
        kept, width = self.num_kept(num_values), index_bytes(num_values)
        first = self._values.num_bytes(kept)
        short = workspace.take("topk.read", (rows, kept, 4), torch.uint8, out.device).zero_()
        short[:, :, :width] = payload[:, first:].view(rows, kept, width)
        places = workspace.take("topk.places", (rows, kept), torch.int64, out.device)
        places.copy_(short.view(torch.int32).view(rows, kept))
        found = workspace.take("topk.values", places.shape, out.dtype, out.device)
        self._values.decode(payload[:, :first], found, keys, workspace)
        out.zero_().scatter_(1, places, found)


class RandomKCodec:
    """k values of a row at places that are functions of seed, step and buffer, so only values travel.

    They are not scaled up: with error feedback what is left out comes later.

    Args:
        num_kept: k.
        values: the form in which they travel.
    Source: Stich et al. 2018, Sparsified SGD with Memory, arXiv:1809.07599, Definition 2.1 (rand-k).
    """

    needs_error_feedback, ragged, block = True, False, 0

    def __init__(self, num_kept: KeepCount, values: Codec | None = None) -> None:
        self.num_kept, self._values = num_kept, values or Float32Codec()

    def with_values(self, values: Codec) -> RandomKCodec:
        """The same choice, in another form."""
        return RandomKCodec(self.num_kept, values)

    def num_bytes(self, num_values: int) -> int:
        """The bytes of k values, and one that says whether all of the row is finite."""
        return 1 + self._values.num_bytes(self.num_kept(num_values))

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """See `Codec`."""
        rows, num_values = x.shape
        places = self._places(num_values, keys, workspace, x.device)
        chosen = workspace.take("randomk.values", (rows, len(places)), x.dtype, x.device)
        torch.index_select(x, 1, places, out=chosen)
        out = workspace.take("randomk", (rows, self.num_bytes(num_values)), torch.uint8, x.device)
        out[:, :1] = row_max_abs(x).isfinite()
        out[:, 1:] = self._values.encode(chosen, keys, workspace)
        return out

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """See `Codec`."""
        rows, num_values = out.shape
        places = self._places(num_values, keys, workspace, out.device)
        found = workspace.take("randomk.values", (rows, len(places)), out.dtype, out.device)
        self._values.decode(payload[:, 1:], found, keys, workspace)
        found.masked_fill_(payload[:, :1] == 0, torch.nan)
        out.zero_().index_copy_(1, places, found)

    def _places(self, num_values: int, keys: CodecKeys, workspace: Workspace, device: torch.device) -> Tensor:
        """k different places, one in each of k stretches that are as equal as can be."""
        kept = self.num_kept(num_values)
        ends = torch.arange(kept + 1, out=workspace.take("randomk.ends", (kept + 1,), torch.int64))
        ends.mul_(num_values).floor_divide_(max(1, kept))
        draw = torch.Generator().manual_seed(keys.shared)
        within = workspace.take("randomk.within", (kept,), torch.float64)
        torch.rand(kept, generator=draw, dtype=torch.float64, out=within)
        places = workspace.take("randomk.places", (kept,), torch.int64)
        torch.sub(ends[1:], ends[:-1], out=places)
        wide = workspace.take("randomk.wide", (kept,), torch.float64).copy_(places)
        places.copy_(within.mul_(wide)).add_(ends[:-1])
        return places.to(device)


def index_bytes(num_values: int) -> int:
    """Bytes of a place in a row, 1 to 4."""
    return max(1, -(-max(0, num_values - 1).bit_length() // 8))


def parse_keep_count(argument: str) -> KeepCount:
    """k of a row, from a count (`100`) or a share of it, rounded up (`0.01`).

    Raises:
        StrategyError: it keeps nothing, or more than all.
    """
    if argument.isdecimal():
        count = int(argument)
        if count:
            return lambda num_values: min(num_values, count)
    elif 0.0 < (share := float(argument)) <= 1.0:
        return lambda num_values: min(num_values, ceil(share * num_values))
    raise StrategyError(
        f"{argument} keeps no share of the values",
        next_step="choose a share above 0, as in topk:0.01, or a count, as in topk:1000",
    )


def top_k(argument: str) -> Codec:
    """The word `topk:K`."""
    return TopKCodec(parse_keep_count(argument), kernels=load_kernels())


def deep_gradient_compression_codec(argument: str) -> Codec:
    """The word `dgc:K:M:C`: what travels is that of `topk:K`; where ranks sum, velocities are sent."""
    return top_k(argument.partition(":")[0])


def random_k(argument: str) -> Codec:
    """The word `randomk:K`."""
    return RandomKCodec(parse_keep_count(argument))


def code_kept_values(choice: TopKCodec | RandomKCodec, values: Codec) -> Codec:
    """`topk:K+int4`: a choice whose values travel in another form."""
    return choice.with_values(values)
