"""A race detector: it finds reads and writes of a tensor between the launch of a collective and its `wait`.

While a detector is active on a thread, every tensor operation of that thread is checked. Other threads, which
carry out the collectives, are not. A check costs microseconds for each operation, so this is for debugging:
`CommChecks` runs the checks of the table `[debug]` of a recipe in every round.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.comm.collectives.collective_protocol import Collective, ErrorFeedbackStore, ReceiveBuffer
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.errors import CommunicationError
from paceline.job.mesh import RankGroup
from paceline.observe.step_stats import StepStats
from paceline.recipe.tables import DebugRecipe


class RaceDetector(TorchDispatchMode):
    """A dispatch mode that knows which memory belongs to a collective in flight.

    Use it as a context manager; `watch` registers collectives.

    Raises:
        CommunicationError: memory in flight was touched; names both lines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_flight: dict[int, tuple[str, str]] = {}

    def watch(self, x: Tensor, op: str, handle: Handle) -> Handle:
        """Return a handle that protects the memory of `x` until it is waited for."""
        address = x.untyped_storage().data_ptr()
        # Tensors without memory (empty or meta) cannot race.
        if not address:
            return handle
        launch = (op, _caller_location())
        self._in_flight[address] = launch

        def resolve(deadline_seconds: float | None, exposed: bool) -> Any:
            # A later collective may have registered the same memory; that one stays.
            if self._in_flight.get(address) is launch:
                del self._in_flight[address]
            return handle.wait(deadline_seconds, exposed=exposed)

        return Handle(resolve, handle.is_complete)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check the tensors that an operation reads or writes."""
        # Views touch no values, so they are allowed.
        if self._in_flight and not func.is_view:
            for x in _iter_tensors([*args, *(kwargs or {}).values()]):
                launch = self._in_flight.get(x.untyped_storage().data_ptr())
                if launch is not None:
                    raise CommunicationError(
                        f"{_caller_location()} touches a tensor ({func}) whose {launch[0]} was launched at"
                        f" {launch[1]} and has not been waited for",
                        next_step="wait for the handle first, or give the collective a copy",
                    )
        return func(*args, **(kwargs or {}))


class WatchedCollective:
    """A collective whose tensors are watched between launch and wait.

    Args:
        inner: the collective that does the work.
    """

    def __init__(self, inner: Collective, detector: RaceDetector) -> None:
        self._inner, self._detector = inner, detector

    @property
    def group(self) -> RankGroup:
        return self._inner.group

    @property
    def feedback(self) -> ErrorFeedbackStore | None:
        return self._inner.feedback

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return self._inner.buffer(num_values, like, key)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        return self._detector.watch(x, "all_reduce", self._inner.all_reduce(x, key))

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        return self._detector.watch(x, "reduce_scatter", self._inner.reduce_scatter(x, key, arriving))

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        return self._detector.watch(x, "all_gather", self._inner.all_gather(x, key, out))

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        return self._detector.watch(x, "broadcast", self._inner.broadcast(x, key, source))

    def abort(self) -> None:
        self._inner.abort()


def _iter_tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _iter_tensors(value)


def _caller_location() -> str:
    """Return the line that called this library or PyTorch."""
    # The innermost frame that is neither this file nor PyTorch is the caller's own code.
    frames = [frame for frame in traceback.extract_stack() if not _is_internal_frame(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"


def _is_internal_frame(filename: str) -> bool:
    return "/torch/" in filename or filename == __file__


class CommChecks:
    """The checks of one session.

    Args:
        wanted: the checks to make.
        net: its bytes are compared with their closed forms.
    """

    def __init__(self, wanted: DebugRecipe, net: Net) -> None:
        self._wanted, self._net = wanted, net
        self._detector = RaceDetector() if wanted.races else None

    def watched(self, path: Collective) -> Collective:
        """Return the collective, with its tensors watched if races are to be found."""
        return path if self._detector is None else WatchedCollective(path, self._detector)

    def rounds(self, rounds: Iterator[StepStats]) -> Iterator[StepStats]:
        """Yield the same rounds, checked.

        Raises:
            CommunicationError: a tensor was touched while it was in flight, or bytes differ from the closed
                form.
        """
        if self._detector is None and not self._wanted.bytes:
            return rounds
        return self._watched_rounds(rounds)

    def _watched_rounds(self, rounds: Iterator[StepStats]) -> Iterator[StepStats]:
        while True:
            with self._detector or nullcontext():
                # Only the round itself is watched, not what a caller does between rounds.
                stats = next(rounds, None)
            if stats is None:
                return
            if self._wanted.bytes:
                self._net.ledger.require_expected_bytes()
            yield stats
