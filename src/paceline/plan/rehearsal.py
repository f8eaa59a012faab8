"""One micro-batch through a model that has no memory: what its forward keeps, and what its backward takes.

Every operation runs on fake tensors, which have a shape, a type and a device, so that the kernels are those
of a run and a model of any size takes no memory here. The chain of a pipeline is run chunk by chunk, each by
itself: its inputs, and the gradients of its outputs, arrive as they would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map

from paceline.data import collate_samples
from paceline.errors import TaskError
from paceline.layout import Precision
from paceline.layout.pipeline.chain import Stage, as_tuple
from paceline.layout.pipeline.view import Answers, Call, asked
from paceline.models.dropout import name_dropouts
from paceline.plan.live_bytes import LiveBytes
from paceline.plan.places import Entry, Places
from paceline.plan.ranks import CPU, FakeModel
from paceline.slot import trained_parameters
from paceline.task import Task

LATE = 2
"""Micro-batches of tensor shards and stages whose messages Gloo's threads may still hold; and of context
ranks calls: each of the two threads of a process group lets go of one before it takes up another."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that one chunk of a model takes for one micro-batch, beside its parameters.

    Args:
        kept: from the end of its forward to its backward.
        forward: by place, the most during its forward; see `Places`.
        backward: by (place, bytes of gradients that were complete by then, which it does not count), the most
            during its backward.
        passed: of what tensor and context ranks send each other, which threads of a backend let go of late.
        arriving, departing: of what comes from the chunk before, and of what goes to the next.
        evaluation: the most of a forward without gradients, with a batch of evaluation.
        departing_evaluated: of what goes to the next with such a batch.
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
    departing_evaluated: int = 0
    entries: Sequence[Entry] = ()
    handed: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    completes: Sequence[str] = ()


def fake_batch(task: Task, num_samples: int) -> Any:
    """The first samples as a batch; they repeat where there are too few."""
    there = len(task.data)
    samples = [task.data[k % there] for k in range(max(1, num_samples))]
    return collate_samples(task, samples, CPU)


class Rehearsal:
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
        precision: Precision,
        *,
        samples: int,
        evaluated: int,
        layers: Mapping[int, nn.Module],
    ) -> None:
        self._task, self._made, self._fake, self._precision = task, made, fake, precision
        self._layers = layers
        self._batches = [self._faked(fake_batch(task, n)) if n else None for n in (samples, evaluated)]

    def _faked(self, batch: Any) -> Any:
        return tree_map(lambda x: self._fake.from_tensor(x) if isinstance(x, Tensor) else x, batch)

    def run(self, chunks: Sequence[Sequence[nn.Module]] | None) -> list[Footprint]:
        """By chunk, what it takes.

        Args:
            chunks: of the chain that the model is; None: it is run as it is, in one.
        Raises:
            TaskError: something in it asks for values, which fake tensors have not.
        """
        model = self._made.model
        try:
            with self._fake:
                found: list[Footprint] = self._chunks(model, chunks, self._batches[0], self._trained)
                if self._batches[1] is None:
                    return found
                with torch.no_grad():
                    peaks = self._chunks(model.eval(), chunks, self._batches[1], self._evaluated)
                return [
                    replace(one, evaluation=peak, departing_evaluated=departing)
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
        loaded = _bytes(x for x in tree_iter(batch) if isinstance(x, Tensor))
        with self._made.seen(batch) as own:
            if chunks is None:
                found, _ = measure(model, lambda _: self._task.loss(model, own).total, (), loaded)
                return [found]
            given = asked(self._task.loss, own, training=model.training)
            sizes, x = [], None
            for number, links in enumerate(chunks):
                stage = Stage(links).train(model.training)
                run = partial(_asked, stage, given) if number == 0 else partial(_called, stage)
                if number == len(chunks) - 1:
                    run = partial(self._answered, run, own)
                ends = number in (0, len(chunks) - 1)
                found, x = measure(model, run, x, loaded if ends else 0)
                sizes.append(found)
            return sizes

    def _answered(self, run: Callable[[Any], Any], batch: Any, x: Any) -> Tensor:
        return self._task.loss(Answers(lambda: run(x)), batch).total

    def _trained(
        self, model: nn.Module, run: Callable[[Any], Any], arrived: Any, loaded: int
    ) -> tuple[Footprint, Any]:
        """Sizes of a forward and a backward, and what goes on to the next chunk.

        Args:
            loaded: bytes of the batch, where the chunk is given it.
        """
        live, before = LiveBytes(loaded), self._made.exchanged()
        places = Places(self._layers, live)
        live.leave_out([*model.parameters(), *model.buffers(), *(arrived or ())])
        completes: list[str] = []
        with _completing(model, live, completes), live:
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
        crossing = _bytes(x), _bytes(sent)
        passed = LATE * (self._made.exchanged() - before + self._made.straight.largest)
        by_place = {place: most for (place, _), most in forward.items()}
        found = Footprint(kept, by_place, backward, passed, *crossing, handed=dict(live.handed))
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
        return (live.peak + LATE * self._made.straight.largest, _bytes(outputs)), outputs


def _asked(stage: nn.Module, given: Call, _x: Any) -> Any:
    return stage(*given.inputs, **given.named)


def _called(stage: nn.Module, x: Any) -> Any:
    return stage(*x)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _key_dropouts(model: nn.Module) -> None:
    for dropout in name_dropouts(model):
        dropout.micro_batch_key = 0


@contextmanager
def _completing(model: nn.Module, live: LiveBytes, order: list[str]) -> Iterator[None]:
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
