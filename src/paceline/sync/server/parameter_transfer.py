"""What a server holds of a model, as every rank has it: parts of what it computes with, in the same memory.

With one server its share is everything. Invariant: on all ranks the share of a server has the same slots in
the same order, and each value of the model is in one share.

What tensors look like between a server and its workers: as they are (`touched_rows`), or through a codec,
in both directions.

Up, a worker codes each gradient with what coding lost of it before; a push that the server has dropped
leaves that as it was. Down, the server codes how its parameters differ from those that the worker has; so
what is lost is part of the next difference. Between two rounds all hold the exact parameters.

Of matrices with many rows only the touched ones travel: those with a gradient, and those that changed.

An embedding of a million words sees some thousand of them in a batch. Up, a worker sends the rows of a
gradient that hold anything but zeros. Down, the server sends the rows that have changed since what the worker
has, whatever the optimizer does to rows without a gradient. Where half of the rows or more are touched, the
tensor travels whole.

Exactness: bitwise, up to the sign of a zero of a gradient (tests/parity/test_touched_rows.py).
Wire: (8 + b) bytes a touched row of b bytes, with its number; b for each row of a tensor that travels whole.
Source: Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server, section 3.1 (ranges
    of keys; zeros are not sent).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.codecs.codec_protocol import Codec, CodecKeys
from paceline.comm.reduction.pending_residual import sum_residuals
from paceline.comm.workspace import Workspace
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.keys import key
from paceline.state.slot import TensorSlot
from paceline.sync.residuals import ResidualSource

PRIMARY_RANK = 0
"""The rank that decides; it is the first server."""


def iter_server_parts(sharded_model: ShardedModel, server: int) -> Iterator[tuple[TensorSlot, TensorSlot]]:
    """What this rank computes with, and what a server has of it; without what it has nothing of."""
    for held in sharded_model.held.values():
        part = held.parts[server]
        if part is not None:
            yield held.computes, part


def server_slots(sharded_model: ShardedModel, server: int) -> list[TensorSlot]:
    """The parts of a server."""
    return [part for _, part in iter_server_parts(sharded_model, server)]


def server_values(sharded_model: ShardedModel, server: int) -> dict[TensorSlot, Tensor]:
    """The values of a server's parts here; views."""
    return {
        part: view_part(sharded_model.computes[slot], slot, part)
        for slot, part in iter_server_parts(sharded_model, server)
    }


def view_part(values: Tensor, slot: TensorSlot, part: TensorSlot) -> Tensor:
    """A part of the values of a slot; a view."""
    return values.detach()[part.inside(slot)]


def load_server_values(tensors: Sequence[Tensor], parts: Mapping[TensorSlot, Tensor]) -> None:
    """Take over the values of a server's parts, in place."""
    with torch.no_grad():
        for part, value in zip(parts.values(), tensors, strict=True):
            part.copy_(value)


def load_buffers(tensors: Sequence[Tensor], runner: ModelRunner) -> Sequence[Tensor]:
    """Take over the buffers, which come first; returns the other tensors."""
    count = len(runner.buffers.values())
    runner.buffers.reset([value.to(runner.sharded_model.device) for value in tensors[:count]])
    return tensors[count:]


class ServerResiduals:
    """What coding has lost on the way to some servers, by the whole tensor; see `residuals.Coder`.

    Args:
        coders: by server.
        sharded_model: of this rank.
    """

    def __init__(self, coders: Mapping[int, ResidualSource], sharded_model: ShardedModel) -> None:
        self._coders, self._holding = coders, sharded_model

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """See `ResidualSource`; zeros in what no server here has."""
        wholes = {slot.name: slot for slot in self._holding.computes}
        found: dict[tuple[str, TensorSlot], Tensor] = {}
        for coder in self._coders.values():
            for side, part, value in coder.residuals():
                whole = wholes[part.name]
                values = found.setdefault((side, whole), torch.zeros(whole.shape))
                values[part.inside(whole)] = value
        return [(side, whole, values) for (side, whole), values in found.items()]

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `ResidualSource`."""
        wholes = {slot.name: slot for slot in self._holding.computes}
        for server, coder in self._coders.items():
            parts = {part.name: part for part in server_slots(self._holding, server)}
            own = {
                (side, name): view_part(value, wholes[name], parts[name])
                for (side, name), value in found.items()
                if name in parts
            }
            coder.set_residuals(own)


TicketPlace = tuple[int, int]
"""Step and part of a ticket."""


class ParameterTransfer(Protocol):
    """Both ends use one of the same kind.

    Attributes:
        lasts: what `push` and `ticket` return is not changed afterwards; else it is good until the next one.
    """

    lasts: bool

    def push(
        self, grads: Mapping[TensorSlot, Tensor], place: TicketPlace, weight: float = 1.0
    ) -> list[Tensor]:
        """A worker's gradients, unscaled, as they travel.

        Args:
            weight: see `Given`; what was lost of them counts in another push as it would have in its own.
        """

    def pushed(
        self, tensors: Sequence[Tensor], likes: Mapping[TensorSlot, Tensor], place: TicketPlace
    ) -> list[Tensor]:
        """The inverse, on the server."""

    def settle(self, *, dropped: bool) -> None:
        """The worker knows what became of its last push."""

    def ticket(self, rank: int, newest: Sequence[Tensor], version: int) -> list[Tensor]:
        """The newest values of a server's parts of the parameters, as they travel to a worker."""

    def take(self, tensors: Sequence[Tensor], parts: Sequence[Tensor], rank: int, version: int) -> None:
        """The inverse, on the worker, whose parts are changed in place."""

    def forget(self, rank: int | None = None) -> None:
        """A worker (None: all) has, or is given, the parameters in full."""


class CodedTransfer:
    """Tensors travel through a codec.

    Args:
        codec: the form; each tensor is one row.
        seed: of what coding draws.
        slots: of all gradients of the server's parts, for the state.
    Wire: c bytes for a tensor that the codec makes c bytes of; a worker's first parameters of a round in
        full.
    Source: Seide et al. 2014 (error feedback); Richtarik et al. 2021, EF21, arXiv:2106.05203 (coding
    differences).
    """

    lasts = False

    def __init__(self, codec: Codec, seed: int, slots: Mapping[TensorSlot, Tensor]) -> None:
        self._codec, self._seed = codec, seed
        self._workspace, self._payloads = Workspace(), Workspace()
        self._kept = {slot: torch.zeros(slot.sizes) for slot in slots} if codec.needs_error_feedback else {}
        self._pending: dict[TensorSlot, Tensor] = {}
        self._spare: dict[TensorSlot, Tensor] = {}  # memory of the push before the last
        self._known: dict[int, list[Tensor]] = {}

    def push(
        self, grads: Mapping[TensorSlot, Tensor], place: TicketPlace, weight: float = 1.0
    ) -> list[Tensor]:
        """See `ParameterTransfer`; the bytes are good until the next push. What is kept is that of a full batch."""
        found = []
        for slot, grad in grads.items():
            keys = self._keys("push", *place, slot.name)
            values = self._workspace.copy("values", grad).view(1, -1)
            kept = self._kept.get(slot)
            if kept is not None:
                kept = self._workspace.copy("kept", kept.to(grad.device), grad.dtype).view(1, -1)
                values = torch.add(values, kept, alpha=weight, out=self._workspace.like("sum", values))
            payload = self._laid(f"push {slot.name}", values, keys)
            if kept is not None:
                lost = values.sub_(self._decoded(payload, values, keys)).nan_to_num_(0.0, 0.0, 0.0)
                lost = lost if weight == 1.0 else lost.div_(weight)
                self._pending[slot] = self._opened(slot).copy_(lost.view(slot.sizes))
            found.append(payload)
        return found

    def pushed(
        self, tensors: Sequence[Tensor], likes: Mapping[TensorSlot, Tensor], place: TicketPlace
    ) -> list[Tensor]:
        """See `ParameterTransfer`."""
        found = []
        for x, (slot, like) in zip(tensors, likes.items(), strict=True):
            # of its own, as several pushes are added up
            row = torch.empty(1, like.numel(), dtype=like.dtype, device=x.device)
            self._codec.decode(x, row, self._keys("push", *place, slot.name), self._workspace)
            found.append(row.view(like.shape))
        return found

    def settle(self, *, dropped: bool) -> None:
        """See `ParameterTransfer`."""
        if dropped:
            self._spare |= self._pending
        else:
            self._spare |= {slot: self._kept[slot] for slot in self._pending}
            self._kept |= self._pending
        self._pending = {}

    def ticket(self, rank: int, newest: Sequence[Tensor], version: int) -> list[Tensor]:
        """See `ParameterTransfer`; the bytes are good until the next ticket."""
        known = self._known.get(rank)
        if known is None:
            self._known[rank] = [p.contiguous().clone() for p in newest]
            return [*newest]
        coded = []
        for number, p in enumerate(known):
            keys = self._keys("ticket", rank, version, number)
            change = torch.sub(newest[number].detach(), p, out=self._workspace.like("change", p)).view(1, -1)
            payload = self._laid(f"ticket {number}", change, keys)
            p.add_(self._decoded(payload, change, keys).view(p.shape))
            coded.append(payload)
        return coded

    def take(self, tensors: Sequence[Tensor], parts: Sequence[Tensor], rank: int, version: int) -> None:
        """See `ParameterTransfer`."""
        if rank not in self._known:
            self._known[rank] = []
            for p, value in zip(parts, tensors, strict=True):
                p.copy_(value)
            return
        for number, (p, payload) in enumerate(zip(parts, tensors, strict=True)):
            change = self._workspace.take("change", (1, p.numel()), p.dtype, payload.device)
            keys = self._keys("ticket", rank, version, number)
            p.add_(self._decoded(payload, change, keys).view(p.shape).to(p.device))

    def forget(self, rank: int | None = None) -> None:
        """See `ParameterTransfer`."""
        if rank is None:
            self._known.clear()
        else:
            self._known.pop(rank, None)

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """See `GradientReduction`: what this rank's coding has lost, unscaled; zeros on the server."""
        return [("sent", slot, value) for slot, value in (self._kept | self._pending).items()]

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `GradientReduction`."""
        self._pending, sums = {}, sum_residuals(found)
        for slot in self._kept:
            value = sums.get(slot.name)
            self._kept[slot] = torch.zeros(slot.sizes) if value is None else value.clone().cpu()

    def _opened(self, slot: TensorSlot) -> Tensor:
        """Memory for what the coding of a gradient loses, on the processor; not where that is kept now."""
        found = self._spare.pop(slot, None)
        return torch.empty(slot.sizes) if found is None else found

    def _laid(self, name: str, values: Tensor, keys: CodecKeys) -> Tensor:
        """Values [1, n] coded, where no further coding writes; a ragged row has room for the longest."""
        payload = self._codec.encode(values, keys, self._workspace)
        room = self._codec.num_bytes(values.numel())
        place = self._payloads.take(name, payload.shape, payload.dtype, payload.device, room=room)
        return place.copy_(payload)

    def _decoded(self, payload: Tensor, like: Tensor, keys: CodecKeys) -> Tensor:
        """The values of a payload, good until the next call."""
        out = self._workspace.like("decoded", like)
        self._codec.decode(payload, out, keys, self._workspace)
        return out

    def _keys(self, *parts: int | str) -> CodecKeys:
        shared = key(self._seed, "traffic", *parts)
        return CodecKeys(shared, shared)


MIN_ROWS = 256
"""Of a matrix whose rows are looked at."""

_SAMPLED_VALUES = 16  # values of a row, of which one mostly tells that it is touched
_SKIPPED_VERSIONS = (
    15  # versions for which a matrix that has changed by half is not compared, and travels whole
)


class SparseRowTransfer:
    """See `Traffic`: tensors as they are, but for the rows of large matrices."""

    lasts = True

    def __init__(self) -> None:
        self._changed = _RowVersions()
        self._known: dict[int, int] = {}  # by worker, the version of the parameters that it has

    def push(
        self, grads: Mapping[TensorSlot, Tensor], place: TicketPlace, weight: float = 1.0
    ) -> list[Tensor]:
        """See `Traffic`."""
        return [sent for grad in grads.values() for sent in _pack_rows(grad, _touched(grad))]

    def pushed(
        self, tensors: Sequence[Tensor], likes: Mapping[TensorSlot, Tensor], place: TicketPlace
    ) -> list[Tensor]:
        """See `Traffic`."""
        given = iter(tensors)
        return [_unpack_rows(given, torch.zeros_like, like) for like in likes.values()]

    def settle(self, *, dropped: bool) -> None:
        """See `Traffic`."""

    def ticket(self, rank: int, newest: Sequence[Tensor], version: int) -> list[Tensor]:
        """See `Traffic`."""
        self._changed.look(newest, version)
        since = self._known.get(rank)
        self._known[rank] = version
        return [
            sent.detach().clone() if sent is p else sent
            for number, p in enumerate(newest)
            for sent in _pack_rows(p, None if since is None else self._changed.after(number, since))
        ]

    def take(self, tensors: Sequence[Tensor], parts: Sequence[Tensor], rank: int, version: int) -> None:
        """See `Traffic`."""
        given = iter(tensors)
        for p in parts:
            p.copy_(_unpack_rows(given, _unchanged, p))

    def forget(self, rank: int | None = None) -> None:
        """See `Traffic`."""
        if rank is None:  # parameters may have been loaded meanwhile
            self._known.clear()
            self._changed = _RowVersions()
        else:
            self._known.pop(rank, None)


class _RowVersions:
    """In which version each row of the parameters last changed.

    Where half of the rows have changed, all count as changed, and for some versions nobody looks: they travel
    whole then, as they would otherwise.
    """

    def __init__(self) -> None:
        self._version = -1
        self._before: dict[int, Tensor] = {}
        self._last: dict[int, Tensor] = {}
        self._rest: dict[int, int] = {}  # versions without a look that are left

    def look(self, parameters: Sequence[Tensor], version: int) -> None:
        """Compare with what was there at the last look."""
        if version == self._version:
            return
        self._version = version
        for number, p in enumerate(parameters):
            if not _is_large_matrix(p):
                continue
            if number not in self._before:
                self._last[number] = torch.full((p.shape[0],), version)
                self._before[number] = p.clone()
            elif self._rest.get(number, 0):
                self._skip_comparison(number, p, version)
            else:
                self._compare(number, p, version)

    def _skip_comparison(self, number: int, p: Tensor, version: int) -> None:
        self._last[number].fill_(version)
        self._rest[number] -= 1
        if not self._rest[number]:
            self._before[number].copy_(p)

    def _compare(self, number: int, p: Tensor, version: int) -> None:
        before = self._before[number]
        rows = (
            None
            if _is_at_least_half(_differs(before[:, :_SAMPLED_VALUES], p[:, :_SAMPLED_VALUES]))
            else _differs(before, p)
        )
        if rows is None or _is_at_least_half(rows):
            self._last[number].fill_(version)
            self._rest[number] = _SKIPPED_VERSIONS
            return
        rows = rows.nonzero().view(-1)
        self._last[number][rows.cpu()] = version
        before[rows] = p[rows]

    def after(self, number: int, version: int) -> Tensor | None:
        """The rows of a parameter that have changed after a version; None: it is no large matrix."""
        last = self._last.get(number)
        return None if last is None else (last > version).nonzero().view(-1)


def _is_large_matrix(x: Tensor) -> bool:
    return _is_large_shape(x.shape)


def _is_large_shape(shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and shape[0] >= MIN_ROWS


def _touched(grad: Tensor) -> Tensor | None:
    """Rows that hold anything but zeros; None: half of them do, or it is no large matrix."""
    if not _is_large_matrix(grad) or _is_at_least_half((grad[:, :_SAMPLED_VALUES] != 0).flatten(1).any(1)):
        return None
    return (grad != 0).flatten(1).any(1).nonzero().view(-1)


def _is_at_least_half(rows: Tensor) -> bool:
    """Whether half of them are true, bool [n]."""
    return 2 * int(rows.count_nonzero()) >= len(rows)


def _differs(before: Tensor, now: Tensor) -> Tensor:
    """Which rows differ, bool [n]."""
    same = (before == now) | (before.isnan() & now.isnan())
    return (~same).flatten(1).any(1)


def _pack_rows(x: Tensor, rows: Tensor | None) -> list[Tensor]:
    """As it travels: alone; or, of a large matrix, numbers of rows and these rows, or no number and all."""
    if not _is_large_matrix(x):
        return [x]
    if rows is None or 2 * len(rows) >= x.shape[0]:
        return [torch.empty(0, dtype=torch.int64), x]
    return [rows.cpu(), x[rows.to(x.device)]]


def _unpack_rows(given: Iterator[Tensor], base: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The inverse of `_pack_rows`, over what is there already: `base` of `like`, which may be changed."""
    if not _is_large_matrix(like):
        return next(given)
    numbers, values = next(given), next(given)
    if values.shape[0] == like.shape[0]:
        return values
    there = base(like)
    there[numbers.to(there.device)] = values.to(there)
    return there


def _unchanged(x: Tensor) -> Tensor:
    return x
