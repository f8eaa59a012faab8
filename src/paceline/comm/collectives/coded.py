"""Sums of coded values, with error feedback on both sides.

A buffer is cut into P parts; each rank codes its parts and sends them to their owners, who decode, add in the
order of the ranks, code the sum and send it to all. So values are coded twice, however many ranks there are,
and nothing is coded again at every hop. What is lost on the way is kept, and added to the next values of the
same buffer; a step that is aborted leaves it as it was. All of it runs on a `Line`, beside the backward pass,
in memory that the first steps have taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.codecs import Codec, Keys
from paceline.comm.codecs.low_rank import Matrix
from paceline.comm.codecs.sparse import MOMENTUM, TopK, num_kept
from paceline.comm.collectives.collective import Exchanging, HeldBytes, in_parts
from paceline.comm.collectives.lost import Lost
from paceline.comm.handle import Handle
from paceline.comm.kernels import load_kernels
from paceline.comm.line import Line
from paceline.comm.workspace import Workspace
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
        self._workspace = Workspace()  # of the thread of the line

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
            rows = self._in_parts(x)
            total = self._workspace.take("total", (1, rows.shape[1]), x.dtype, x.device)
            return self._share(self._sum(rows, key, keys, total, shared=True), x, key, keys)

        return self._line.submit("all_to_all", hops)

    def reduce_scatter(self, x: Tensor, key: str) -> Handle:
        """See `Collective`; the sum is good until the next one of this buffer."""
        if x.numel() == 0:
            return Handle.ready(torch.empty_like(x[0]))
        keys = self._keys(key)

        def hops() -> Tensor:
            total = self._workspace.take(f"sum {key}", (1, x.shape[1]), x.dtype, x.device)
            return self._sum(x, key, keys, total, shared=False)

        return self._line.submit("all_to_all", hops)

    def _sum(self, x: Tensor, key: str, keys: Keys, total: Tensor, shared: bool) -> Tensor:
        """Code and exchange the rows of `x` [P, n], and add up those of this rank in `total` [1, n].

        `shared`: the sum is coded again then.
        """
        before, values, workspace = self._kept.get(key), x, self._workspace
        own = self._opened(key, x) if self.codec.loses else None
        if own is not None:
            values = own.add(x, before, self._momentum)
        payload = self.codec.encode(values, keys, workspace)
        one = workspace.take("one", total.shape, x.dtype, x.device)
        if own is not None:
            for row, coded in enumerate(payload):
                self.codec.decode(coded.unsqueeze(0), one, keys, workspace)
                own.take_out(row, one[0], workspace)
        payload = self._fitted(payload, key, x.shape[1])
        arrived = self._rows("arrived", payload.shape, payload, x.shape[1])
        self._inner.all_to_all(payload, key, arrived).wait(exposed=False)
        for number, coded in enumerate(arrived):
            self.codec.decode(coded.unsqueeze(0), one if number else total, keys, workspace)
            if number:
                total.add_(one)
        if before is not None and before.owned is not None and not shared:
            total.add_(before.owned)
        return total[0]

    def _share(self, mine: Tensor, x: Tensor, key: str, keys: Keys) -> Tensor:
        """Code the sum of this rank's part and give it to all."""
        keys = Keys(hashed(keys.shared, "sum"), hashed(keys.own, "sum"))
        before, pending, workspace = self._kept.get(key), self._pending.get(key), self._workspace
        if before is not None and before.owned is not None:
            mine.add_(before.owned)
        one = workspace.take("one", (1, mine.numel()), x.dtype, x.device)
        payload = self.codec.encode(mine.unsqueeze(0), keys, workspace)
        if pending is not None:
            self.codec.decode(payload, one, keys, workspace)
            pending.take_out_of_sum(mine, one[0])
        payload = self._fitted(payload, key, mine.numel())
        # Gloo's all_gather would allocate all of it again; sent as rows it is as many bytes
        shape = self.group.size, payload.shape[1]
        spread, found = (self._rows(name, shape, payload, mine.numel()) for name in ("spread", "arrived"))
        self._inner.all_to_all(spread.copy_(payload), f"{key}.sum", found).wait(exposed=False)
        for part, coded in zip(x.view(-1).split(mine.numel()), found, strict=False):
            whole = part.numel() == mine.numel()
            self.codec.decode(coded.unsqueeze(0), part.unsqueeze(0) if whole else one, keys, workspace)
            if not whole:
                part.copy_(one[0, : part.numel()])
        return x

    def _opened(self, key: str, x: Tensor) -> Lost:
        """Memory for what a buffer loses in this step."""
        found = self._spare.pop(key, None)
        if found is None or found.sent.shape != x.shape or found.sent.dtype != x.dtype:
            found = Lost(torch.empty_like(x))
        self._pending[key] = found.reopen()
        return found

    def _in_parts(self, x: Tensor) -> Tensor:
        """[n] as [P, ceil(n / P)], the end filled with zeros; a view where that does."""
        size, num_values = self.group.size, x.numel()
        if num_values % size == 0:
            return x.reshape(size, -1)
        width = -(-num_values // size)
        out = self._workspace.take("parts", (size * width,), x.dtype, x.device)
        out[:num_values] = x.view(-1)
        out[num_values:].zero_()
        return out.view(size, width)

    def _fitted(self, payload: Tensor, key: str, num_values: int) -> Tensor:
        """Rows as long as the longest of any rank."""
        if not self.codec.ragged:
            return payload.contiguous()
        width = torch.tensor([payload.shape[1]], device=payload.device)
        longest = int(self._inner.all_gather(width, f"{key}.width").wait(exposed=False).max())
        out = self._rows("fitted", (len(payload), longest), payload, num_values)
        out[:, : payload.shape[1]] = payload
        out[:, payload.shape[1] :].zero_()
        return out

    def _rows(self, name: str, shape: Sequence[int], like: Tensor, num_values: int) -> Tensor:
        """Memory for coded rows, with room for the longest that so many values can have."""
        room = shape[0] * self.codec.num_bytes(num_values)
        return self._workspace.take(name, shape, like.dtype, like.device, room=room)

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
        return {} if found is None else found.flats(num_values, self.group.rank)

    def set_lost(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """See `Feedback`."""
        size, owned, velocity = self.group.size, flats.get("owned"), flats.get("velocity")
        self._kept[key] = Lost(
            in_parts(flats["sent"], size),
            None if owned is None else in_parts(owned, size)[self.group.rank],
            None if velocity is None else in_parts(velocity, size),
        )

    def held_bytes(self) -> HeldBytes:
        """See `Coded`; of each buffer two losses, since a step may be aborted."""
        lost = {id(one): one for kept in (self._kept, self._pending, self._spare) for one in kept.values()}
        return HeldBytes(sum(one.num_bytes for one in lost.values()), self._workspace.num_bytes)

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
    """The word `dgc:K:M:C`, where ranks sum; what is clipped is clipped before (`reduction.local_clip`)."""
    kept, momentum, *_ = [*argument.split(":"), MOMENTUM]
    codec = TopK(num_kept(kept), kernels=load_kernels())
    return CodedCollective(path, codec, seed=seed, momentum=float(momentum))
