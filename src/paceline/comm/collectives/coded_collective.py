"""Sums of encoded values, with error feedback on both sides.

A buffer is cut into P parts; each rank encodes its parts and sends them to their owners, which decode, add in
the order of the ranks, encode the sum and send it to all. Values are therefore encoded twice, however many
ranks there are, and not again at every hop. The quantisation error is kept and added to the next values of
the same buffer; a step that is aborted leaves it as it was. Everything runs on a `CommThread`, beside the
backward pass, in memory that the first steps have allocated.

While some bytes are in flight, the next are encoded: those of the next buffer, or of the next chunk of
columns of a large one, if a codec encodes a row in chunks to the same bytes. So on a slow link nothing waits
until a whole matrix is encoded. A buffer has only a few chunks: no more than two are in flight at a time, and
a long link would be idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.comm.codecs.codec_kernels import load_kernels
from paceline.comm.codecs.codec_protocol import Codec, CodecKeys
from paceline.comm.codecs.top_k import DGC_MOMENTUM, TopKCodec, make_keep_count
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
from paceline.recipe.registry import DgcArgument
from paceline.state.keys import key as hashed

# Values of a chunk over all rows, at least: 1 MiB in float32, so that latency is small beside the transfer.
_MIN_CHUNK_VALUES = 1 << 18
# Chunks of a buffer, at most.
_MAX_CHUNKS = 8


def column_chunks(width: int, num_rows: int, block: int) -> list[slice]:
    """Cut rows [num_rows, width] into chunks of columns of equal width, up to a multiple of a block.

    Args:
        block: a chunk ends where one does; 0: all columns are one chunk.
    """
    most = max(block, _MIN_CHUNK_VALUES // num_rows // block * block) if block else width
    number = min(-(-width // most), _MAX_CHUNKS)
    step = -(-width // (number * block)) * block if block else width
    return [slice(begin, min(begin + step, width)) for begin in range(0, width, step)]


def iter_row_chunks(x: Tensor, num_rows: int, some: slice) -> Iterator[Tensor]:
    """Yield some columns of each row of ceil(n / P) values of `x` [n]; views, shorter where `x` ends."""
    width = -(-x.numel() // num_rows)
    for row in range(num_rows):
        yield x[row * width :][some]


def gather_column_chunk(x: Tensor, num_rows: int, some: slice, workspace: Workspace) -> Tensor:
    """Return some columns [P, m] of `x` [n], cut into rows of ceil(n / P) values of which the last may be
    short.

    A view if all rows are whole, otherwise a copy that is padded with zeros.
    """
    num_values = x.numel()
    width = -(-num_values // num_rows)
    if num_values == num_rows * width:
        return x.view(num_rows, width)[:, some]
    out = workspace.take("parts", (num_rows, some.stop - some.start), x.dtype, x.device)
    for row, row_out in zip(iter_row_chunks(x, num_rows, some), out, strict=True):
        row_out[: row.numel()] = row
        row_out[row.numel() :].zero_()
    return out


class CodedCollective:
    """A collective whose sums are encoded by a codec.

    Args:
        inner: the route; it carries bytes. Its process group is used by nothing else than the thread of this
            object.
        codec: the encoding.
        seed: seed of random numbers, which are functions of seed, step and buffer.
        momentum: momentum of the values before they are encoded; 0: none.
    Wire: with c bytes for an encoded part, all_reduce 2 (P-1) c bytes, reduce_scatter (P-1) c; where rows are
        ragged one all_gather of 8 bytes goes before each, and c is the longest of them.
    Exactness: that of the codec; equal bits on every rank.
    Source: Seide et al. 2014, 1-Bit Stochastic Gradient Descent (error feedback); Tang et al. 2019,
        DoubleSqueeze, arXiv:1905.05957, Algorithm 1 (compensation on workers and owners).
    """

    def __init__(
        self, inner: AllToAllCollective, codec: Codec, *, seed: int = 0, momentum: float = 0.0
    ) -> None:
        self._inner, self.codec, self._seed, self._momentum = inner, codec, seed, momentum
        self._thread = CommThread(
            f"{inner.group.name}-coded", wait_counter(inner.net.ledger, inner.group.name), inner.net.activity
        )
        self._feedback = ErrorFeedbackBuffers(inner.group)
        # One for each buffer in flight; only the thread uses them.
        self._workspaces = [Workspace() for _ in range(NUM_SLOTS)]
        self._totals = Workspace()

    @property
    def group(self) -> RankGroup:
        return self._inner.group

    @property
    def feedback(self) -> ErrorFeedbackBuffers | None:
        """The quantisation errors; None if decoded values are unbiased."""
        return self._feedback if self.codec.needs_error_feedback else None

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """Encode and scatter the parts, then encode and spread their sums, chunk by chunk."""
        if x.numel() == 0:
            return Handle.ready(x)
        width = -(-x.numel() // self.group.size)

        def rounds(some: slice, keys: CodecKeys, slot: int) -> CommRounds:
            workspace = self._workspaces[slot]
            self._open(key, x, width, some)
            rows = gather_column_chunk(x.view(-1), self.group.size, some, workspace)
            total = workspace.take("total", (1, rows.shape[1]), x.dtype, x.device)
            mine = yield from self._sum_parts(rows, key, some, keys, total, slot, shared=True)
            return (yield from self._spread_sum(mine, x, key, some, keys, slot))

        return self._submit("all_to_all", x, key, width, rounds)

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """Sum rows; the result is valid until the next sum of this buffer."""
        if x.numel() == 0:
            return Handle.ready(torch.empty_like(x[0]))

        def rounds(some: slice, keys: CodecKeys, slot: int) -> CommRounds:
            self._open(key, x, x.shape[1], some)
            total = self._totals.take(key, (1, x.shape[1]), x.dtype, x.device)
            yield from self._sum_parts(x[:, some], key, some, keys, total[:, some], slot, shared=False)
            return total[0]

        return self._submit("all_to_all", x, key, x.shape[1], rounds)

    def _submit(
        self, op: str, x: Tensor, key: str, width: int, rounds: Callable[[slice, CodecKeys, int], CommRounds]
    ) -> Handle:
        """Run the rounds of rows of `width` values, interleaved if messages say to which slot they belong."""
        some = self._column_chunks(x, width)
        keys = [self._keys(key if chunk.start == 0 else f"{key} from {chunk.start}") for chunk in some]
        chunk_rounds = [partial(rounds, *both) for both in zip(some, keys, strict=True)]
        if self._interleaves(x):
            return join_handles([self._thread.submit_rounds(op, one_chunk) for one_chunk in chunk_rounds])
        return self._thread.submit(op, lambda: run_rounds(chunk_rounds[0](0)))

    def _interleaves(self, x: Tensor) -> bool:
        """Return whether rounds of two chunks, or buffers, may be in flight."""
        return self._inner.in_any_order(x) and not self.codec.ragged

    def _column_chunks(self, x: Tensor, width: int) -> list[slice]:
        """Return the chunks of rows of `width` values; one if nothing could be encoded meanwhile."""
        in_chunks = self._interleaves(x) and not self._momentum
        return column_chunks(width, self.group.size, self.codec.block if in_chunks else 0)

    def _open(self, key: str, x: Tensor, width: int, some: slice) -> None:
        """Prepare memory for the errors of a buffer in this step, with the first of its chunks."""
        if self.codec.needs_error_feedback and some.start == 0:
            self._feedback.open(key, x, width)

    def _sum_parts(
        self, x: Tensor, key: str, some: slice, keys: CodecKeys, total: Tensor, slot: int, shared: bool
    ) -> CommRounds:
        """Encode and exchange columns of rows, `x` [P, n], and add up those of this rank in `total` [1, n].

        Args:
            shared: the sum will be encoded again and sent to all.
        """
        before, values, workspace = self._feedback.kept.get(key), x, self._workspaces[slot]
        feedback = self._feedback.pending[key] if self.codec.needs_error_feedback else None
        if feedback is not None:
            values = feedback.add(x, before, self._momentum, some)
        payload = self.codec.encode(values, keys, workspace)
        decoded = workspace.take("one", total.shape, x.dtype, x.device)
        if feedback is not None:
            # Decode what was sent: the error is that of the receiver, not of an idealised codec.
            for row, coded in enumerate(payload):
                self.codec.decode(coded.unsqueeze(0), decoded, keys, workspace)
                feedback.subtract_sent(row, decoded[0], workspace, some)
        # Errors are taken before padding: they belong to this rank's own bytes.
        payload = self._pad_to_longest(payload, key, x.shape[1], workspace)
        arrived = self._rows("arrived", payload.shape, payload, x.shape[1], workspace)
        yield self._inner.all_to_all(payload, key, arrived, 2 * slot)
        # Decoded one after another, so that memory is needed for one part only, and added in rank order.
        for number, coded in enumerate(arrived):
            self.codec.decode(coded.unsqueeze(0), decoded if number else total, keys, workspace)
            if number:
                total.add_(decoded)
        # Sums that are not encoded again have no error in this step: an earlier one is added once.
        if before is not None and before.owned is not None and not shared:
            total.add_(before.owned[some])
        return total[0]

    def _spread_sum(
        self, mine: Tensor, x: Tensor, key: str, some: slice, keys: CodecKeys, slot: int
    ) -> CommRounds:
        """Encode the sum of these columns of this rank's part and send it to all."""
        # Other random numbers than for the parts: equal ones would make the rounding errors correlated.
        keys = CodecKeys(hashed(keys.shared, "sum"), hashed(keys.own, "sum"))
        before, pending = self._feedback.kept.get(key), self._feedback.pending.get(key)
        workspace = self._workspaces[slot]
        if before is not None and before.owned is not None:
            mine.add_(before.owned[some])
        decoded = workspace.take("one", (1, mine.numel()), x.dtype, x.device)
        payload = self.codec.encode(mine.unsqueeze(0), keys, workspace)
        if pending is not None:
            self.codec.decode(payload, decoded, keys, workspace)
            pending.subtract_sent_sum(mine, decoded[0], some)
        payload = self._pad_to_longest(payload, key, mine.numel(), workspace)
        # Gloo's all_gather would allocate all of it again; sent as rows it is as many bytes
        shape = self.group.size, payload.shape[1]
        spread = self._rows("spread", shape, payload, mine.numel(), workspace).copy_(payload)
        sums = self._rows("arrived", shape, payload, mine.numel(), workspace)
        yield self._inner.all_to_all(spread, f"{key}.sum", sums, 2 * slot + 1)
        if pending is not None:
            # Codecs may decode padding to values that are not zero; those must not become errors.
            pending.zero_padding(x.numel(), self.group.rank)
        for part, coded in zip(iter_row_chunks(x.view(-1), self.group.size, some), sums, strict=True):
            is_whole = part.numel() == mine.numel()
            self.codec.decode(coded.unsqueeze(0), part.unsqueeze(0) if is_whole else decoded, keys, workspace)
            if not is_whole:
                part.copy_(decoded[0, : part.numel()])
        return x

    def _pad_to_longest(self, payload: Tensor, key: str, num_values: int, workspace: Workspace) -> Tensor:
        """Pad rows to the longest of any rank."""
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
        """Return memory for encoded rows, with room for the longest that `num_values` can have."""
        room = shape[0] * self.codec.num_bytes(num_values)
        return workspace.take(name, shape, like.dtype, like.device, room=room)

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        return self._thread.submit(
            "all_gather", lambda: self._inner.all_gather(x, key, out).wait(exposed=False)
        )

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        return self._thread.submit(
            "broadcast", lambda: self._inner.broadcast(x, key, source).wait(exposed=False)
        )

    def abort(self) -> None:
        self._thread.clear_error()
        self._feedback.abort()
        self._inner.abort()

    def chunks_in_flight(self, x: Tensor) -> tuple[int, int]:
        width = -(-x.numel() // self.group.size)
        values = min(x.numel(), self.group.size * self._column_chunks(x, width)[0].stop)
        return values, NUM_SLOTS if self._interleaves(x) else 1

    def close(self) -> None:
        """End the thread; everything that was launched has been waited for."""
        self._thread.close()

    def _keys(self, key: str) -> CodecKeys:
        shared = hashed(self._seed, "codec", self._inner.net.step, key)
        # Without the number of ranks: ranks that encode copies of the same values draw the same numbers.
        return CodecKeys(shared, hashed(shared, self.group.rank))


def deep_gradient_compression(path: AllToAllCollective, argument: DgcArgument, seed: int) -> CodedCollective:
    """Build the sums of the word `dgc:K:M:C`; gradients are clipped before
    (`reduction.gradient_norm.LocalClip`).
    """
    momentum = DGC_MOMENTUM if argument.momentum is None else argument.momentum
    codec = TopKCodec(make_keep_count(argument.kept), kernels=load_kernels())
    return CodedCollective(path, codec, seed=seed, momentum=momentum)
