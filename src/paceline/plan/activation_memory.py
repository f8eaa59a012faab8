"""Bytes of the tensors that are alive at a time, as operations make them and Python lets go of them.

Every operation of PyTorch passes here, forward or backward, and says which memory it has made; the memory
itself says when it goes. Under fake tensors nothing of it exists, and the numbers are the same. Not seen:
what a kernel takes and gives back inside one operation.

Where in a model a rehearsal is: before, inside or behind which of its layers.

Place 2k + 1 is inside the k-th call of a layer, forward or backward, and 2k between it and the call before.
Modules tell of forward, and the gradients of what a block was given and gave tell of backward; nothing that
is computed, or kept, changes.

One micro-batch through a model that has no memory: what its forward keeps, and what its backward takes.

Every operation runs on fake tensors, which have a shape, a type and a device, so that the kernels are those
of a run and a model of any size takes no memory here. The chain of a pipeline is run chunk by chunk, each by
itself: its inputs, and the gradients of its outputs, arrive as they would.
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
    """Counts memory that is made inside.

    Args:
        there: bytes that were alive before.
    Attributes:
        now: bytes that are alive.
        place: where in the model this is, as `at` was told.
        peaks: by (place, bytes of gradients that were complete), the most bytes alive since `begin`.
        handed: by the same, for each gradient as it became complete, what was alive then and its bytes.
    """

    def __init__(self, there: int = 0) -> None:
        super().__init__()
        self.now, self.place = there, 0
        self.peaks = {(0, 0): there}
        self.handed: dict[tuple[int, int], tuple[int, int]] = {}
        self._completed = 0
        self._sizes: dict[int, int] = {}
        self._outside: set[int] = set()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Memory that is counted otherwise, as that of parameters."""
        self._outside |= {t.untyped_storage()._cdata for t in tensors}

    def begin(self) -> None:
        """Look for peaks from here on."""
        self._completed, self.peaks, self.handed = 0, {(self.place, 0): self.now}, {}

    def at(self, place: int) -> None:
        """From here on it is another place of the model."""
        self.place = place
        self._note()

    def complete(self, grad: Tensor) -> None:
        """A gradient is complete; it is counted apart from now on."""
        place = grad.untyped_storage()._cdata
        self.now -= self._sizes.pop(place, 0)
        self._outside.add(place)
        size = grad.numel() * grad.element_size()
        self._completed += size
        self.handed[self.place, self._completed] = self.now, size
        self._note()

    @property
    def peak(self) -> int:
        """The most that was alive at a time since `begin`, without gradients that were complete."""
        return max(self.peaks.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default and not any(isinstance(x, FakeTensor) for x in args):
            with unset_fake_temporarily():  # states of random numbers are real, and are compared
                return func(*args)
        found = func(*args, **(kwargs or {}))
        for t in tree_iter(found):
            if isinstance(t, Tensor):
                self.add(t)
        return found

    def add(self, t: Tensor) -> None:
        """Count the memory of a tensor, unless it is counted already."""
        storage = t.untyped_storage()
        place = storage._cdata
        if place in self._sizes or place in self._outside:
            return
        self._sizes[place] = storage.nbytes()
        self.now += self._sizes[place]
        weakref.finalize(storage, self._gone, place)
        self._note()

    def _gone(self, place: int) -> None:
        self.now -= self._sizes.pop(place, 0)
        self._outside.discard(place)  # the next memory may have its address

    def _note(self) -> None:
        here = self.place, self._completed
        self.peaks[here] = max(self.now, self.peaks.get(here, 0))


class TensorShape(NamedTuple):
    """A tensor, without its memory."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


class LayerCall(NamedTuple):
    """A call of a layer.

    Args:
        layer: its number; of a block that of the block.
        live: bytes that were alive before it.
        given: its arguments, positional and by name; a `TensorShape` in place of each tensor.
    """

    layer: int
    live: int
    given: tuple[tuple[Any, ...], dict[str, Any]]


class LayerTracker:
    """Around a forward: tells where it is, and where its backward will be.

    Args:
        layers: by number, none inside another.
        live: is told.
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
        call = len(self.entries) - 1
        self._live.at(2 * call + 2)
        _call_on_gradient(results, lambda: self._live.at(2 * call + 1))

    def _out_of(self, call: int) -> None:
        """Unless backward is in another layer already, which gave what this one was given."""
        if self._live.place == 2 * call + 1:
            self._live.at(2 * call)


def _shape_of(value: Any) -> Any:
    return TensorShape(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _call_on_gradient(values: Any, arrived: Callable[[], None]) -> None:
    """Once a gradient of one of them comes."""
    for t in _differentiable(values):
        t.register_hook(partial(_call_without_gradient, arrived))


def _call_without_gradient(arrived: Callable[[], None], _grad: Tensor) -> None:
    arrived()


def _differentiable(values: Any) -> Iterator[Tensor]:
    for value in tree_iter(values):
        if isinstance(value, Tensor) and value.requires_grad:
            yield value


LATE_MESSAGES = 2
"""Micro-batches of tensor shards and stages whose messages Gloo's threads may still hold; and of context
ranks calls: each of the two threads of a process group lets go of one before it takes up another."""


@dataclass(frozen=True)
class MicroBatchFootprint:
    """Bytes that one chunk of a model takes for one micro-batch, beside its parameters.

    Args:
        kept: from the end of its forward to its backward.
        forward: by place, the most during its forward; see `LayerTracker`.
        backward: by (place, bytes of gradients that were complete by then, which it does not count), the most
            during its backward.
        passed: of what tensor and context ranks send each other, which threads of a backend let go of late.
        arriving, departing: of what comes from the chunk before, and of what goes to the next.
        evaluation: the most of a forward without gradients, with a batch of evaluation.
        departing_evaluation: of what goes to the next with such a batch.
        entries: the calls of its layers.
        handed: by place and bytes of gradients that are complete, for each as it is handed on, what is alive
            beside these, and its bytes.
        completes: names of trained tensors, in the order in which their gradients are complete.
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
    handed: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    completes: Sequence[str] = ()


def first_batch(task: Task, num_samples: int) -> Any:
    """The first samples as a batch; they repeat where there are too few."""
    there = len(task.data)
    samples = [task.data[k % there] for k in range(max(1, num_samples))]
    return collate_samples(task, samples, CPU)


class FakeTensorRun:
    """Runs the chunks of a fake model, one after another.

    Args:
        task: its loss.
        made: the model, whose gradients are gone after a run.
        fake: the mode in which it was made.
        precision: of forward and backward.
        samples, evaluated: of a micro-batch, and of a batch of evaluation (0: there is none).
        layers: of the model, by number; none inside another.
    """

    def __init__(
        self,
        task: Task,
        made: FakeModel,
        fake: FakeTensorMode,
        precision: MixedPrecision,
        *,
        samples: int,
        evaluated: int,
        layers: Mapping[int, nn.Module],
    ) -> None:
        self._task, self._made, self._fake, self._precision = task, made, fake, precision
        self._layers = layers
        self._batches = [self._faked(first_batch(task, n)) if n else None for n in (samples, evaluated)]

    def _faked(self, batch: Any) -> Any:
        return tree_map(lambda x: self._fake.from_tensor(x) if isinstance(x, Tensor) else x, batch)

    def run(self, chunks: Sequence[Sequence[nn.Module]] | None) -> list[MicroBatchFootprint]:
        """By chunk, what it takes.

        Args:
            chunks: of the chain that the model is; None: it is run as it is, in one.
        Raises:
            TaskError: something in it asks for values, which fake tensors have not.
        """
        model = self._made.model
        try:
            with self._fake:
                found: list[MicroBatchFootprint] = self._chunks(
                    model, chunks, self._batches[0], self._trained
                )
                if self._batches[1] is None:
                    return found
                with torch.no_grad():
                    peaks = self._chunks(model.eval(), chunks, self._batches[1], self._evaluated)
                return [
                    replace(one, evaluation=peak, departing_evaluation=departing)
                    for one, (peak, departing) in zip(found, peaks, strict=True)
                ]
        except RuntimeError as error:  # what fake tensors cannot do is one, by its base class
            raise TaskError(
                f"the memory of the model cannot be planned, since it cannot run on shapes alone: {error}",
                next_step="let forward and loss ask no tensor for its values (.item(), if tensor: ...), or"
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
        with self._made.seen(batch) as own:
            if chunks is None:
                found, _ = measure(model, lambda _: self._task.loss(model, own).total, (), loaded)
                return [found]
            given = record_call(self._task.loss, own, training=model.training)
            sizes, x = [], None
            for number, links in enumerate(chunks):
                stage = StageModule(links).train(model.training)
                run = partial(_run_first_chunk, stage, given) if number == 0 else partial(_run_chunk, stage)
                if number == len(chunks) - 1:
                    run = partial(self._answered, run, own)
                ends = number in (0, len(chunks) - 1)
                found, x = measure(model, run, x, loaded if ends else 0)
                sizes.append(found)
            return sizes

    def _answered(self, run: Callable[[Any], Any], batch: Any, x: Any) -> Tensor:
        return self._task.loss(OutputStandIn(lambda: run(x)), batch).total

    def _trained(
        self, model: nn.Module, run: Callable[[Any], Any], arrived: Any, loaded: int
    ) -> tuple[MicroBatchFootprint, Any]:
        """Sizes of a forward and a backward, and what goes on to the next chunk.

        Args:
            loaded: bytes of the batch, where the chunk is given it.
        """
        live, before = LiveBytes(loaded), self._made.exchanged()
        places = LayerTracker(self._layers, live)
        live.leave_out([*model.parameters(), *model.buffers(), *(arrived or ())])
        completes: list[str] = []
        with _recording_completed_gradients(model, live, completes), live:
            x = tuple(t.detach().clone().requires_grad_(t.is_floating_point()) for t in arrived or ())
            live.begin()
            with places, self._precision.autocast():
                outputs = as_tuple(run(x))
            kept, forward = live.now, dict(live.peaks)
            sent = [t.detach() for t in outputs]
            live.begin()
            pairs = [(t, torch.ones_like(t)) for t in outputs if t.requires_grad]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            backward = dict(live.peaks)
        for p in model.parameters():
            p.grad = None
        crossing = _num_bytes(x), _num_bytes(sent)
        passed = LATE_MESSAGES * (self._made.exchanged() - before + self._made.straight.largest)
        by_place = {place: most for (place, _), most in forward.items()}
        found = MicroBatchFootprint(kept, by_place, backward, passed, *crossing, handed=dict(live.handed))
        return replace(found, entries=places.entries, completes=completes), sent

    def _evaluated(
        self, model: nn.Module, run: Callable[[Any], Any], arrived: Any, loaded: int
    ) -> tuple[tuple[int, int], Any]:
        """The most of a forward and of what goes on to the next chunk, and that itself."""
        live = LiveBytes(loaded)
        live.leave_out([*model.parameters(), *model.buffers()])
        with live, self._precision.autocast():
            x = tuple(t.clone() for t in arrived or ())
            outputs = as_tuple(run(x))
        return (live.peak + LATE_MESSAGES * self._made.straight.largest, _num_bytes(outputs)), outputs


def _run_first_chunk(stage: nn.Module, given: ModelCall, _x: Any) -> Any:
    return stage(*given.inputs, **given.named)


def _run_chunk(stage: nn.Module, x: Any) -> Any:
    return stage(*x)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _key_dropouts(model: nn.Module) -> None:
    for dropout in name_dropouts(model):
        dropout.micro_batch_key = 0


@contextmanager
def _recording_completed_gradients(model: nn.Module, live: LiveBytes, order: list[str]) -> Iterator[None]:
    """Tell of gradients as they become complete, and note whose they are."""

    def tell(name: str, p: Tensor) -> None:
        order.append(name)
        if p.grad is not None:
            live.complete(p.grad)

    trained = trained_parameters(model)
    hooks = [p.register_post_accumulate_grad_hook(partial(tell, slot.name)) for slot, p in trained.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
