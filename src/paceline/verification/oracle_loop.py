"""A user's own loop for the oracle: the loop computes losses, and the oracle does the rest of a step.

The loop runs on a thread of its own from one request to the next: a batch, a value of all replicas, or an
update. Loop and verifier take turns and never run at the same time, so global state (generators, the number
of threads) changes in the order of the turns. A loop finds the generators where it left them, whatever was
drawn meanwhile. An error of the loop is raised where its turn was waited for.
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
from paceline.parallel.batch_gather import RefusedGather, WholeBatch, gather_scope
from paceline.parallel.model_runner import check_loss
from paceline.session.evaluation import Evaluation
from paceline.session.own_loop_reduce import reduce_values, require_reduction
from paceline.sync.update import UpdateResult
from paceline.task import Loss
from paceline.verification.oracle import Oracle


class _LoopThreadEnded(BaseException):
    """The exception that ends a loop; not an `Exception`, so that loops do not catch it."""


class LoopThread:
    """A thread that runs a function from one `hand_over` to the next.

    Args:
        function: calls `hand_over` wherever the other side shall continue.
        name: name of the thread.
    """

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self._function, self._pid = function, os.getpid()
        self._to_loop: SimpleQueue[Any] = SimpleQueue()
        self._from_loop: SimpleQueue[Any] = SimpleQueue()
        self._pool, self._running = ThreadPoolExecutor(1, name), Future[None]()
        self._has_begun = self._ends = self.is_over = False

    def resume(self, value: Any = None) -> Any:
        """Continue the function with a value; return what it hands over next, None if it has ended.

        Raises:
            StrategyError: this process is a fork, in which the thread does not exist.
        """
        if os.getpid() != self._pid:
            raise StrategyError("a training loop cannot continue in a fork of its process")
        if self.is_over:
            return None
        if self._has_begun:
            self._to_loop.put(value)
        else:
            self._has_begun, self._running = True, self._pool.submit(self._function)
            self._running.add_done_callback(lambda done: self._from_loop.put(None))
        # A tuple, since the function may hand over None, which here means that it has ended.
        request = self._from_loop.get()
        # The function has returned or failed.
        if request is None:
            self.is_over = True
            self._pool.shutdown()
            # Raises the error of the function, if it has failed.
            self._running.result()
        return request[0] if request else None

    def hand_over(self, value: Any = None) -> Any:
        """Pass a value to the other side and wait for its answer; called by the function."""
        self._from_loop.put((value,))
        answer = self._to_loop.get()
        if self._ends:
            raise _LoopThreadEnded
        return answer

    def end(self) -> None:
        """End the function at its present `hand_over`; can be called twice, and before it has begun."""
        # In a fork the thread does not exist, and waiting for it would never end.
        if os.getpid() != self._pid or self.is_over:
            return
        self.is_over = self._ends = True
        if self._has_begun:
            self._to_loop.put(None)
        self._pool.shutdown()


OwnLoopFunction = Callable[[Any], None]
EvaluateModel = Callable[[nn.Module, int, Any], Evaluation | None]
"""`evaluate(model, step, samples)`; samples None: the held-out data."""
SchedulerT = TypeVar("SchedulerT")


class RequestedUpdate(NamedTuple):
    """An update that a loop requests.

    Args:
        part: submodule to update, as named in `step`; empty: the whole model.
        loss: loss of one micro-batch.
    """

    part: str
    loss: Loss


class ReplicaValue(NamedTuple):
    """A value of one replica that `loop.reduce` combines over all replicas."""

    value: Tensor
    reduction: str


LoopRequest = RequestedUpdate | ReplicaValue | None
"""None: the loop waits for its next batch."""


class OracleLoop:
    """The object that a loop gets in place of an `OwnLoop`.

    Args:
        loop: the user's function.
        model: the model whose losses it computes.
        oracle: its optimizer and autocast are those of the loop.
        evaluate: computes the result of `evaluate`.
        num_replicas: number of replicas that the loop sees.

    Attributes:
        step_number: number of the step of the next batch.
    """

    def __init__(
        self,
        loop: OwnLoopFunction,
        model: nn.Module,
        oracle: Oracle,
        evaluate: EvaluateModel,
        num_replicas: int = 1,
    ) -> None:
        self.model, self.optimizer, self.session = model, oracle.optimizer, _SilentSession()
        self._evaluate, self.num_replicas = evaluate, num_replicas
        self._autocast, self._losses = oracle.autocast, list[Loss]()
        self._thread = LoopThread(lambda: loop(self), "own loop of the oracle")
        self._draws, self._waits_for_batch = GeneratorStates(), False
        self._rates: _SchedulerGroups | None = None
        self._updated, self.step_number = False, 0
        self._gather = WholeBatch() if num_replicas == 1 else _REFUSED_GATHER

    @property
    def needs_next_batch(self) -> bool:
        """Return whether the loop is finished with its last batch."""
        return self._waits_for_batch

    def take(self, batch: Any) -> LoopRequest:
        """Pass a batch to the loop, with the generators as they are; return its first request."""
        return self._resume((batch, torch.is_grad_enabled()))

    def go_on(self, answer: UpdateResult | Tensor | None) -> LoopRequest:
        """Continue the loop after its request, or start it; return its next request."""
        if self._waits_for_batch:
            return None
        self._draws.put_back()
        return self._resume(answer)

    def close(self) -> None:
        """End the loop at its present request."""
        self._thread.end()

    def batches(self) -> Iterator[Any]:
        """Yield batches as `OwnLoop.batches`, without an end."""
        while True:
            # Grad mode and autocast belong to a thread, so the loop's thread enters them itself.
            batch, learns = self._thread.hand_over()
            self._losses, self._updated = [], False
            with torch.set_grad_enabled(learns), self._autocast(), gather_scope(self._gather):
                yield batch

    def backward(self, loss: Loss) -> None:
        """Record a loss; the oracle runs backward itself."""
        self._losses.append(check_loss(loss))

    def step(self, part: str = "") -> UpdateResult | None:
        """Request an update with the recorded losses; the oracle makes it."""
        if not self._losses:
            raise TaskError("step() was called without a loss: call backward(loss) before")
        total = torch.stack([loss.total.reshape(()) for loss in self._losses]).sum()
        request, self._losses = RequestedUpdate(part, Loss(total, self._losses[0].count)), []
        update: UpdateResult | None = self._thread.hand_over(request)
        # The cache holds casts of the weights from before the update.
        torch.clear_autocast_cache()
        self._updated = update is not None
        if update is not None and self._rates is not None:
            self._rates.step()
        return update

    def reduce(self, value: Tensor | float, how: str = "sum") -> Tensor:
        """Combine a value over all replicas, as `OwnLoop.reduce`."""
        require_reduction(how)
        local = torch.as_tensor(value).detach()
        combined: Tensor = self._thread.hand_over(ReplicaValue(local, how))
        return combined.to(local.device)

    def evaluate(self, source: Any = None) -> Evaluation | None:
        """Evaluate as `OwnLoop.evaluate`, which completes the step."""
        self.step_number += self._updated
        self._updated = False
        return self._evaluate(self.model, self.step_number, source)

    def schedule(self, make: Callable[[torch.optim.Optimizer], SchedulerT]) -> SchedulerT:
        """Make a scheduler as `OwnLoop.schedule`; the oracle takes over its options before an update."""
        self._rates = self._rates or _SchedulerGroups(self.optimizer)
        return make(self._rates)

    def options(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the options that the loop's scheduler has set in each group; None: there is none."""
        return self._rates.options() if self._rates is not None else None

    def stop(self, reason: str) -> None:
        """Do nothing: the oracle ends where the run ends."""

    def _resume(self, value: Any) -> LoopRequest:
        request: LoopRequest = self._thread.resume(value)
        if self._thread.is_over:
            raise loop_ended_error()
        self._draws, self._waits_for_batch = GeneratorStates(), request is None
        return request


_REFUSED_GATHER = RefusedGather(
    "an own loop with paceline.gather is verified on the whole batch at once, but the loss of its task calls"
    " no gather, so the loops of the replicas run one after another",
    "call paceline.gather in the loss of the task, too",
)


class _SilentSession(NamedTuple):
    """The session that a loop of the oracle sees: not the first rank, so the loop writes no files."""

    is_first: bool = False


class _SchedulerGroups(torch.optim.Optimizer):
    """An optimizer for schedulers: groups with their own options, and a step that changes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [
            {**copy.deepcopy(_options_of_group(group)), "params": [torch.zeros((), requires_grad=True)]}
            for group in optimizer.param_groups
        ]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> Any:
        """Change nothing; schedulers check that it was called before them."""

    def options(self) -> Sequence[Mapping[str, Any]]:
        """Return the options of each group."""
        return [_options_of_group(group) for group in self.param_groups]


def _options_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class GeneratorStates:
    """The states of the generators that `seed_all` seeds, as of the construction."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
        )
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back(self) -> None:
        """Restore the states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)


def resolve_reductions(
    loops: Sequence[OracleLoop], requests: Sequence[LoopRequest]
) -> list[RequestedUpdate | None]:
    """Answer all calls of `reduce`, and return the next other request of each loop.

    Args:
        loops: the loops of all replicas.
        requests: their present requests.
    Raises:
        StrategyError: only some of them call `reduce`.
    """
    pending = list(requests)
    while values := [request for request in pending if isinstance(request, ReplicaValue)]:
        if len(values) < len(pending):
            raise StrategyError(
                "loop.reduce() is called by some replicas and not by others",
                next_step="call it on every rank at the same place of the loop",
            )
        answer = reduce_values([request.value for request in values], values[0].reduction)
        pending = [loop.go_on(answer) for loop in loops]
    return cast("list[RequestedUpdate | None]", pending)


def missing_step_error() -> TaskError:
    """Return the error of a loop that takes its next batch without a step."""
    return TaskError(
        "the loop took its next batch without calling step()",
        next_step="for batch in loop.batches(): loss = ...; loop.backward(loss); loop.step()",
    )


def loop_ended_error() -> StrategyError:
    """Return the error of a loop that ends before the compared steps."""
    return StrategyError(
        "the loop ended before all steps were compared",
        next_step="let it run to the end of loop.batches(), or verify fewer steps",
    )
