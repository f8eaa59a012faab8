"""Of matrices with many rows only the touched ones travel: those with a gradient, and those that changed.

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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paceline.layout.sizes import bytes_of
from paceline.slot import Slot
from paceline.sync.traffic import Place

FEWEST_ROWS = 256
"""Of a matrix whose rows are looked at."""

_SOME = 16  # values of a row, of which one mostly tells that it is touched
_REST = 15  # versions for which a matrix that has changed by half is not compared, and travels whole


class TouchedRows:
    """See `Traffic`: tensors as they are, but for the rows of large matrices."""

    lasts = True

    def __init__(self) -> None:
        self._changed = _Changes()
        self._known: dict[int, int] = {}  # by worker, the version of the parameters that it has

    def push(self, grads: Mapping[Slot, Tensor], place: Place, weight: float = 1.0) -> list[Tensor]:
        """See `Traffic`."""
        return [sent for grad in grads.values() for sent in _rows(grad, _touched(grad))]

    def pushed(self, tensors: Sequence[Tensor], likes: Mapping[Slot, Tensor], place: Place) -> list[Tensor]:
        """See `Traffic`."""
        given = iter(tensors)
        return [_whole(given, torch.zeros_like, like) for like in likes.values()]

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
            for sent in _rows(p, None if since is None else self._changed.after(number, since))
        ]

    def take(self, tensors: Sequence[Tensor], parts: Sequence[Tensor], rank: int, version: int) -> None:
        """See `Traffic`."""
        given = iter(tensors)
        for p in parts:
            p.copy_(_whole(given, _itself, p))

    def forget(self, rank: int | None = None) -> None:
        """See `Traffic`."""
        if rank is None:  # parameters may have been loaded meanwhile
            self._known.clear()
            self._changed = _Changes()
        else:
            self._known.pop(rank, None)


def compared_bytes(slots: Iterable[Slot], item_bytes: Mapping[str, int]) -> int:
    """Of what a server keeps to see which rows change: the matrices themselves."""
    return sum(bytes_of(slot, item_bytes) for slot in slots if _has_so_many_rows(slot.sizes))


class _Changes:
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
            if not _has_many_rows(p):
                continue
            if number not in self._before:
                self._last[number] = torch.full((p.shape[0],), version)
                self._before[number] = p.clone()
            elif self._rest.get(number, 0):
                self._pass_over(number, p, version)
            else:
                self._compare(number, p, version)

    def _pass_over(self, number: int, p: Tensor, version: int) -> None:
        self._last[number].fill_(version)
        self._rest[number] -= 1
        if not self._rest[number]:
            self._before[number].copy_(p)

    def _compare(self, number: int, p: Tensor, version: int) -> None:
        before = self._before[number]
        rows = None if _is_half(_differs(before[:, :_SOME], p[:, :_SOME])) else _differs(before, p)
        if rows is None or _is_half(rows):
            self._last[number].fill_(version)
            self._rest[number] = _REST
            return
        rows = rows.nonzero().view(-1)
        self._last[number][rows.cpu()] = version
        before[rows] = p[rows]

    def after(self, number: int, version: int) -> Tensor | None:
        """The rows of a parameter that have changed after a version; None: it is no large matrix."""
        last = self._last.get(number)
        return None if last is None else (last > version).nonzero().view(-1)


def _has_many_rows(x: Tensor) -> bool:
    return _has_so_many_rows(x.shape)


def _has_so_many_rows(shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and shape[0] >= FEWEST_ROWS


def _touched(grad: Tensor) -> Tensor | None:
    """Rows that hold anything but zeros; None: half of them do, or it is no large matrix."""
    if not _has_many_rows(grad) or _is_half((grad[:, :_SOME] != 0).flatten(1).any(1)):
        return None
    return (grad != 0).flatten(1).any(1).nonzero().view(-1)


def _is_half(rows: Tensor) -> bool:
    """Whether half of them are true, bool [n]."""
    return 2 * int(rows.count_nonzero()) >= len(rows)


def _differs(before: Tensor, now: Tensor) -> Tensor:
    """Which rows differ, bool [n]."""
    same = (before == now) | (before.isnan() & now.isnan())
    return (~same).flatten(1).any(1)


def _rows(x: Tensor, rows: Tensor | None) -> list[Tensor]:
    """As it travels: alone; or, of a large matrix, numbers of rows and these rows, or no number and all."""
    if not _has_many_rows(x):
        return [x]
    if rows is None or 2 * len(rows) >= x.shape[0]:
        return [torch.empty(0, dtype=torch.int64), x]
    return [rows.cpu(), x[rows.to(x.device)]]


def _whole(given: Iterator[Tensor], base: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The inverse of `_rows`, over what is there already: `base` of `like`, which may be changed."""
    if not _has_many_rows(like):
        return next(given)
    numbers, values = next(given), next(given)
    if values.shape[0] == like.shape[0]:
        return values
    there = base(like)
    there[numbers.to(there.device)] = values.to(there)
    return there


def _itself(x: Tensor) -> Tensor:
    return x
