"""Wires: how a reducer's flat buffers are summed over a group, plainly or through a codec.

Invariant: what `wait` returns is equal on every rank that gets it. A coded wire keeps, for each buffer, what
coding lost, and adds it to the next values of the same buffer (error feedback); a step that is
aborted leaves these residuals as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.codec import Codec
from paceline.comm.net import Net
from paceline.mesh import Group


class Waits(Protocol):
    """A sum under way."""

    def wait(self) -> Any:
        """Block until it is there, and return it."""


class Wire(Protocol):
    """Sums over one group; `key` names the buffer, the same in every step."""

    @property
    def group(self) -> Group:
        """Who sums."""

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """Zeros [n] of the dtype and on the device of `like`, where sums of `key` cost least; collective."""

    def commit(self) -> None:
        """The present step has been applied."""

    def all_reduce(self, x: Tensor, key: str) -> Waits:
        """Sum `x` [n] over the group, in place; the handle returns it."""

    def reduce_scatter(self, x: Tensor, key: str) -> Waits:
        """Sum `x` [P, n]; the handle returns row `group.rank` of the sum, [n]."""

    def abort(self) -> None:
        """Forget the present step."""

    def residuals(self) -> dict[str, Residual]:
        """What coding has lost so far, by key."""

    def set_residuals(self, found: dict[str, Residual]) -> None:
        """Go on from these."""


@dataclass(frozen=True)
class Residual:
    """What one rank's coding lost of one buffer.

    Args:
        sent: of its own values, in the shape of the buffer.
        owned: of the sum of the part that it coded for all, [part]; None where nobody codes sums.
    """

    sent: Tensor
    owned: Tensor | None = None

    def flats(self, rank: int, num_values: int) -> list[tuple[str, Tensor]]:
        """By side, as long as the buffer: what this rank owns is in its place, zeros around it."""
        found = [("sent", self.sent.reshape(-1)[:num_values])]
        if self.owned is not None:
            whole = torch.zeros_like(self.sent)
            whole[rank] = self.owned
            found.append(("owned", whole.reshape(-1)[:num_values]))
        return found

    @classmethod
    def of_flats(cls, flats: Mapping[str, Tensor], group: Group) -> Residual:
        """The inverse of `flats`."""
        return cls(in_parts(flats["sent"], group.size), in_parts(flats["owned"], group.size)[group.rank])


class PlainWire:
    """Values travel as they are.

    Wire: all_reduce 2 (P-1)/P n bytes, reduce_scatter (P-1)/P n.
    """

    def __init__(self, net: Net, group: Group) -> None:
        self.net, self.group = net, group

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Wire`."""
        return like.new_zeros(num_values)

    def commit(self) -> None:
        """Nothing is kept between steps."""

    def all_reduce(self, x: Tensor, key: str) -> Waits:
        """See `Wire`."""
        return self.net.all_reduce(x, self.group)

    def reduce_scatter(self, x: Tensor, key: str) -> Waits:
        """See `Wire`; the result is a tensor of its own."""
        handle = self.net.reduce_scatter(x, self.group)
        return _Then(lambda: handle.wait().view(-1))

    def abort(self) -> None:
        """Nothing is kept between steps."""

    def residuals(self) -> dict[str, Residual]:
        """None: nothing is lost."""
        return {}

    def set_residuals(self, found: dict[str, Residual]) -> None:
        """There are none to keep."""


@dataclass(frozen=True)
class _Then:
    """A result that takes some work after the wait."""

    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        return self.finish()


class CodedWire:
    """Values travel through a codec, with error feedback on both sides.

    A buffer is cut into P parts; each rank codes its parts and sends them to their owners, who decode, add
    in the order of the ranks, code the sum and send it to all.

    Wire: with c bytes for a coded part, all_reduce 2 (P-1) c bytes, reduce_scatter (P-1) c.
    Exactness: approximate; equal bits on every rank.
    Source: Seide et al. 2014, 1-Bit Stochastic Gradient Descent (error feedback); Tang et al. 2021, 1-bit
    Adam, arXiv:2102.02888, section 4 (compensation on workers and owners).
    """

    def __init__(self, net: Net, group: Group, codec: Codec) -> None:
        self.net, self.group, self.codec = net, group, codec
        self._kept: dict[str, Residual] = {}
        self._pending: dict[str, Residual] = {}

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Wire`."""
        return like.new_zeros(num_values)

    def commit(self) -> None:
        """Keep what this step has lost."""
        self._kept.update(self._pending)
        self._pending = {}

    def all_reduce(self, x: Tensor, key: str) -> Waits:
        """See `Wire`."""
        parts = in_parts(x, self.group.size)
        scattered = self.reduce_scatter(parts, key)
        return _Then(lambda: self._share(scattered.wait(), x, key))

    def reduce_scatter(self, x: Tensor, key: str) -> Waits:
        """See `Wire`."""
        before = self._kept.get(key)
        values = x if before is None else x + before.sent
        payload = self.codec.encode(values)
        kept = values - self.codec.decode(payload, x.shape[1], x.dtype)
        self._pending[key] = Residual(_finite(kept), None if before is None else before.owned)
        handle = self.net.all_to_all(list(payload), self.group)

        def add_up() -> Tensor:
            found = self.codec.decode(torch.stack(handle.wait()), x.shape[1], x.dtype)
            return found.sum(0)

        return _Then(add_up)

    def _share(self, mine: Tensor, x: Tensor, key: str) -> Tensor:
        """Code the sum of this rank's part and give it to all."""
        sent, owned = self._pending[key].sent, self._pending[key].owned
        values = (mine if owned is None else mine + owned).unsqueeze(0)
        payload = self.codec.encode(values)
        lost = values - self.codec.decode(payload, values.shape[1], x.dtype)
        self._pending[key] = Residual(sent, _finite(lost)[0])
        found = torch.cat(self.net.all_gather(payload, self.group).wait())
        return x.copy_(self.codec.decode(found, values.shape[1], x.dtype).reshape(-1)[: x.numel()])

    def abort(self) -> None:
        """Drop what the half step lost."""
        self._pending = {}

    def residuals(self) -> dict[str, Residual]:
        """See `Wire`."""
        return self._kept | self._pending

    def set_residuals(self, found: dict[str, Residual]) -> None:
        """See `Wire`."""
        self._kept, self._pending = dict(found), {}


def in_parts(x: Tensor, num_parts: int) -> Tensor:
    """[n] as [P, ceil(n / P)], the end filled with zeros."""
    width = -(-x.numel() // num_parts)
    out = x.new_zeros(num_parts * width)
    out[: x.numel()] = x
    return out.view(num_parts, width)


def _finite(x: Tensor) -> Tensor:
    """An overflow is seen by all in this step, and must not stay."""
    return x.nan_to_num_(0.0, 0.0, 0.0)
