"""Threads of one process that compute side by side, on copies of the modules around the same parameters.

Each computes with one thread, as a process of its own would. Invariant: a thread owns its gradients, its
buffers and whatever else its modules hold; parameters are one memory, which nobody writes while threads run.
All have ended when `run` returns or raises.

Lanes: threads of one process that run virtual shards side by side, on copies that share the parameters.

A lane sums its shards to nodes of the tree of additions (`comm.reduction.tree`); all nodes go to the sink.
Invariant: the bits are those of one lane.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.comm.reduction.bucket_reducer import TreeReducer
from paceline.comm.reduction.gradients import GradientSink
from paceline.comm.reduction.summation_tree import covering_nodes
from paceline.data.work import LoadedBatch, split_evenly
from paceline.errors import CommunicationError, TaskError
from paceline.models.dropout import name_dropouts
from paceline.observe.step_stats import PhaseTimer
from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import LossSums, MetricNames, ModelFunction, ModelRunner
from paceline.parallel.sharded_model import ShardedModel, unsharded_model
from paceline.state.slot import TensorSlot
from paceline.task import LossFunction

T = TypeVar("T")


class WorkerThreads:
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


class ThreadedRunnerBase:
    """What a layout of several threads shows: what the first holds."""

    _first: ModelRunner
    _threads: WorkerThreads

    @property
    def metric_names(self) -> MetricNames:
        return self._first.metric_names

    @property
    def sharded_model(self) -> ShardedModel:
        return self._first.sharded_model

    @property
    def norms(self) -> Mapping[TensorSlot, Sequence[Tensor]]:
        """Gradients of shards are added where they lie, and kept."""
        return {}

    @property
    def buffers(self) -> MicroBatchBuffers:
        return self._first.buffers

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


def copy_sharing_parameters(model: nn.Module, why: str) -> nn.Module:
    """A copy of the modules and buffers; parameters have gradients of their own and share their memory.

    Hooks and attributes of a parameter go with it.

    Args:
        why: a word for what needs the copy.
    Raises:
        TaskError: the model cannot be copied.
    """
    memo = {id(p): _parameter_sharing_memory(p) for p in model.parameters()}
    try:
        twin = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise TaskError(
            f"{why} run copies of the model, and {type(model).__name__} cannot be copied: {error}",
            next_step="let copy.deepcopy(model) work, or choose a strategy without lanes",
        ) from error
    name_dropouts(twin)
    return twin


def _parameter_sharing_memory(p: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(p.data, p.requires_grad)
    twin.__dict__.update(p.__dict__)
    for hook in (p._backward_hooks or {}).values():
        twin.register_hook(hook)
    for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
        twin.register_post_accumulate_grad_hook(hook)
    return twin


class GlobalRngGuard:
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


class ThreadedRunner(ThreadedRunnerBase):
    """One whole model, and further copies of its modules around the same parameters.

    Args:
        sharded_model: of a whole model on the processor.
        loss, metric_names, precision: as for `ReplicatedRunner`.
        phases: of the first lane; the others run meanwhile.
        num_lanes: threads.
        deadline_seconds: the longest that the other lanes may take once the first has ended.
    Raises:
        TaskError: the model cannot be copied.
    """

    def __init__(
        self,
        sharded_model: ShardedModel,
        loss: LossFunction,
        metric_names: MetricNames,
        *,
        precision: MixedPrecision,
        phases: PhaseTimer,
        num_lanes: int,
        deadline_seconds: float,
    ) -> None:
        twins = (copy_sharing_parameters(sharded_model.model, "lanes") for _ in range(num_lanes - 1))
        holdings = [sharded_model, *map(unsharded_model, twins)]
        clocks = [phases, *(PhaseTimer() for _ in holdings[1:])]
        self._lanes = [
            ReplicatedRunner(
                h, loss, metric_names, precision=precision, phases=clock, overlap=False, seeds=False
            )
            for h, clock in zip(holdings, clocks, strict=True)
        ]
        self._first = self._lanes[0]
        self._phases, self._threads = phases, WorkerThreads(num_lanes, "lane", deadline_seconds)
        self.used: Collection[str] = ()
        self._tried = False

    def run(
        self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """See `ModelRunner.run`; each lane takes a contiguous share of the micro-batches."""
        self._phases.begin("data")
        came = list(islice(micro_batches, count))
        loaded = sorted(came, key=_shard_of)  # so that a lane has neighbours, which meet low in the tree
        shares = [_share_of_lane(loaded, len(self._lanes), k) for k in range(len(self._lanes))]
        before = self.buffers.values()
        for lane in self._lanes[1:]:
            lane.buffers.reset(before)
        with GlobalRngGuard():
            if loaded and not self._tried:
                self._try_second_lane(loaded[0], scale)
            pairs = zip(self._lanes, shares, strict=True)
            found = self._threads.run([partial(_run_lane, lane, share, scale) for lane, share in pairs])
        sums = LossSums(self.metric_names)
        for lane, (_, own) in zip(self._lanes, found, strict=True):
            sums.extend(own)
            if lane is not self._first:
                self.buffers.append_changes(lane.buffers)
        places = [loaded.index(one) for one in came]
        sums.reorder(places)
        self.buffers.reorder(places)
        self.used = {name for lane in self._lanes for name in lane.used}
        self._hand_on([part for parts, _ in found for part in parts], sink)
        return sums

    def _try_second_lane(self, loaded: LoadedBatch, scale: float) -> None:
        """Run one micro-batch on a copy alone, before threads would write the same gradients at a time.

        Raises:
            TaskError: the loss used the original.
        """
        self._tried = True
        originals = self._first.sharded_model.computes
        for p in originals.values():
            p.grad = None
        before = self._lanes[1].buffers.values()
        _run_lane(self._lanes[1], [loaded], scale)
        self._lanes[1].buffers.reset(before)
        touched = [slot.name for slot, p in originals.items() if p.grad is not None]
        if touched:
            raise TaskError(
                f"the loss touches '{touched[0]}' of a model from around it, not of the one that it is given,"
                " and lanes run copies",
                next_step="use the first argument of loss(model, batch) only, or a strategy without lanes",
            )

    def _hand_on(self, parts: Sequence[_NodeSums], sink: GradientSink) -> None:
        for k, (shards, grads) in enumerate(parts):
            sink.micro_batch(shards, k == len(parts) - 1)
            for slot in reversed(grads):
                sink.ready(slot, grads[slot])

    def abort(self) -> None:
        """See `ModelRunner`."""
        for lane in self._lanes:
            lane.abort()

    def answer(self, micro_batches: Iterable[LoadedBatch], ask: ModelFunction) -> None:
        """See `ModelRunner`; on one lane."""
        self._first.answer(micro_batches, ask)

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> LossSums:
        """See `ModelRunner`; on one lane."""
        return self._first.evaluate(micro_batches)


_NodeSums = tuple[range, dict[TensorSlot, Tensor | None]]
"""A node of the tree of additions, and the sums over it."""


def _run_lane(
    lane: ReplicatedRunner, share: list[LoadedBatch], scale: float
) -> tuple[list[_NodeSums], LossSums]:
    """Forward and backward of one lane's share; its sums by node."""
    first, last = (share[0].micro_batch.shard, share[-1].micro_batch.shard) if share else (0, -1)
    nodes = covering_nodes(range(first, last + 1))
    sink = TreeReducer(lane.sharded_model.computes, nodes)
    sums = lane.run(share, len(share), sink, scale)
    by_slot = sink.take()
    return [(node, {s: found.get(k) for s, found in by_slot.items()}) for k, node in enumerate(nodes)], sums


def _shard_of(loaded: LoadedBatch) -> int:
    return loaded.micro_batch.shard


def _share_of_lane(loaded: list[LoadedBatch], num_lanes: int, lane: int) -> list[LoadedBatch]:
    part = split_evenly(len(loaded), num_lanes, lane)
    return loaded[part.start : part.stop]
