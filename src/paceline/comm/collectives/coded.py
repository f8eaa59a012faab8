"""Sums of coded values, with error feedback on both sides.

A buffer is cut into P parts; each rank codes its parts and sends them to their owners, who decode, add in the
order of the ranks, code the sum and send it to all. What is lost on the way is kept, and added to the
next values of the same buffer. A step that is aborted leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.codecs import Codec
from paceline.comm.collectives.collective import Exchanging, in_parts
from paceline.comm.handle import Handle
from paceline.mesh import Group


@dataclass(frozen=True)
class _Lost:
    """What this rank's coding lost of one buffer.

    Args:
        sent: of its own values, [P, part].
        owned: of the sum of the part that it coded for all, [part]; None where nobody codes sums.
    """

    sent: Tensor
    owned: Tensor | None = None


class CodedCollective:
    """A collective whose sums travel through a codec.

    Args:
        inner: the path; it carries bytes.
        codec: the form.
    Wire: with c bytes for a coded part, all_reduce 2 (P-1) c bytes, reduce_scatter (P-1) c.
    Exactness: approximate; equal bits on every rank.
    Source: Seide et al. 2014, 1-Bit Stochastic Gradient Descent (error feedback); Tang et al. 2021, 1-bit
    Adam, arXiv:2102.02888, section 4 (compensation on workers and owners).
    """

    def __init__(self, inner: Exchanging, codec: Codec) -> None:
        self._inner, self.codec = inner, codec
        self._kept: dict[str, _Lost] = {}
        self._pending: dict[str, _Lost] = {}

    @property
    def group(self) -> Group:
        """See `Collective`."""
        return self._inner.group

    @property
    def feedback(self) -> CodedCollective:
        """See `Collective`."""
        return self

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Collective`."""
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        parts = in_parts(x, self.group.size)
        return self.reduce_scatter(parts, key).then(lambda mine: self._share(mine, x, key))

    def reduce_scatter(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        before = self._kept.get(key)
        values = x if before is None else x + before.sent
        payload = self.codec.encode(values)
        lost = values - self.codec.decode(payload, x.shape[1], x.dtype)
        self._pending[key] = _Lost(_finite(lost), None if before is None else before.owned)

        def add_up(arrived: Tensor) -> Tensor:
            return self.codec.decode(arrived, x.shape[1], x.dtype).sum(0)

        return self._inner.all_to_all(payload, key).then(add_up)

    def _share(self, mine: Tensor, x: Tensor, key: str) -> Tensor:
        """Code the sum of this rank's part and give it to all."""
        sent, owned = self._pending[key].sent, self._pending[key].owned
        values = (mine if owned is None else mine + owned).unsqueeze(0)
        payload = self.codec.encode(values)
        lost = values - self.codec.decode(payload, values.shape[1], x.dtype)
        self._pending[key] = _Lost(sent, _finite(lost)[0])
        found = self._inner.all_gather(payload[0], f"{key}.sum").wait()
        return x.copy_(self.codec.decode(found, values.shape[1], x.dtype).reshape(-1)[: x.numel()])

    def all_gather(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        return self._inner.all_gather(x, key)

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """See `Collective`."""
        return self._inner.broadcast(x, key, source)

    def commit(self) -> None:
        """See `Feedback`."""
        self._kept.update(self._pending)
        self._pending = {}

    def abort(self) -> None:
        """See `Collective`."""
        self._pending = {}
        self._inner.abort()

    def lost(self, key: str, num_values: int) -> Mapping[str, Tensor]:
        """See `Feedback`."""
        found = self._pending.get(key, self._kept.get(key))
        if found is None:
            return {}
        flats = {"sent": found.sent.reshape(-1)[:num_values]}
        if found.owned is not None:
            whole = torch.zeros_like(found.sent)
            whole[self.group.rank] = found.owned
            flats["owned"] = whole.reshape(-1)[:num_values]
        return flats

    def set_lost(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """See `Feedback`."""
        owned = flats.get("owned")
        self._kept[key] = _Lost(
            in_parts(flats["sent"], self.group.size),
            None if owned is None else in_parts(owned, self.group.size)[self.group.rank],
        )

    def clear(self) -> None:
        """See `Feedback`."""
        self._kept, self._pending = {}, {}


def _finite(x: Tensor) -> Tensor:
    """An overflow is seen by all in this step, and must not stay."""
    return x.nan_to_num_(0.0, 0.0, 0.0)
