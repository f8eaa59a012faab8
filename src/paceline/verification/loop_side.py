"""A user's own loop on the oracle's side: it computes losses, and the oracle does what follows from them.

It runs on a thread of its own, from one thing that it asks for to the next: a batch, or an update. What it
draws goes on where it stopped, whatever was drawn in between.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import StrategyError, TaskError
from paceline.layout.sums import checked
from paceline.sync import Update
from paceline.task import Loss
from paceline.training.evaluation import Evaluation
from paceline.training.reduced import reduced, require_how
from paceline.verification.oracle import Oracle
from paceline.verification.turns import Turns

Loop = Callable[[Any], None]
Evaluated = Callable[[nn.Module, int, Any], Evaluation | None]
"""Evaluates a model after so many steps, on some samples; None: on the held-out ones."""
S = TypeVar("S")


class Asked(NamedTuple):
    """An update that a loop asks for.

    Args:
        part: of the model, as its name is given to `step`; empty: all of it.
        loss: of one micro-batch.
    """

    part: str
    loss: Loss


class Value(NamedTuple):
    """A value of one replica, which is to become one of all; see `OwnLoop.reduce`."""

    own: Tensor
    how: str


Said = Asked | Value | None
"""None: the loop waits for a batch."""


class LoopSide:
    """What a loop is given in place of an `OwnLoop`.

    Args:
        loop: the user's function.
        model: whose losses it computes.
        oracle: whose optimizer it sees, and whose autocast it runs in.
        evaluated: answers `evaluate`.

    Attributes:
        step_number: of the batch that it takes next.
    """

    def __init__(
        self, loop: Loop, model: nn.Module, oracle: Oracle, evaluated: Evaluated, num_replicas: int = 1
    ) -> None:
        self.model, self.optimizer, self.session = model, oracle.optimizer, _Quiet()
        self._evaluated, self.num_replicas = evaluated, num_replicas
        self._autocast, self._losses = oracle.autocast, list[Loss]()
        self._turns = Turns(lambda: loop(self), "own loop of the oracle")
        self._draws, self._waits_for_batch = Draws(), False
        self._rates: _Rates | None = None
        self._made, self.step_number = False, 0

    @property
    def waits_for_batch(self) -> bool:
        """Whether it has done all that it does with the batch before."""
        return self._waits_for_batch

    def take(self, batch: Any) -> Said:
        """Give it a batch, with the generators as they stand; returns what it asks for first."""
        return self._resume((batch, torch.is_grad_enabled()))

    def go_on(self, answer: Update | Tensor | None) -> Said:
        """Let it go on where it asked for something, or begin; returns what it asks for next."""
        if self._waits_for_batch:
            return None
        self._draws.put_back()
        return self._resume(answer)

    def close(self) -> None:
        """Leave the loop where it stands."""
        self._turns.end()

    def batches(self) -> Iterator[Any]:
        """As `OwnLoop.batches`, without an end."""
        while True:
            batch, learns = self._turns.hand_over()
            self._losses, self._made = [], False
            with torch.set_grad_enabled(learns), self._autocast():
                yield batch

    def backward(self, loss: Loss) -> None:
        """As `OwnLoop.backward`; the oracle runs backward itself."""
        self._losses.append(checked(loss))

    def step(self, part: str = "") -> Update | None:
        """As `OwnLoop.step`; the oracle updates by itself."""
        if not self._losses:
            raise TaskError("step() without a loss: nothing was given to backward()")
        total = torch.stack([loss.total.reshape(()) for loss in self._losses]).sum()
        asked, self._losses = Asked(part, Loss(total, self._losses[0].count)), []
        update: Update | None = self._turns.hand_over(asked)
        torch.clear_autocast_cache()  # it holds weights of before the update
        self._made = update is not None
        if update is not None and self._rates is not None:
            self._rates.step()
        return update

    def reduce(self, value: Tensor | float, how: str = "sum") -> Tensor:
        """As `OwnLoop.reduce`."""
        require_how(how)
        own = torch.as_tensor(value).detach()
        found: Tensor = self._turns.hand_over(Value(own, how))
        return found.to(own.device)

    def evaluate(self, source: Any = None) -> Evaluation | None:
        """As `OwnLoop.evaluate`: the step is complete."""
        self.step_number += self._made
        self._made = False
        return self._evaluated(self.model, self.step_number, source)

    def schedule(self, make: Callable[[torch.optim.Optimizer], S]) -> S:
        """As `OwnLoop.schedule`; what it sets, the oracle's optimizer takes over before its update."""
        self._rates = self._rates or _Rates(self.optimizer)
        return make(self._rates)

    def options(self) -> Sequence[Mapping[str, Any]] | None:
        """What a scheduler of the loop's has set in each group; None: it has none."""
        return self._rates.options() if self._rates is not None else None

    def stop(self, reason: str) -> None:
        """As `OwnLoop.stop`; the oracle ends where the run ends."""

    def _resume(self, value: Any) -> Said:
        found: Said = self._turns.resume(value)
        if self._turns.is_over:
            raise loop_ended()
        self._draws, self._waits_for_batch = Draws(), found is None
        return found


class _Quiet(NamedTuple):
    """In place of a session: the oracle writes no files and talks to nobody."""

    is_first: bool = False


class _Rates(torch.optim.Optimizer):
    """For a scheduler: the groups of an optimizer, with options of their own, and an idle step."""

    def __init__(self, of: torch.optim.Optimizer) -> None:
        groups = [
            {**copy.deepcopy(_options(group)), "params": [torch.zeros((), requires_grad=True)]}
            for group in of.param_groups
        ]
        super().__init__(groups, dict(of.defaults))

    def step(self, closure: Any = None) -> Any:
        """Change nothing; schedulers ask whether it was called."""

    def options(self) -> Sequence[Mapping[str, Any]]:
        """Of each group."""
        return [_options(group) for group in self.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class Draws:
    """Where the generators that `seed_all` seeds stand."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
        )
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back(self) -> None:
        """Let them stand there again."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)


def met(sides: Sequence[LoopSide], said: Sequence[Said]) -> list[Asked | None]:
    """What loops that run side by side ask for, once none waits for a value of all of them.

    Args:
        said: by each of them.
    Raises:
        StrategyError: only some of them wait for one.
    """
    found = list(said)
    while values := [one for one in found if isinstance(one, Value)]:
        if len(values) < len(found):
            raise StrategyError(
                "loop.reduce() is called by some replicas and not by others",
                next_step="let every rank call it at the same place of the loop",
            )
        answer = reduced([one.own for one in values], values[0].how)
        found = [side.go_on(answer) for side in sides]
    return cast("list[Asked | None]", found)


def no_step() -> TaskError:
    """A batch has trained nothing."""
    return TaskError(
        "the loop took the next batch without step()",
        next_step="for batch in loop.batches(): loss = ...; loop.backward(loss); loop.step()",
    )


def loop_ended() -> StrategyError:
    """The loop has left its batches."""
    return StrategyError(
        "the loop ended before the steps that are compared",
        next_step="let it go on to the end of loop.batches(), or verify fewer steps",
    )
