"""Sums of coded values, with error feedback on both sides.

A buffer is cut into P parts; each rank codes its parts and sends them to their owners, who decode, add in the
order of the ranks, code the sum and send it to all. So values are coded twice, however many ranks there are,
and nothing is coded again at every hop. What is lost on the way is kept, and added to the next values of the
same buffer; a step that is aborted leaves it as it was. All of it runs on a `Line`, beside the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.comm.codecs import Codec, Keys
from paceline.comm.codecs.low_rank import Matrix
from paceline.comm.codecs.sparse import MOMENTUM, TopK, num_kept
from paceline.comm.collectives.collective import Exchanging, in_parts
from paceline.comm.collectives.lost import Lost, finite
from paceline.comm.handle import Handle
from paceline.comm.line import Line
from paceline.keys import key as hashed
from paceline.mesh import Group


class CodedCollective:
    """A collective whose sums travel through a codec.

    Args:
        inner: the path; it carries bytes. Its process group is its own: a thread of this object uses it.
        codec: the form.
        seed: of random numbers; they are functions of seed, step and buffer.
        momentum: of the values before they are coded; 0: none.
    Wire: with c bytes for a coded part, all_reduce 2 (P-1) c bytes, reduce_scatter (P-1) c; where rows are
        ragged one all_gather of 8 bytes goes before each, and c is the longest of them.
    Exactness: that of the codec; equal bits on every rank.
    Source: Seide et al. 2014, 1-Bit Stochastic Gradient Descent (error feedback); Tang et al. 2019,
    DoubleSqueeze, arXiv:1905.05957, Algorithm 1 (compensation on workers and owners).
    """

    def __init__(self, inner: Exchanging, codec: Codec, *, seed: int = 0, momentum: float = 0.0) -> None:
        self._inner, self.codec, self._seed, self._momentum = inner, codec, seed, momentum
        self._line = Line(f"{inner.group.name}-coded", self._waited)
        self._kept: dict[str, Lost] = {}
        self._pending: dict[str, Lost] = {}
        self._spare: dict[str, Lost] = {}  # memory of the step before the last
        self._one = torch.empty(1, 0)

    @property
    def group(self) -> Group:
        """See `Collective`."""
        return self._inner.group

    @property
    def feedback(self) -> CodedCollective | None:
        """See `Collective`; None where what is decoded is right on average."""
        return self if self.codec.loses else None

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Collective`."""
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        if x.numel() == 0:
            return Handle.ready(x)
        keys = self._keys(key)

        def hops() -> Tensor:
            mine = self._sum(in_parts(x, self.group.size), key, keys, shared=True)
            return self._share(mine, x, key, keys)

        return self._line.submit("all_to_all", hops)

    def reduce_scatter(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        if x.numel() == 0:
            return Handle.ready(torch.empty_like(x[0]))
        return self._line.submit("all_to_all", partial(self._sum, x, key, self._keys(key), shared=False))

    def _sum(self, x: Tensor, key: str, keys: Keys, shared: bool) -> Tensor:
        """Code and exchange the rows of `x` [P, n], and add up those of this rank; `shared`: coded again
        then.
        """
        before, values = self._kept.get(key), x
        own = self._opened(key, x) if self.codec.loses else None
        if own is not None:
            values = own.add(x, before, self._momentum)
        payload = self.codec.encode(values, keys)
        one = self._scratch(x.shape[1], x)
        if own is not None:
            for row, coded in enumerate(payload):
                self.codec.decode(coded.unsqueeze(0), one, keys)
                own.take_out(row, one[0])
        arrived = self._inner.all_to_all(self._fitted(payload, key), key).wait(exposed=False)
        total = torch.empty_like(x[:1])
        for number, coded in enumerate(arrived):
            self.codec.decode(coded.unsqueeze(0), one if number else total, keys)
            if number:
                total.add_(one)
        if before is not None and before.owned is not None and not shared:
            total.add_(before.owned)
        return total[0]

    def _share(self, mine: Tensor, x: Tensor, key: str, keys: Keys) -> Tensor:
        """Code the sum of this rank's part and give it to all."""
        keys = Keys(hashed(keys.shared, "sum"), hashed(keys.own, "sum"))
        before, pending = self._kept.get(key), self._pending.get(key)
        if before is not None and before.owned is not None:
            mine.add_(before.owned)
        values, one = mine.unsqueeze(0), self._scratch(mine.numel(), x)
        payload = self.codec.encode(values, keys)
        if pending is not None:
            self.codec.decode(payload, one, keys)
            pending.owned = finite(mine.sub_(one[0]))
        found = self._inner.all_gather(self._fitted(payload, key)[0], f"{key}.sum").wait(exposed=False)
        for part, coded in zip(x.view(-1).split(mine.numel()), found, strict=False):
            self.codec.decode(coded.unsqueeze(0), one, keys)
            part.copy_(one[0, : part.numel()])
        return x

    def _opened(self, key: str, x: Tensor) -> Lost:
        """Memory for what a buffer loses in this step."""
        found = self._spare.pop(key, None)
        if found is None or found.sent.shape != x.shape or found.sent.dtype != x.dtype:
            found = Lost(torch.empty_like(x))
        found.owned = None
        self._pending[key] = found
        return found

    def _scratch(self, num_values: int, like: Tensor) -> Tensor:
        """Memory for one row; only the thread of the line uses it."""
        if self._one.shape[1] != num_values or self._one.dtype != like.dtype:
            self._one = like.new_empty(1, num_values)
        return self._one

    def _fitted(self, payload: Tensor, key: str) -> Tensor:
        """Rows as long as the longest of any rank."""
        if not self.codec.ragged:
            return payload
        width = torch.tensor([payload.shape[1]], device=payload.device)
        longest = int(self._inner.all_gather(width, f"{key}.width").wait(exposed=False).max())
        out = payload.new_zeros(len(payload), longest)
        out[:, : payload.shape[1]] = payload
        return out

    def all_gather(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        return self._line.submit("all_gather", lambda: self._inner.all_gather(x, key).wait(exposed=False))

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """See `Collective`."""
        return self._line.submit(
            "broadcast", lambda: self._inner.broadcast(x, key, source).wait(exposed=False)
        )

    def commit(self) -> None:
        """See `Feedback`."""
        self._spare |= {key: self._kept[key] for key in self._pending if key in self._kept}
        self._kept |= self._pending
        self._pending = {}

    def abort(self) -> None:
        """See `Collective`."""
        self._line.mend()
        self._spare |= self._pending
        self._pending = {}
        self._inner.abort()

    def describe(self, key: str, matrices: Sequence[Matrix]) -> None:
        """See `Feedback`; a codec takes rows as they are."""

    def lost(self, key: str, num_values: int) -> Mapping[str, Tensor]:
        """See `Feedback`."""
        found = self._pending.get(key, self._kept.get(key))
        if found is None:
            return {}
        flats = {"sent": found.sent.reshape(-1)[:num_values]}
        if found.velocity is not None:
            flats["velocity"] = found.velocity.reshape(-1)[:num_values]
        if found.owned is not None:
            whole = torch.zeros_like(found.sent)
            whole[self.group.rank] = found.owned
            flats["owned"] = whole.reshape(-1)[:num_values]
        return flats

    def set_lost(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """See `Feedback`."""
        size, owned, velocity = self.group.size, flats.get("owned"), flats.get("velocity")
        self._kept[key] = Lost(
            in_parts(flats["sent"], size),
            None if owned is None else in_parts(owned, size)[self.group.rank],
            None if velocity is None else in_parts(velocity, size),
        )

    def clear(self, key: str) -> None:
        """See `Feedback`."""
        self._kept.pop(key, None)
        self._pending.pop(key, None)

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""
        self._line.close()

    def _keys(self, key: str) -> Keys:
        shared = hashed(self._seed, "codec", self._inner.net.step, key)
        return Keys(shared, hashed(shared, self.group.ranks[self.group.rank]))

    def _waited(self, op: str, seconds: float) -> None:
        """Count seconds that a caller waited for all of it."""
        row = self._inner.net.ledger.rows.get((op, self.group.name))
        if row is not None:
            row.exposed_seconds += seconds


def with_momentum(path: Exchanging, argument: str, seed: int) -> CodedCollective:
    """The word `dgc:K:M`, where ranks sum."""
    kept, _, momentum = argument.partition(":")
    return CodedCollective(path, TopK(num_kept(kept)), seed=seed, momentum=float(momentum or MOMENTUM))
