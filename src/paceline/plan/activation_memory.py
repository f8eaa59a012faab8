"""Activation memory of a micro-batch, measured in one run of the model on fake tensors.

Every operation runs on fake tensors, which have a shape, a dtype and a device, so operations are those of a
run, and a model of any size takes no memory. `LiveBytes` counts the memory that operations allocate and
Python frees; `LayerTracker` says in which layer that happens. The chunks of a pipeline run one by one, with
inputs and gradients as they would arrive.

Positions in a model: 2k + 1 is inside the k-th call of a layer, in forward or backward, and 2k is between it
and the call before. Modules announce the position of forward, gradients of the inputs and outputs of a layer
that of backward; this changes nothing that is computed or kept.

Not counted: memory that a kernel allocates and frees within one operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.hooks import RemovableHandle

from paceline.data.loader import collate_samples
from paceline.errors import TaskError
from paceline.models.dropout import name_dropouts
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.pipeline.model_chain import (
    ModelCall,
    OutputStandIn,
    StageModule,
    as_tuple,
    record_call,
)
from paceline.plan.simulated_ranks import CPU, FakeModel
from paceline.state.slot import trained_parameters
from paceline.task import Task


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that counts the bytes of all tensors that are alive.

    Args:
        initial_bytes: bytes that were alive before.
    Attributes:
        now: bytes that are alive.
        position: position in the model, set by `at`.
        peaks: most bytes alive since `begin`, by (position, bytes of complete gradients).
        completed: (bytes alive, bytes of the gradient) at the completion of each gradient, by the same keys.
    """

    def __init__(self, initial_bytes: int = 0) -> None:
        super().__init__()
        self.now, self.position = initial_bytes, 0
        self.peaks = {(0, 0): initial_bytes}
        self.completed: dict[tuple[int, int], tuple[int, int]] = {}
        self._completed = 0
        self._sizes: dict[int, int] = {}
        self._outside: set[int] = set()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the memory of these tensors, such as parameters."""
        self._outside |= {t.untyped_storage()._cdata for t in tensors}

    def begin(self) -> None:
        """Start new peaks at the present memory."""
        self._completed, self.peaks, self.completed = 0, {(self.position, 0): self.now}, {}

    def at(self, position: int) -> None:
        """Move to another position of the model."""
        self.position = position
        self._note()

    def complete(self, grad: Tensor) -> None:
        """Record that a gradient is complete; its memory is counted separately from now on."""
        address = grad.untyped_storage()._cdata
        self.now -= self._sizes.pop(address, 0)
        # Its size is now part of the gradients, whose number depends on the schedule (`step_peak`).
        self._outside.add(address)
        size = grad.numel() * grad.element_size()
        self._completed += size
        self.completed[self.position, self._completed] = self.now, size
        self._note()

    @property
    def peak(self) -> int:
        """Return the most bytes alive since `begin`, without complete gradients."""
        return max(self.peaks.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default and not any(isinstance(x, FakeTensor) for x in args):
            # Recomputation compares states of random generators, which are real tensors.
            with unset_fake_temporarily():
                return func(*args)
        result = func(*args, **(kwargs or {}))
        for t in tree_iter(result):
            if isinstance(t, Tensor):
                self.add(t)
        return result

    def add(self, t: Tensor) -> None:
        """Count the memory of a tensor, unless it is already counted."""
        storage = t.untyped_storage()
        address = storage._cdata
        if address in self._sizes or address in self._outside:
            return
        self._sizes[address] = storage.nbytes()
        self.now += self._sizes[address]
        # On the storage, not the tensor: views and saved tensors keep the memory alive.
        weakref.finalize(storage, self._gone, address)
        self._note()

    def _gone(self, address: int) -> None:
        self.now -= self._sizes.pop(address, 0)
        # Memory that is allocated later can get the same address.
        self._outside.discard(address)

    def _note(self) -> None:
        key = self.position, self._completed
        self.peaks[key] = max(self.now, self.peaks.get(key, 0))


class TensorShape(NamedTuple):
    """The sizes and dtype of a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


class LayerCall(NamedTuple):
    """A call of a layer.

    Args:
        layer: number of the layer.
        live: bytes that were alive before the call.
        arguments: positional and keyword arguments, with a `TensorShape` in place of each tensor.
    """

    layer: int
    live: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


class LayerTracker:
    """A context manager around a forward that tracks the position of the forward and of its backward.

    Args:
        layers: layers by number, none inside another.
        live: gets every new position.
    Attributes:
        entries: calls so far, in order.
    """

    def __init__(self, layers: Mapping[int, nn.Module], live: LiveBytes) -> None:
        self._layers, self._live = layers, live
        self._hooks: list[RemovableHandle] = []
        self.entries: list[LayerCall] = []

    def __enter__(self) -> None:
        for number, layer in self._layers.items():
            self._hooks += [
                layer.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True),
                layer.register_forward_hook(self._leave),
            ]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, number: int, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = len(self.entries)
        self.entries.append(LayerCall(number, self._live.now, tree_map(_shape_of, (args, kwargs))))
        self._live.at(2 * call + 1)
        _call_on_gradient((args, kwargs), lambda: self._out_of(call))

    def _leave(self, _layer: nn.Module, _args: Any, results: Any) -> None:
        # Layers are not nested, so the call that ends is the last one that began.
        call = len(self.entries) - 1
        self._live.at(2 * call + 2)
        _call_on_gradient(results, lambda: self._live.at(2 * call + 1))

    def _out_of(self, call: int) -> None:
        """Leave the layer, unless backward is already in the layer whose output was this input."""
        if self._live.position == 2 * call + 1:
            self._live.at(2 * call)


def _shape_of(value: Any) -> Any:
    return TensorShape(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _call_on_gradient(values: Any, arrived: Callable[[], None]) -> None:
    """Call `arrived` when a gradient of one of the tensors arrives."""
    for t in _differentiable(values):
        t.register_hook(partial(_call_without_gradient, arrived))


def _call_without_gradient(arrived: Callable[[], None], _grad: Tensor) -> None:
    arrived()


def _differentiable(values: Any) -> Iterator[Tensor]:
    for value in tree_iter(values):
        if isinstance(value, Tensor) and value.requires_grad:
            yield value


LATE_MESSAGES = 2
"""Messages that Gloo's threads can hold after their call: each of the two threads of a process group frees
one when it starts the next. Counted in micro-batches for tensor shards and stages, in calls for context."""


@dataclass(frozen=True)
class MicroBatchFootprint:
    """Bytes that one chunk of a model needs for one micro-batch, without its parameters.

    Args:
        kept: bytes kept from the end of the forward to the backward.
        forward: most bytes in the forward, by position.
        backward: most bytes in the backward, without complete gradients, by (position, bytes of complete
            gradients).
        passed: bytes of messages of tensor and context ranks that threads of a backend free late.
        arriving, departing: bytes of the input from the previous chunk, and of the output to the next.
        evaluation: most bytes of a forward without gradients, with a batch of the evaluation.
        departing_evaluation: bytes of the output with such a batch.
        entries: calls of the layers.
        completed: (bytes alive, bytes of the gradient) at the completion of each gradient, with the keys of
            `backward`.
        completes: names of trained tensors in the order in which their gradients become complete.
    """

    kept: int
    forward: Mapping[int, int]
    backward: Mapping[tuple[int, int], int]
    passed: int
    arriving: int
    departing: int
    evaluation: int = 0
    departing_evaluation: int = 0
    entries: Sequence[LayerCall] = ()
    completed: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    completes: Sequence[str] = ()


def first_batch(task: Task, num_samples: int) -> Any:
    """Return the first samples as a batch; they repeat if there are too few."""
    length = len(task.data)
    samples = [task.data[k % length] for k in range(max(1, num_samples))]
    return collate_samples(task, samples, CPU)


class FakeTensorRun:
    """A run of all chunks of a fake model, one after another.

    Args:
        task: its loss is used.
        fake_model: the model; its gradients are dropped after a run.
        fake: the mode in which the model was made.
        precision: number format of forward and backward.
        samples, evaluated: samples of a micro-batch, and of a batch of the evaluation (0: there is none).
        layers: layers of the model by number, none inside another.
    """

    def __init__(
        self,
        task: Task,
        fake_model: FakeModel,
        fake: FakeTensorMode,
        precision: MixedPrecision,
        *,
        samples: int,
        evaluated: int,
        layers: Mapping[int, nn.Module],
    ) -> None:
        self._task, self._fake_model, self._fake = task, fake_model, fake
        self._precision = precision
        self._layers = layers
        self._batches = [self._faked(first_batch(task, n)) if n else None for n in (samples, evaluated)]

    def _faked(self, batch: Any) -> Any:
        return tree_map(lambda x: self._fake.from_tensor(x) if isinstance(x, Tensor) else x, batch)

    def run(self, chunks: Sequence[Sequence[nn.Module]] | None) -> list[MicroBatchFootprint]:
        """Return the footprint of each chunk.

        Args:
            chunks: modules of each chunk of the chain; None: the model runs as a whole.
        Raises:
            TaskError: model or loss need values, which fake tensors do not have.
        """
        model = self._fake_model.model
        try:
            with self._fake:
                footprints: list[MicroBatchFootprint] = self._chunks(
                    model, chunks, self._batches[0], self._trained
                )
                if self._batches[1] is None:
                    return footprints
                with torch.no_grad():
                    peaks = self._chunks(model.eval(), chunks, self._batches[1], self._evaluated)
                return [
                    replace(footprint, evaluation=peak, departing_evaluation=departing)
                    for footprint, (peak, departing) in zip(footprints, peaks, strict=True)
                ]
        # All errors of fake tensors are RuntimeErrors.
        except RuntimeError as error:
            raise TaskError(
                f"the memory of the model cannot be planned, since it cannot run on fake tensors: {error}",
                next_step="remove reads of tensor values (.item(), if tensor: ...) from forward and loss, or"
                " leave memory.budget out",
            ) from error

    def _chunks(
        self,
        model: nn.Module,
        chunks: Sequence[Sequence[nn.Module]] | None,
        batch: Any,
        measure: Callable[[nn.Module, Callable[[Any], Any], Any, int], tuple[Any, Any]],
    ) -> list[Any]:
        _key_dropouts(model)
        loaded = _num_bytes(x for x in tree_iter(batch) if isinstance(x, Tensor))
        with self._fake_model.seen(batch) as local_batch:
            if chunks is None:
                result, _ = measure(model, lambda _: self._task.loss(model, local_batch).total, (), loaded)
                return [result]
            call = record_call(self._task.loss, local_batch, training=model.training)
            results, x = [], None
            for number, links in enumerate(chunks):
                stage = StageModule(links)
                stage.training = model.training  # not of the links, which have their own modes
                run = partial(_run_first_chunk, stage, call) if number == 0 else partial(_run_chunk, stage)
                if number == len(chunks) - 1:
                    run = partial(self._loss_of_output, run, local_batch)
                # Only the first and the last chunk get the batch: inputs and targets.
                ends = number in (0, len(chunks) - 1)
                result, x = measure(model, run, x, loaded if ends else 0)
                results.append(result)
            return results

    def _loss_of_output(self, run: Callable[[Any], Any], batch: Any, x: Any) -> Tensor:
        return self._task.loss(OutputStandIn(lambda: run(x)), batch).total

    def _trained(
        self, model: nn.Module, run: Callable[[Any], Any], arrived: Any, loaded: int
    ) -> tuple[MicroBatchFootprint, Any]:
        """Return the footprint of a forward and backward, and the input of the next chunk.

        Args:
            loaded: bytes of the batch, for chunks that get it.
        """
        live, before = LiveBytes(loaded), self._fake_model.exchanged()
        tracker = LayerTracker(self._layers, live)
        live.leave_out([*model.parameters(), *model.buffers(), *(arrived or ())])
        completes: list[str] = []
        with _recording_completed_gradients(model, live, completes), live:
            x = tuple(t.detach().clone().requires_grad_(t.is_floating_point()) for t in arrived or ())
            live.begin()
            with tracker, self._precision.autocast():
                outputs = as_tuple(run(x))
            kept_bytes, forward = live.now, dict(live.peaks)
            # Detached: the next chunk must not keep the graph of this one.
            sent = [t.detach() for t in outputs]
            live.begin()
            pairs = [(t, torch.ones_like(t)) for t in outputs if t.requires_grad]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            backward = dict(live.peaks)
        for p in model.parameters():
            p.grad = None
        crossing = _num_bytes(x), _num_bytes(sent)
        passed = LATE_MESSAGES * (self._fake_model.exchanged() - before + self._fake_model.straight.largest)
        by_position = {position: most for (position, _), most in forward.items()}
        footprint = MicroBatchFootprint(
            kept_bytes, by_position, backward, passed, *crossing, completed=dict(live.completed)
        )
        return replace(footprint, entries=tracker.entries, completes=completes), sent

    def _evaluated(
        self, model: nn.Module, run: Callable[[Any], Any], arrived: Any, loaded: int
    ) -> tuple[tuple[int, int], Any]:
        """Return most bytes of a forward and bytes of its output, and the input of the next chunk."""
        live = LiveBytes(loaded)
        live.leave_out([*model.parameters(), *model.buffers()])
        with live, self._precision.autocast():
            x = tuple(t.clone() for t in arrived or ())
            outputs = as_tuple(run(x))
        return (live.peak + LATE_MESSAGES * self._fake_model.straight.largest, _num_bytes(outputs)), outputs


def _run_first_chunk(stage: nn.Module, call: ModelCall, _x: Any) -> Any:
    return stage(*call.inputs, **call.named)


def _run_chunk(stage: nn.Module, x: Any) -> Any:
    return stage(*x)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _key_dropouts(model: nn.Module) -> None:
    for dropout in name_dropouts(model):
        dropout.micro_batch_key = 0


@contextmanager
def _recording_completed_gradients(model: nn.Module, live: LiveBytes, order: list[str]) -> Iterator[None]:
    """Report gradients to `live` as they become complete, and append the names of their parameters."""

    def record(name: str, p: Tensor) -> None:
        order.append(name)
        if p.grad is not None:
            live.complete(p.grad)

    trained = trained_parameters(model)
    hooks = [p.register_post_accumulate_grad_hook(partial(record, slot.name)) for slot, p in trained.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
