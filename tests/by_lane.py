"""Bytes of tensors that a process has while its lanes run, counted for each lane by itself.

Every thread notes the tensors that its operations make, and the memory itself says when it goes. A message
between two stages is the later one's until it is taken, and then of the one that has taken it. What each lane
has at most counts as if all had it at a time.
Not seen: what a kernel takes and gives back inside one operation.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from paceline.parallel.pipeline.p2p import StageMessage, ThreadTransport
from paceline.parallel.thread_workers import WorkerThreads

Lane = tuple[int, int]
"""Which run of lanes, and which of them; (0, 0): none runs."""
_Functions = Sequence[Callable[[], Any]]


class _Here(threading.local):
    lane: Lane = (0, 0)


class ByLane:
    """Counts inside `counting`.

    Attributes:
        most: bytes so far.
    """

    def __init__(self) -> None:
        self.most = 0
        self._now, self._peaks = dict[Lane, int](), dict[Lane, int]()
        self._owners: dict[int, tuple[Lane, int]] = {}
        self._here, self._lock, self._num_runs = _Here(), threading.RLock(), 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside."""
        run, send, receive = WorkerThreads.run, ThreadTransport.send, ThreadTransport.receive

        def sent(wire: ThreadTransport, to: int, *args: Any, **options: Any) -> None:
            number, stage = self._here.lane
            with self._as_lane((number, max(stage, to))):
                send(wire, to, *args, **options)

        def received(*args: Any, **options: Any) -> StageMessage:
            message = receive(*args, **options)
            self._take(message[0])
            return message

        def side_by_side(threads: WorkerThreads, functions: _Functions) -> list[Any]:
            return self._run(partial(run, threads), functions)

        with (
            patch.object(WorkerThreads, "run", side_by_side),
            patch.object(ThreadTransport, "send", sent),
            patch.object(ThreadTransport, "receive", received),
            _Noting(self._made),
        ):
            yield

    def _made(self, t: Tensor) -> None:
        """Count the memory of a tensor, unless it is counted already."""
        storage = t.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        with self._lock:
            if place not in self._owners:
                self._owners[place] = self._here.lane, size
                weakref.finalize(storage, self._gone, place)
                self._add(self._here.lane, size)

    def _take(self, tensors: Iterable[Tensor]) -> None:
        """From now on they are this lane's."""
        with self._lock:
            for place in (t.untyped_storage()._cdata for t in tensors):
                owner, size = self._owners[place]
                self._owners[place] = self._here.lane, size
                self._add(owner, -size)
                self._add(self._here.lane, size)

    def _gone(self, place: int) -> None:
        with self._lock:
            owner, size = self._owners.pop(place)
            self._add(owner, -size)

    def _add(self, lane: Lane, size: int) -> None:
        self._now[lane] = self._now.get(lane, 0) + size
        self._peaks[lane] = max(self._peaks.get(lane, 0), self._now[lane])
        self.most = max(self.most, sum(self._now.values()))

    def _run(self, run: Callable[[_Functions], list[Any]], functions: _Functions) -> list[Any]:
        self._num_runs += 1
        lanes = [(self._num_runs, number) for number in range(len(functions))]
        first, *others = (partial(self._run_as, *pair) for pair in zip(lanes, functions, strict=True))
        found = run([first, *(partial(self._noting, other) for other in others)])
        with self._lock:
            stayed = sum(size for lane, size in self._now.items() if lane not in lanes)
            self.most = max(self.most, stayed + sum(self._peaks.get(lane, 0) for lane in lanes))
        return found

    def _run_as(self, lane: Lane, function: Callable[[], Any]) -> Any:
        with self._as_lane(lane):
            return function()

    def _noting(self, function: Callable[[], Any]) -> Any:
        with _Noting(self._made):
            return function()

    @contextmanager
    def _as_lane(self, lane: Lane) -> Iterator[None]:
        own, self._here.lane = self._here.lane, lane
        try:
            yield
        finally:
            self._here.lane = own


class _Noting(TorchDispatchMode):
    """Tells of every tensor that an operation of this thread makes."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in tree_iter(found):
            if isinstance(t, Tensor) and not t.is_meta:
                self._tell(t)
        return found
