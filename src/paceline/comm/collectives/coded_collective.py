"""Some columns of a buffer whose rows are the parts of its ranks: a large one is coded stretch by stretch.

While one stretch travels, the next is coded; so on a slow link nothing waits until a whole matrix is coded.
There are at most a few, since no more than two travel at a time, and a long link would stand empty.

Sums of coded values, with error feedback on both sides.

A buffer is cut into P parts; each rank codes its parts and sends them to their owners, who decode, add in the
order of the ranks, code the sum and send it to all. So values are coded twice, however many ranks there are,
and nothing is coded again at every hop. What is lost on the way is kept, and added to the next values of the
same buffer; a step that is aborted leaves it as it was. All of it runs on a `CommThread`, beside the backward pass,
in memory that the first steps have taken. While some bytes are under way, the next are coded: those of the
next buffer, or of the next stretch of a large one, where a codec takes a row in stretches to the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.comm.codecs.codec_kernels import load_kernels
from paceline.comm.codecs.codec_protocol import Codec, CodecKeys
from paceline.comm.codecs.top_k import DGC_MOMENTUM, TopKCodec, parse_keep_count
from paceline.comm.collectives.collective_protocol import (
    AllToAllCollective,
    ReceiveBuffer,
    wait_counter,
)
from paceline.comm.collectives.error_feedback import ErrorFeedbackBuffers
from paceline.comm.comm_thread import NUM_SLOTS, CommRounds, CommThread, run_rounds
from paceline.comm.handle import Handle, join_handles
from paceline.comm.workspace import Workspace
from paceline.job.mesh import RankGroup
from paceline.state.keys import key as hashed

_MIN_CHUNK_VALUES = 1 << 18  # at least, of all rows: 1 MiB in float32
_MAX_CHUNKS = 8  # stretches of a buffer


def column_chunks(width: int, num_rows: int, block: int) -> list[slice]:
    """The columns of rows [num_rows, width], in equal stretches, but for the rest of a block.

    Args:
        block: a stretch ends where one does; 0: all columns are one stretch.
    """
    most = max(block, _MIN_CHUNK_VALUES // num_rows // block * block) if block else width
    number = min(-(-width // most), _MAX_CHUNKS)
    step = -(-width // (number * block)) * block if block else width
    return [slice(begin, min(begin + step, width)) for begin in range(0, width, step)]


def iter_row_chunks(x: Tensor, num_rows: int, some: slice) -> Iterator[Tensor]:
    """Some columns of each row of ceil(n / P) values of `x` [n]; views, shorter where `x` ends."""
    width = -(-x.numel() // num_rows)
    for row in range(num_rows):
        yield x[row * width :][some]


def gather_column_chunk(x: Tensor, num_rows: int, some: slice, workspace: Workspace) -> Tensor:
    """Of `x` [n], cut into rows of ceil(n / P) values of which the last may be short, some columns [P, m].

    A view where all rows are whole, and a copy whose ends are filled with zeros where they are not.
    """
    num_values = x.numel()
    width = -(-num_values // num_rows)
    if num_values == num_rows * width:
        return x.view(num_rows, width)[:, some]
    out = workspace.take("parts", (num_rows, some.stop - some.start), x.dtype, x.device)
    for there, found in zip(iter_row_chunks(x, num_rows, some), out, strict=True):
        found[: there.numel()] = there
        found[there.numel() :].zero_()
    return out


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

    def __init__(
        self, inner: AllToAllCollective, codec: Codec, *, seed: int = 0, momentum: float = 0.0
    ) -> None:
        self._inner, self.codec, self._seed, self._momentum = inner, codec, seed, momentum
        self._line = CommThread(f"{inner.group.name}-coded", wait_counter(inner.net.ledger, inner.group.name))
        self._losses = ErrorFeedbackBuffers(inner.group)
        self._workspaces = [Workspace() for _ in range(NUM_SLOTS)]  # of the thread of the line
        self._sums = Workspace()

    @property
    def group(self) -> RankGroup:
        """See `Collective`."""
        return self._inner.group

    @property
    def feedback(self) -> ErrorFeedbackBuffers | None:
        """See `Collective`; None where what is decoded is right on average."""
        return self._losses if self.codec.needs_error_feedback else None

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Collective`."""
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        if x.numel() == 0:
            return Handle.ready(x)
        width = -(-x.numel() // self.group.size)

        def rounds(some: slice, keys: CodecKeys, place: int) -> CommRounds:
            workspace = self._workspaces[place]
            self._open(key, x, width, some)
            rows = gather_column_chunk(x.view(-1), self.group.size, some, workspace)
            total = workspace.take("total", (1, rows.shape[1]), x.dtype, x.device)
            mine = yield from self._sum(rows, key, some, keys, total, place, shared=True)
            return (yield from self._share(mine, x, key, some, keys, place))

        return self._submit("all_to_all", x, key, width, rounds)

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """See `Collective`; the sum is good until the next one of this buffer."""
        if x.numel() == 0:
            return Handle.ready(torch.empty_like(x[0]))

        def rounds(some: slice, keys: CodecKeys, place: int) -> CommRounds:
            self._open(key, x, x.shape[1], some)
            total = self._sums.take(key, (1, x.shape[1]), x.dtype, x.device)
            yield from self._sum(x[:, some], key, some, keys, total[:, some], place, shared=False)
            return total[0]

        return self._submit("all_to_all", x, key, x.shape[1], rounds)

    def _submit(
        self, op: str, x: Tensor, key: str, width: int, rounds: Callable[[slice, CodecKeys, int], CommRounds]
    ) -> Handle:
        """Run the rounds of rows of so many values, by turns where messages say to whom they belong."""
        some = self._stretches(x, width)
        keys = [self._keys(key if one.start == 0 else f"{key} from {one.start}") for one in some]
        parts = [partial(rounds, *both) for both in zip(some, keys, strict=True)]
        if self._interleaves(x):
            return join_handles([self._line.submit_rounds(op, part) for part in parts])
        return self._line.submit(op, lambda: run_rounds(parts[0](0)))

    def _interleaves(self, x: Tensor) -> bool:
        """Whether rounds of two stretches, or buffers, may be under way."""
        return self._inner.in_any_order(x) and not self.codec.ragged

    def _stretches(self, x: Tensor, width: int) -> list[slice]:
        """Of rows of so many values; where nothing is coded meanwhile there is one."""
        apart = self._interleaves(x) and not self._momentum
        return column_chunks(width, self.group.size, self.codec.block if apart else 0)

    def _open(self, key: str, x: Tensor, width: int, some: slice) -> None:
        """Memory for what a buffer loses in this step, with the first of its stretches."""
        if self.codec.needs_error_feedback and some.start == 0:
            self._losses.open(key, x, width)

    def _sum(
        self, x: Tensor, key: str, some: slice, keys: CodecKeys, total: Tensor, place: int, shared: bool
    ) -> CommRounds:
        """Code and exchange columns of rows, `x` [P, n], and add up those of this rank in `total` [1, n].

        `shared`: the sum is coded again then.
        """
        before, values, workspace = self._losses.kept.get(key), x, self._workspaces[place]
        own = self._losses.pending[key] if self.codec.needs_error_feedback else None
        if own is not None:
            values = own.add(x, before, self._momentum, some)
        payload = self.codec.encode(values, keys, workspace)
        one = workspace.take("one", total.shape, x.dtype, x.device)
        if own is not None:
            for row, coded in enumerate(payload):
                self.codec.decode(coded.unsqueeze(0), one, keys, workspace)
                own.subtract_sent(row, one[0], workspace, some)
        payload = self._pad_to_longest(payload, key, x.shape[1], workspace)
        arrived = self._rows("arrived", payload.shape, payload, x.shape[1], workspace)
        yield self._inner.all_to_all(payload, key, arrived, 2 * place)
        for number, coded in enumerate(arrived):
            self.codec.decode(coded.unsqueeze(0), one if number else total, keys, workspace)
            if number:
                total.add_(one)
        if before is not None and before.owned is not None and not shared:
            total.add_(before.owned[some])
        return total[0]

    def _share(
        self, mine: Tensor, x: Tensor, key: str, some: slice, keys: CodecKeys, place: int
    ) -> CommRounds:
        """Code the sum of these columns of this rank's part and give it to all."""
        keys = CodecKeys(hashed(keys.shared, "sum"), hashed(keys.own, "sum"))
        before, pending = self._losses.kept.get(key), self._losses.pending.get(key)
        workspace = self._workspaces[place]
        if before is not None and before.owned is not None:
            mine.add_(before.owned[some])
        one = workspace.take("one", (1, mine.numel()), x.dtype, x.device)
        payload = self.codec.encode(mine.unsqueeze(0), keys, workspace)
        if pending is not None:
            self.codec.decode(payload, one, keys, workspace)
            pending.subtract_sent_sum(mine, one[0], some)
        payload = self._pad_to_longest(payload, key, mine.numel(), workspace)
        # Gloo's all_gather would allocate all of it again; sent as rows it is as many bytes
        shape = self.group.size, payload.shape[1]
        spread = self._rows("spread", shape, payload, mine.numel(), workspace).copy_(payload)
        found = self._rows("arrived", shape, payload, mine.numel(), workspace)
        yield self._inner.all_to_all(spread, f"{key}.sum", found, 2 * place + 1)
        if pending is not None:
            pending.zero_padding(x.numel(), self.group.rank)
        for part, coded in zip(iter_row_chunks(x.view(-1), self.group.size, some), found, strict=True):
            whole = part.numel() == mine.numel()
            self.codec.decode(coded.unsqueeze(0), part.unsqueeze(0) if whole else one, keys, workspace)
            if not whole:
                part.copy_(one[0, : part.numel()])
        return x

    def _pad_to_longest(self, payload: Tensor, key: str, num_values: int, workspace: Workspace) -> Tensor:
        """Rows as long as the longest of any rank."""
        if not self.codec.ragged:
            return payload.contiguous()
        width = torch.tensor([payload.shape[1]], device=payload.device)
        longest = int(self._inner.all_gather(width, f"{key}.width").wait(exposed=False).max())
        out = self._rows("fitted", (len(payload), longest), payload, num_values, workspace)
        out[:, : payload.shape[1]] = payload
        out[:, payload.shape[1] :].zero_()
        return out

    def _rows(
        self, name: str, shape: Sequence[int], like: Tensor, num_values: int, workspace: Workspace
    ) -> Tensor:
        """Memory for coded rows, with room for the longest that so many values can have."""
        room = shape[0] * self.codec.num_bytes(num_values)
        return workspace.take(name, shape, like.dtype, like.device, room=room)

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        """See `Collective`."""
        return self._line.submit(
            "all_gather", lambda: self._inner.all_gather(x, key, out).wait(exposed=False)
        )

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """See `Collective`."""
        return self._line.submit(
            "broadcast", lambda: self._inner.broadcast(x, key, source).wait(exposed=False)
        )

    def abort(self) -> None:
        """See `Collective`."""
        self._line.clear_error()
        self._losses.abort()
        self._inner.abort()

    def chunks_in_flight(self, x: Tensor) -> tuple[int, int]:
        """See `Coded`."""
        width = -(-x.numel() // self.group.size)
        values = min(x.numel(), self.group.size * self._stretches(x, width)[0].stop)
        return values, NUM_SLOTS if self._interleaves(x) else 1

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""
        self._line.close()

    def _keys(self, key: str) -> CodecKeys:
        shared = hashed(self._seed, "codec", self._inner.net.step, key)
        return CodecKeys(shared, hashed(shared, self.group.rank))  # alike where other ranks code copies of it


def deep_gradient_compression(path: AllToAllCollective, argument: str, seed: int) -> CodedCollective:
    """The word `dgc:K:M:C`, where ranks sum; what is clipped is clipped before (`reduction.local_clip`)."""
    kept, momentum, *_ = [*argument.split(":"), DGC_MOMENTUM]
    codec = TopKCodec(parse_keep_count(kept), kernels=load_kernels())
    return CodedCollective(path, codec, seed=seed, momentum=float(momentum))
