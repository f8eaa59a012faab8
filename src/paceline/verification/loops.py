"""A user's own loop on both sides of a verification: a round of the session, and the loss of the oracle.

The loop is a function of `loop`, as `paceline.own_loop` gives one. On the strategy's side it runs as it is,
from one complete step to the next. For the oracle the same function runs a second time, on the oracle's model
and batches: what it gives to `backward` until it calls `step` is the loss of a micro-batch, and the oracle
does the rest by itself. So the loop's own losses are verified, not those of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from paceline.errors import StrategyError, TaskError
from paceline.layout.sums import checked
from paceline.observe import Stats
from paceline.task import Loss
from paceline.training import Session
from paceline.training.loop import fitting
from paceline.training.own import OwnLoop
from paceline.verification.oracle import Oracle
from paceline.verification.turns import Turns

Loop = Callable[[Any], None]


class LoopRounds(Iterator[Stats]):
    """The steps of an own loop as rounds: between two of them the state is consistent; collective."""

    def __init__(self, session: Session, loop: Loop) -> None:
        self._session, self._loop = session, loop
        self._turns = Turns(self._run, "own loop")

    def __next__(self) -> Stats:
        stats = self._turns.resume()
        if stats is None:
            raise StopIteration
        found: Stats = stats
        return found

    def close(self) -> None:
        """Leave the loop where it stands."""
        self._turns.end()

    def _run(self) -> None:
        with fitting(self._session, None, ()) as found:
            own = OwnLoop(self._session, found, after_round=self._turns.hand_over)
            self._loop(own)
            own.end()


@contextmanager
def rounds_of(session: Session, loop: Loop | None) -> Iterator[Iterator[Stats]]:
    """The rounds of a session: its rule's, or those of an own loop, which is left at the end of the block."""
    if loop is None:
        yield session.rounds()
        return
    rounds = LoopRounds(session, loop)
    try:
        yield rounds
    finally:
        rounds.close()


@contextmanager
def spoken_by(oracle: Oracle, loop: Loop | None) -> Iterator[None]:
    """Inside of the block the oracle's loss is that of an own loop, if there is one."""
    if loop is None:
        yield
        return
    spoken = LoopLoss(oracle, loop)
    oracle.task = replace(oracle.task, loss=spoken)
    try:
        yield
    finally:
        spoken.close()


class _Quiet(NamedTuple):
    """In place of a session: the oracle writes no files and talks to nobody."""

    is_first: bool = False


class LoopLoss:
    """The loss of a micro-batch, as an own loop computes it on the oracle's model; see `LossFunction`.

    Args:
        oracle: whose model and optimizer the loop sees.
    """

    def __init__(self, oracle: Oracle, loop: Loop) -> None:
        self._loop = loop
        self._turns = Turns(lambda: loop(self), "own loop of the oracle")
        self.model, self.optimizer, self.session = oracle.model, oracle.optimizer, _Quiet()
        self._autocast, self._losses = oracle.autocast, list[Loss]()
        self._waits = False

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        """One turn of the loop: from the batch to its `step`."""
        while not self._waits:
            self._turns.resume()
            self._require_more()
        self._waits, found = False, self._turns.resume((batch, torch.is_grad_enabled()))
        self._require_more()
        if not isinstance(found, Loss):
            raise TaskError(
                "the loop took the next batch without step()",
                next_step="for batch in loop.batches(): loss = ...; loop.backward(loss); loop.step()",
            )
        return found

    def close(self) -> None:
        """Leave the loop where it stands."""
        self._turns.end()

    def batches(self) -> Iterator[Any]:
        """As `OwnLoop.batches`, without an end."""
        while True:
            self._waits = True
            batch, learns = self._turns.hand_over()
            self._losses = []
            with torch.set_grad_enabled(learns), self._autocast():
                yield batch

    def backward(self, loss: Loss) -> None:
        """As `OwnLoop.backward`; the oracle runs backward itself."""
        self._losses.append(checked(loss))

    def step(self, part: str = "") -> None:
        """As `OwnLoop.step`; the oracle updates by itself."""
        if part:
            raise StrategyError(
                f"verify compares steps of one update, and this loop updates '{part}' alone: what it does"
                " next hangs on that update",
                next_step="verify a loop of each part alone; or the layout with a loss that has one update",
            )
        if not self._losses:
            raise TaskError("step() without a loss: nothing was given to backward()")
        total = torch.stack([loss.total.reshape(()) for loss in self._losses]).sum()
        self._turns.hand_over(Loss(total, self._losses[0].count))

    def evaluate(self, source: Any = None) -> NoReturn:
        """Raises: StrategyError: an oracle has no evaluations."""
        raise _not_here("evaluate()", "let evaluate.every_steps say when")

    def schedule(self, make: Any) -> NoReturn:
        """Raises: StrategyError: the oracle has the rates of the recipe."""
        raise _not_here("schedule()", "verify with the rates of the recipe's [schedule], or without")

    def stop(self, reason: str) -> NoReturn:
        """Raises: StrategyError: an oracle goes as far as it is asked."""
        raise _not_here("stop()", "leave it to a callback")

    def _require_more(self) -> None:
        if self._turns.is_over:
            raise StrategyError(
                "the loop ended before the steps that are compared",
                next_step="let it go on to the end of loop.batches(), or verify fewer steps",
            )


def _not_here(what: str, next_step: str) -> StrategyError:
    return StrategyError(f"a loop that is verified cannot call loop.{what}", next_step=next_step)
