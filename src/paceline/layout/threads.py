"""Threads of one process that compute side by side, on copies of the modules around the same parameters.

Each computes with one thread, as a process of its own would. Invariant: a thread owns its gradients, its
buffers and whatever else its modules hold; parameters are one memory, which nobody writes while threads run.
All have ended when `run` returns or raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.errors import CommunicationError, TaskError
from paceline.layout.buffers import MicroBatchBuffers
from paceline.layout.holding import Holding
from paceline.layout.placed import Placed
from paceline.layout.sums import MetricNames
from paceline.models.dropout import name_dropouts
from paceline.slot import Slot

T = TypeVar("T")


class Threads:
    """Runs some functions at a time, the first on the thread that asks.

    Args:
        number: of functions.
        name: of one thread, for errors.
        deadline_seconds: the longest that the others may take once the first has ended.
    """

    def __init__(self, number: int, name: str, deadline_seconds: float) -> None:
        self._name, self._deadline_seconds = name, deadline_seconds
        self._pool = ThreadPoolExecutor(number - 1, name, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Their results, in order.

        Raises:
            TaskError: one still runs at the deadline.
        """
        others = [self._pool.submit(function) for function in functions[1:]]
        try:
            first = functions[0]()
        except CommunicationError as error:  # because another one has failed?
            self._join(others)
            raise next((e for other in others if (e := other.exception()) is not None), error) from None
        finally:
            self._join(others)
        return [first, *(other.result() for other in others)]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _join(self, others: Sequence[Future[T]]) -> None:
        """Nobody may still run when `run` returns."""
        _, late = wait(others, self._deadline_seconds)
        if late:
            raise TaskError(
                f"{len(late)} {self._name}s still run {self._deadline_seconds:g} s after the first has ended",
                next_step="look for a wait in the model or its loss, or raise runtime.deadline_seconds",
            )


class LedByFirst:
    """What a layout of several threads shows: what the first holds."""

    _first: Placed
    _threads: Threads

    @property
    def metric_names(self) -> MetricNames:
        return self._first.metric_names

    @property
    def holding(self) -> Holding:
        return self._first.holding

    @property
    def norms(self) -> Mapping[Slot, Sequence[Tensor]]:
        """Gradients of shards are added where they lie, and kept."""
        return {}

    @property
    def buffers(self) -> MicroBatchBuffers:
        return self._first.buffers

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


def around_the_same_parameters(model: nn.Module, why: str) -> nn.Module:
    """A copy of the modules and buffers; parameters have gradients of their own and share their memory.

    Hooks and attributes of a parameter go with it.

    Args:
        why: a word for what needs the copy.
    Raises:
        TaskError: the model cannot be copied.
    """
    memo = {id(p): _twin_of(p) for p in model.parameters()}
    try:
        twin = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise TaskError(
            f"{why} run copies of the model, and {type(model).__name__} cannot be copied: {error}",
            next_step="let copy.deepcopy(model) work, or choose a strategy without lanes",
        ) from error
    name_dropouts(twin)
    return twin


def _twin_of(p: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(p.data, p.requires_grad)
    twin.__dict__.update(p.__dict__)
    for hook in (p._backward_hooks or {}).values():
        twin.register_hook(hook)
    for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
        twin.register_post_accumulate_grad_hook(hook)
    return twin


class NobodyDraws:
    """Threads share PyTorch's own generator, so what they draw from it depends on who is first.

    Raises:
        TaskError: somebody drew.
    """

    def __enter__(self) -> None:
        self._before = torch.default_generator.get_state()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None and not torch.equal(self._before, torch.default_generator.get_state()):
            raise TaskError(
                "the model or its loss draws from PyTorch's own generator, which lanes would share",
                next_step="use paceline.models.KeyedDropout for nn.Dropout, or a strategy without lanes",
            )
