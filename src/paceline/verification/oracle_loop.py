"""Two that take turns: a function on a thread of its own, which runs only while somebody waits for it.

Invariant: never do both run at once, so whatever is global (generators, the number of threads) is seen in the
order of the turns. An error of the function is raised where its turn was waited for.

A user's own loop on the oracle's side: it computes losses, and the oracle does what follows from them.

It runs on a thread of its own, from one thing that it asks for to the next: a batch, or an update. What it
draws goes on where it stopped, whatever was drawn in between.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import StrategyError, TaskError
from paceline.parallel.model_runner import check_loss
from paceline.session.evaluation import Evaluation
from paceline.session.own_loop_reduce import reduce_values, require_reduction
from paceline.sync.update import UpdateResult
from paceline.task import Loss
from paceline.verification.oracle import Oracle


class _LoopThreadEnded(BaseException):
    """Ends the function where it hands over."""


class LoopThread:
    """Runs a function from one `hand_over` to the next.

    Args:
        function: calls `hand_over` wherever the other side is to go on.
    """

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self._function, self._pid = function, os.getpid()
        self._mine: SimpleQueue[Any] = SimpleQueue()
        self._theirs: SimpleQueue[Any] = SimpleQueue()
        self._pool, self._running = ThreadPoolExecutor(1, name), Future[None]()
        self._has_begun = self._ends = self.is_over = False

    def resume(self, value: Any = None) -> Any:
        """Let the function go on with a value; returns what it hands over next, None when it has ended.

        Raises:
            StrategyError: this is a fork, which has no such thread.
        """
        if os.getpid() != self._pid:
            raise StrategyError("a loop cannot go on in a process that was forked from its own")
        if self.is_over:
            return None
        if self._has_begun:
            self._mine.put(value)
        else:
            self._has_begun, self._running = True, self._pool.submit(self._function)
            self._running.add_done_callback(lambda done: self._theirs.put(None))
        said = self._theirs.get()
        if said is None:  # the function has ended, well or not
            self.is_over = True
            self._pool.shutdown()
            self._running.result()
        return said[0] if said else None

    def hand_over(self, value: Any = None) -> Any:
        """From the function: let the other side go on; returns what it answers."""
        self._theirs.put((value,))
        found = self._mine.get()
        if self._ends:
            raise _LoopThreadEnded
        return found

    def end(self) -> None:
        """Leave the function where it stands; may be called twice, and before it has begun."""
        if os.getpid() != self._pid or self.is_over:
            return
        self.is_over = self._ends = True
        if self._has_begun:
            self._mine.put(None)
        self._pool.shutdown()


OwnLoopFunction = Callable[[Any], None]
EvaluateModel = Callable[[nn.Module, int, Any], Evaluation | None]
"""Evaluates a model after so many steps, on some samples; None: on the held-out ones."""
SchedulerT = TypeVar("SchedulerT")


class RequestedUpdate(NamedTuple):
    """An update that a loop asks for.

    Args:
        part: of the model, as its name is given to `step`; empty: all of it.
        loss: of one micro-batch.
    """

    part: str
    loss: Loss


class ReplicaValue(NamedTuple):
    """A value of one replica, which is to become one of all; see `OwnLoop.reduce`."""

    own: Tensor
    how: str


LoopRequest = RequestedUpdate | ReplicaValue | None
"""None: the loop waits for a batch."""


class OracleLoop:
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
        self,
        loop: OwnLoopFunction,
        model: nn.Module,
        oracle: Oracle,
        evaluated: EvaluateModel,
        num_replicas: int = 1,
    ) -> None:
        self.model, self.optimizer, self.session = model, oracle.optimizer, _SilentSession()
        self._evaluated, self.num_replicas = evaluated, num_replicas
        self._autocast, self._losses = oracle.autocast, list[Loss]()
        self._turns = LoopThread(lambda: loop(self), "own loop of the oracle")
        self._draws, self._waits_for_batch = GeneratorStates(), False
        self._rates: _SchedulerGroups | None = None
        self._made, self.step_number = False, 0

    @property
    def needs_next_batch(self) -> bool:
        """Whether it has done all that it does with the batch before."""
        return self._waits_for_batch

    def take(self, batch: Any) -> LoopRequest:
        """Give it a batch, with the generators as they stand; returns what it asks for first."""
        return self._resume((batch, torch.is_grad_enabled()))

    def go_on(self, answer: UpdateResult | Tensor | None) -> LoopRequest:
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
        self._losses.append(check_loss(loss))

    def step(self, part: str = "") -> UpdateResult | None:
        """As `OwnLoop.step`; the oracle updates by itself."""
        if not self._losses:
            raise TaskError("step() without a loss: nothing was given to backward()")
        total = torch.stack([loss.total.reshape(()) for loss in self._losses]).sum()
        asked, self._losses = RequestedUpdate(part, Loss(total, self._losses[0].count)), []
        update: UpdateResult | None = self._turns.hand_over(asked)
        torch.clear_autocast_cache()  # it holds weights of before the update
        self._made = update is not None
        if update is not None and self._rates is not None:
            self._rates.step()
        return update

    def reduce(self, value: Tensor | float, how: str = "sum") -> Tensor:
        """As `OwnLoop.reduce`."""
        require_reduction(how)
        own = torch.as_tensor(value).detach()
        found: Tensor = self._turns.hand_over(ReplicaValue(own, how))
        return found.to(own.device)

    def evaluate(self, source: Any = None) -> Evaluation | None:
        """As `OwnLoop.evaluate`: the step is complete."""
        self.step_number += self._made
        self._made = False
        return self._evaluated(self.model, self.step_number, source)

    def schedule(self, make: Callable[[torch.optim.Optimizer], SchedulerT]) -> SchedulerT:
        """As `OwnLoop.schedule`; what it sets, the oracle's optimizer takes over before its update."""
        self._rates = self._rates or _SchedulerGroups(self.optimizer)
        return make(self._rates)

    def options(self) -> Sequence[Mapping[str, Any]] | None:
        """What a scheduler of the loop's has set in each group; None: it has none."""
        return self._rates.options() if self._rates is not None else None

    def stop(self, reason: str) -> None:
        """As `OwnLoop.stop`; the oracle ends where the run ends."""

    def _resume(self, value: Any) -> LoopRequest:
        found: LoopRequest = self._turns.resume(value)
        if self._turns.is_over:
            raise loop_ended_error()
        self._draws, self._waits_for_batch = GeneratorStates(), found is None
        return found


class _SilentSession(NamedTuple):
    """In place of a session: the oracle writes no files and talks to nobody."""

    is_first: bool = False


class _SchedulerGroups(torch.optim.Optimizer):
    """For a scheduler: the groups of an optimizer, with options of their own, and an idle step."""

    def __init__(self, of: torch.optim.Optimizer) -> None:
        groups = [
            {**copy.deepcopy(_options_of_group(group)), "params": [torch.zeros((), requires_grad=True)]}
            for group in of.param_groups
        ]
        super().__init__(groups, dict(of.defaults))

    def step(self, closure: Any = None) -> Any:
        """Change nothing; schedulers ask whether it was called."""

    def options(self) -> Sequence[Mapping[str, Any]]:
        """Of each group."""
        return [_options_of_group(group) for group in self.param_groups]


def _options_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class GeneratorStates:
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


def resolve_reductions(
    sides: Sequence[OracleLoop], said: Sequence[LoopRequest]
) -> list[RequestedUpdate | None]:
    """What loops that run side by side ask for, once none waits for a value of all of them.

    Args:
        said: by each of them.
    Raises:
        StrategyError: only some of them wait for one.
    """
    found = list(said)
    while values := [one for one in found if isinstance(one, ReplicaValue)]:
        if len(values) < len(found):
            raise StrategyError(
                "loop.reduce() is called by some replicas and not by others",
                next_step="let every rank call it at the same place of the loop",
            )
        answer = reduce_values([one.own for one in values], values[0].how)
        found = [side.go_on(answer) for side in sides]
    return cast("list[RequestedUpdate | None]", found)


def missing_step_error() -> TaskError:
    """A batch has trained nothing."""
    return TaskError(
        "the loop took the next batch without step()",
        next_step="for batch in loop.batches(): loss = ...; loop.backward(loss); loop.step()",
    )


def loop_ended_error() -> StrategyError:
    """The loop has left its batches."""
    return StrategyError(
        "the loop ended before the steps that are compared",
        next_step="let it go on to the end of loop.batches(), or verify fewer steps",
    )
