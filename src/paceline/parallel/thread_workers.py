"""Worker threads of one process (lanes in a recipe), which train on copies with shared parameters.

Each thread computes with one CPU thread, as a process of its own would. Invariant: a thread owns its
gradients, its buffers and everything else in its modules; parameters are one memory, which no thread writes
while threads run. All threads have ended when `run` returns or raises. A lane sums its shards to nodes of
the summation tree (`comm.reduction.summation_tree`), and all nodes go to the sink, so the bits are those of
one lane.
"""

from __future__ import annotations

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
from paceline.models.module_copy import deep_copy
from paceline.observe.step_stats import PhaseTimer
from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import LossSums, MetricNames, ModelFunction, ModelRunner
from paceline.parallel.rng_state import RngStates, describe_generator
from paceline.parallel.sharded_model import ShardedModel, unsharded_model
from paceline.pipeline_schedule.schedule_table import MeasuredSchedule
from paceline.state.slot import TensorSlot
from paceline.task import LossFunction

T = TypeVar("T")


class WorkerThreads:
    """Pool that runs several functions at a time, the first of them on the calling thread.

    Args:
        number: of functions.
        name: of one thread, for errors.
        deadline_seconds: the longest that the others may take after the first has ended.
    """

    def __init__(self, number: int, name: str, deadline_seconds: float) -> None:
        self._name, self._deadline_seconds = name, deadline_seconds
        # Every worker sets its number of CPU threads itself, as it is a setting of the calling thread.
        self._pool = ThreadPoolExecutor(number - 1, name, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run the functions and return their results in order.

        Raises:
            TaskError: a function is still running at the deadline.
        """
        others = [self._pool.submit(function) for function in functions[1:]]
        try:
            first = functions[0]()
        except CommunicationError as error:
            # A lost neighbour is usually the consequence: raise the error of the thread that failed first.
            self._join(others)
            raise next((e for other in others if (e := other.exception()) is not None), error) from None
        finally:
            self._join(others)
        return [first, *(other.result() for other in others)]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _join(self, others: Sequence[Future[T]]) -> None:
        """Wait for the other functions, since no thread may run after `run` has returned."""
        _, late = wait(others, self._deadline_seconds)
        if late:
            raise TaskError(
                f"{len(late)} {self._name}s still run {self._deadline_seconds:g} s after the first has ended",
                next_step="look for a wait in the model or its loss, or increase runtime.deadline_seconds",
            )


class ThreadedRunnerBase:
    """Properties that runners of several threads take from their first thread."""

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
        """Nothing: gradients of shards are added in place and kept."""
        return {}

    @property
    def buffers(self) -> MicroBatchBuffers:
        return self._first.buffers

    @property
    def schedule(self) -> MeasuredSchedule | None:
        return self._first.schedule

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


def copy_sharing_parameters(model: nn.Module, why: str) -> nn.Module:
    """Return a copy of modules and buffers whose parameters share memory but have gradients of their own.

    Hooks and attributes of a parameter are copied.

    Args:
        why: a word for what needs the copy, for the error.
    Raises:
        TaskError: the model cannot be copied.
    """
    # With the memo, deepcopy takes these parameters instead of copying their values.
    memo = {id(p): _parameter_sharing_memory(p) for p in model.parameters()}
    try:
        twin = deep_copy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise TaskError(
            f"{why} run copies of the model, and {type(model).__name__} cannot be copied: {error}",
            next_step="let copy.deepcopy(model) work, or choose a strategy without lanes",
        ) from error
    # Keyed dropout finds its name in the model, which the copy has to learn again.
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


class FlagCopier:
    """Copier of the flags of a model to its copies: a callback may freeze parameters or switch modules.

    Args:
        twins: copies of the model.
    """

    def __init__(self, model: nn.Module, twins: Sequence[nn.Module]) -> None:
        self._parameters = [
            pair for twin in twins for pair in zip(model.parameters(), twin.parameters(), strict=True)
        ]
        self._modules = [pair for twin in twins for pair in zip(model.modules(), twin.modules(), strict=True)]

    def copy(self) -> None:
        """Give all copies the flags of the model."""
        for p, twin in self._parameters:
            if twin.requires_grad != p.requires_grad:
                twin.requires_grad_(p.requires_grad)
        for module, twin_module in self._modules:
            if twin_module.training != module.training:
                twin_module.training = module.training


class GlobalRngGuard:
    """Context manager that rejects use of the global generators of PyTorch, Python and NumPy.

    Threads share them, so the numbers that each draws would depend on timing.

    Raises:
        TaskError: a generator has advanced.
    """

    def __enter__(self) -> None:
        self._before = RngStates.current()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        used = RngStates.current().advanced(self._before) if error is None else []
        if used:
            raise TaskError(
                f"the model or its loss draws from {describe_generator(used[0])}, and all lanes would share"
                " it",
                next_step="use paceline.models.KeyedDropout for nn.Dropout, or a strategy without lanes",
            )


class ThreadedRunner(ThreadedRunnerBase):
    """Runner of a whole model on several threads, each with a copy of the modules around the same parameters.

    Args:
        sharded_model: a whole model on the CPU.
        loss, metric_names, precision: as for `ReplicatedRunner`.
        phases: timer of the first lane; the others run at the same time.
        num_lanes: number of threads.
        deadline_seconds: the longest that the other lanes may take after the first has ended.
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
        sharded_models = [sharded_model, *map(unsharded_model, twins)]
        self._flags = FlagCopier(sharded_model.model, [lane.model for lane in sharded_models[1:]])
        clocks = [phases, *(PhaseTimer() for _ in sharded_models[1:])]
        self._lanes = [
            ReplicatedRunner(
                sharded, loss, metric_names, precision=precision, phases=clock, overlap=False, seeds=False
            )
            for sharded, clock in zip(sharded_models, clocks, strict=True)
        ]
        self._first = self._lanes[0]
        self._phases, self._threads = phases, WorkerThreads(num_lanes, "lane", deadline_seconds)
        self.used: Collection[str] = ()
        self._was_checked = False

    def run(
        self, micro_batches: Iterable[LoadedBatch], num_micro_batches: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """Run the micro-batches; each lane takes a contiguous share of them."""
        self._flags.copy()
        self._phases.begin("data")
        pulled = list(islice(micro_batches, num_micro_batches))
        # In order of the shards, so that a lane has neighbours, whose sums meet in low nodes of the tree.
        loaded = sorted(pulled, key=_shard_of)
        shares = [_share_of_lane(loaded, len(self._lanes), k) for k in range(len(self._lanes))]
        before = self.buffers.values()
        for lane in self._lanes[1:]:
            # A copy has buffers of its own, without the changes of the last step.
            lane.buffers.reset(before)
        with GlobalRngGuard():
            if loaded and not self._was_checked:
                self._check_second_lane(loaded[0], scale)
            pairs = zip(self._lanes, shares, strict=True)
            results = self._threads.run([partial(_run_lane, lane, share, scale) for lane, share in pairs])
        sums = LossSums(self.metric_names)
        for lane, (_, lane_sums) in zip(self._lanes, results, strict=True):
            sums.extend(lane_sums)
            if lane is not self._first:
                self.buffers.append_changes(lane.buffers)
        # Callers match sums and buffer changes with the micro-batches by their position.
        indices = [loaded.index(micro_batch) for micro_batch in pulled]
        sums.reorder(indices)
        self.buffers.reorder(indices)
        self.used = {name for lane in self._lanes for name in lane.used}
        self._hand_on([node for nodes, _ in results for node in nodes], sink)
        return sums

    def _check_second_lane(self, loaded: LoadedBatch, scale: float) -> None:
        """Run one micro-batch on a copy alone, before threads could write the same gradients at a time.

        Raises:
            TaskError: the loss used the original model.
        """
        self._was_checked = True
        originals = self._first.sharded_model.computes
        for p in originals.values():
            p.grad = None
        before = self._lanes[1].buffers.values()
        _run_lane(self._lanes[1], [loaded], scale)
        self._lanes[1].buffers.reset(before)
        touched = [slot.name for slot, p in originals.items() if p.grad is not None]
        if touched:
            raise TaskError(
                f"the loss uses '{touched[0]}' of a model outside of its arguments, but lanes run copies",
                next_step="use only the model argument of loss(model, batch), or a strategy without lanes",
            )

    def _hand_on(self, nodes: Sequence[_NodeSums], sink: GradientSink) -> None:
        for k, (shards, grads) in enumerate(nodes):
            sink.micro_batch(shards, k == len(nodes) - 1)
            for slot in reversed(grads):
                sink.ready(slot, grads[slot])

    def abort(self) -> None:
        for lane in self._lanes:
            lane.abort()

    def forward_only(self, micro_batches: Iterable[LoadedBatch], function: ModelFunction) -> None:
        self._first.forward_only(micro_batches, function)

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> LossSums:
        """Evaluate on the first lane."""
        return self._first.evaluate(micro_batches)


_NodeSums = tuple[range, dict[TensorSlot, Tensor | None]]
"""Node of the summation tree, and the sums over it by slot."""


def _run_lane(
    lane: ReplicatedRunner, share: list[LoadedBatch], scale: float
) -> tuple[list[_NodeSums], LossSums]:
    """Run forward and backward of one lane's share; return its gradients by node, and its loss sums."""
    first, last = (share[0].micro_batch.shard, share[-1].micro_batch.shard) if share else (0, -1)
    nodes = covering_nodes(range(first, last + 1))
    sink = TreeReducer(lane.sharded_model.computes, nodes)
    sums = lane.run(share, len(share), sink, scale)
    by_slot = sink.take()
    return [
        (node, {s: sums_by_node.get(k) for s, sums_by_node in by_slot.items()})
        for k, node in enumerate(nodes)
    ], sums


def _shard_of(loaded: LoadedBatch) -> int:
    return loaded.micro_batch.shard


def _share_of_lane(loaded: list[LoadedBatch], num_lanes: int, lane: int) -> list[LoadedBatch]:
    indices = split_evenly(len(loaded), num_lanes, lane)
    return loaded[indices.start : indices.stop]
