"""Some values of a row, each with its place; the others count as zero.

Without error feedback this loses most of a gradient for good; `comm.collectives.coded` keeps what is left out
and sends it later. How the values themselves travel is another codec's matter: `topk:0.01+int4`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from paceline.comm.codecs.codec import Codec, Keys, bytes_of, values_of
from paceline.comm.codecs.halves import top_of
from paceline.comm.codecs.selection import largest, num_candidates, num_wanted, sample_of
from paceline.comm.kernels import Kernels, load_kernels
from paceline.comm.workspace import Workspace
from paceline.errors import StrategyError

NumKept = Callable[[int], int]
"""How many values of a row of so many are kept."""

MOMENTUM = "0.9"
"""Of `dgc`, where the argument does not say."""


class Floats:
    """float32, as it is."""

    loses = ragged = False
    block = 1

    def num_bytes(self, num_values: int) -> int:
        """4 n."""
        return 4 * num_values

    def encode(self, x: Tensor, keys: Keys, workspace: Workspace) -> Tensor:
        """See `Codec`."""
        return bytes_of(workspace.copy("floats", x, torch.float32))

    def decode(self, payload: Tensor, out: Tensor, keys: Keys, workspace: Workspace) -> None:
        """See `Codec`."""
        out.copy_(values_of(payload, torch.float32, workspace))


class TopK:
    """The k values of a row that have the largest magnitude; among equals the first.

    Args:
        num_kept: k.
        values: the form in which they travel.
        kernels: look for them in rows of float32; None: PyTorch does, and finds the same.
    Source: Aji and Heafield 2017, Sparse Communication for Distributed Gradient Descent, arXiv:1704.05021,
    section 3; Stich et al. 2018, Sparsified SGD with Memory, arXiv:1809.07599, Algorithm 1 (memory).
    """

    loses, ragged, block = True, False, 0

    def __init__(
        self, num_kept: NumKept, values: Codec | None = None, kernels: Kernels | None = None
    ) -> None:
        self.num_kept, self._values, self._kernels = num_kept, values or Floats(), kernels

    def with_values(self, values: Codec) -> TopK:
        """The same choice, in another form."""
        return TopK(self.num_kept, values, self._kernels)

    def num_bytes(self, num_values: int) -> int:
        """The bytes of k values, and k places of 1 to 4 bytes, as many as n - 1 needs."""
        kept = self.num_kept(num_values)
        return self._values.num_bytes(kept) + kept * place_bytes(num_values)

    def encode(self, x: Tensor, keys: Keys, workspace: Workspace) -> Tensor:
        """See `Codec`; places ascend."""
        rows, num_values = x.shape
        kept, width = self.num_kept(num_values), place_bytes(num_values)
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
            largest(x, kept, out, workspace)
            return
        sample = sample_of(x, kept, workspace)
        room = num_candidates(x.numel(), kept)
        places = workspace.take("topk.room", (room,), torch.int64)
        values = workspace.take("topk.candidates", (room,), torch.float32)
        self._kernels.largest(x, kept, places, values, sample, num_wanted(x.numel(), kept, sample.numel()))
        out.copy_(places[:kept])

    def decode(self, payload: Tensor, out: Tensor, keys: Keys, workspace: Workspace) -> None:
        """See `Codec`."""
        rows, num_values = out.shape
        kept, width = self.num_kept(num_values), place_bytes(num_values)
        first = self._values.num_bytes(kept)
        short = workspace.take("topk.read", (rows, kept, 4), torch.uint8, out.device).zero_()
        short[:, :, :width] = payload[:, first:].view(rows, kept, width)
        places = workspace.take("topk.places", (rows, kept), torch.int64, out.device)
        places.copy_(short.view(torch.int32).view(rows, kept))
        found = workspace.take("topk.values", places.shape, out.dtype, out.device)
        self._values.decode(payload[:, :first], found, keys, workspace)
        out.zero_().scatter_(1, places, found)


class RandomK:
    """k values of a row at places that are functions of seed, step and buffer, so only values travel.

    They are not scaled up: with error feedback what is left out comes later.

    Args:
        num_kept: k.
        values: the form in which they travel.
    Source: Stich et al. 2018, Sparsified SGD with Memory, arXiv:1809.07599, Definition 2.1 (rand-k).
    """

    loses, ragged, block = True, False, 0

    def __init__(self, num_kept: NumKept, values: Codec | None = None) -> None:
        self.num_kept, self._values = num_kept, values or Floats()

    def with_values(self, values: Codec) -> RandomK:
        """The same choice, in another form."""
        return RandomK(self.num_kept, values)

    def num_bytes(self, num_values: int) -> int:
        """The bytes of k values, and one that says whether all of the row is finite."""
        return 1 + self._values.num_bytes(self.num_kept(num_values))

    def encode(self, x: Tensor, keys: Keys, workspace: Workspace) -> Tensor:
        """See `Codec`."""
        rows, num_values = x.shape
        places = self._places(num_values, keys, workspace, x.device)
        chosen = workspace.take("randomk.values", (rows, len(places)), x.dtype, x.device)
        torch.index_select(x, 1, places, out=chosen)
        out = workspace.take("randomk", (rows, self.num_bytes(num_values)), torch.uint8, x.device)
        out[:, :1] = top_of(x).isfinite()
        out[:, 1:] = self._values.encode(chosen, keys, workspace)
        return out

    def decode(self, payload: Tensor, out: Tensor, keys: Keys, workspace: Workspace) -> None:
        """See `Codec`."""
        rows, num_values = out.shape
        places = self._places(num_values, keys, workspace, out.device)
        found = workspace.take("randomk.values", (rows, len(places)), out.dtype, out.device)
        self._values.decode(payload[:, 1:], found, keys, workspace)
        found.masked_fill_(payload[:, :1] == 0, torch.nan)
        out.zero_().index_copy_(1, places, found)

    def _places(self, num_values: int, keys: Keys, workspace: Workspace, device: torch.device) -> Tensor:
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


def place_bytes(num_values: int) -> int:
    """Bytes of a place in a row, 1 to 4."""
    return max(1, -(-max(0, num_values - 1).bit_length() // 8))


def num_kept(argument: str) -> NumKept:
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
    return TopK(num_kept(argument), kernels=load_kernels())


def corrected(argument: str) -> Codec:
    """The word `dgc:K:M:C`: what travels is that of `topk:K`; where ranks sum, velocities are sent."""
    return top_k(argument.partition(":")[0])


def random_k(argument: str) -> Codec:
    """The word `randomk:K`."""
    return RandomK(num_kept(argument))


def coded_values(choice: TopK | RandomK, values: Codec) -> Codec:
    """`topk:K+int4`: a choice whose values travel in another form."""
    return choice.with_values(values)
