"""A chunk of a model with other weights than its parameters, such as those of some updates before.

A micro-batch on its way through one stage: what its backward needs.

A micro-batch passes through one chunk of a model: forward, backward, and what neighbours send each other.

Random numbers follow from the micro-batch's key and the module's name, so they do not depend on the cut; what
is drawn from PyTorch's own stream goes on from chunk to chunk, since one that draws tells the next where its
generator stands. Messages are found by what they are for, in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.work import LoadedBatch
from paceline.models.dropout import name_dropouts
from paceline.observe.step_stats import PhaseTimer
from paceline.parallel.data_parallel import InPlaceWriteGuard
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import LossSums, ModelFunction, check_loss, raise_for_too_few_values
from paceline.parallel.pipeline.model_chain import (
    CallRecorder,
    ModelCall,
    OutputStandIn,
    StageModule,
    WritableInput,
    as_tuple,
)
from paceline.parallel.pipeline.p2p import StageTransport
from paceline.parallel.pipeline.rechunk import PartReceiver, changed_buffer_error, slice_batch
from paceline.parallel.pipeline.split_backward import SplitBackward, UnsplitBackward, split_backward
from paceline.parallel.pipeline.stage_partition import StagePartition
from paceline.parallel.rng_state import append_rng_state, require_unchanged_rng, seed_micro_batch
from paceline.parallel.sharded_model import ShardedModel
from paceline.pipeline_schedule.schedule_table import PipelineAction, next_chunk, part_samples, previous_chunk
from paceline.task import Task


class WeightOverride:
    """Puts tensors into the places of a chunk's parameters, which are looked for once.

    The modules see what `torch.func.functional_call` shows them: a shared parameter at all its places.

    Args:
        chunk: its modules keep their parameters, whose values may change.
    """

    def __init__(self, chunk: nn.Module) -> None:
        self.parameters = dict(chunk.named_parameters())
        names = {id(p): name for name, p in self.parameters.items()}
        self._places: list[tuple[dict[str, Any], str, str]] = [
            (module._parameters, own, names[id(p)])
            for module in chunk.modules()
            for own, p in module._parameters.items()
            if p is not None
        ]

    @contextmanager
    def within(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """A block in which the modules have these.

        Args:
            weights: of all parameters, by their names in the chunk.
        """
        held = [(place, own, place[own]) for place, own, _ in self._places]
        try:
            for place, own, name in self._places:
                place[own] = weights[name]
            yield
        finally:
            for place, own, p in held:
                place[own] = p


WeightByName = Mapping[str, Tensor]


@dataclass
class InFlightMicroBatch:
    """A micro-batch between its forward and its backward.

    Args:
        shard: which of the step it is.
        key: seeds what is random in it.
        inputs: the tensors that came in and can have a gradient.
        outputs: those that went out; the scaled loss on the last stage.
        action: its forward.
        num_samples: of the whole micro-batch.
        buffers: of the rank's model, as this micro-batch has left them.
        again: those that a second half of the backward sees: what the first half saw.
    """

    shard: int
    key: int
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    action: PipelineAction
    num_samples: int
    buffers: Sequence[Tensor]
    halves: SplitBackward | UnsplitBackward | None = None
    again: Sequence[Tensor] | None = None

    def backward_inputs(self, arrived: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of every input; those of the weights are put off.

        Args:
            arrived: gradients of the outputs.
        """
        pairs = [(x, g) for x, g in zip(self.outputs, arrived, strict=True) if x.requires_grad]
        self.halves = split_backward([x for x, _ in pairs], self.inputs, weights)
        if not self.halves.is_fully_deferred:
            self.again = [b.clone() for b in self.buffers]
        back = self.halves.input_gradients([g for _, g in pairs])
        return [torch.zeros_like(x) if g is None else g for x, g in zip(self.inputs, back, strict=True)]

    def backward_weights(self) -> None:
        """Add the gradients that were put off to `.grad` of the weights, and call the hooks that see them."""
        assert self.halves is not None
        for weight, g in self.halves.weight_gradients().items():
            weight.grad = g if weight.grad is None else weight.grad.add_(g)
            hooks = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
            for hook in () if self.halves.has_called_hooks else [*hooks.values()]:
                hook(weight)

    def gradients(
        self, arrived: Sequence[Tensor], weights: WeightByName | None
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Run autograd once.

        Args:
            arrived: gradients of the outputs.
            weights: what the forward used in place of the stage's parameters.
        Returns:
            Gradients of those weights that are trained, and of every input. Without weights there are none of
            the first: they are added to `.grad` of the parameters.
        """
        pairs = [(x, g) for x, g in zip(self.outputs, arrived, strict=True) if x.requires_grad]
        outputs, grads = [x for x, _ in pairs], [g for _, g in pairs]
        if weights is None:
            if outputs:
                torch.autograd.backward(outputs, grads)
            return [], [torch.zeros_like(x) if x.grad is None else x.grad for x in self.inputs]
        trained = [w for w in weights.values() if w.requires_grad]
        both = torch.autograd.grad(outputs, [*trained, *self.inputs], grads, allow_unused=True)
        back = zip(self.inputs, both[len(trained) :], strict=True)
        return list(both[: len(trained)]), [torch.zeros_like(x) if g is None else g for x, g in back]


class ChunkExecutor:
    """The chunks of one rank.

    Args:
        task: its loss; the first chunk finds out from it what the model is called with.
        sharded_model, cut, wire, precision, phases: see `PipelineRunner`.
        seeds: see `PipelineRunner`.
        reports: whether this rank notes what buffers change.
    """

    def __init__(
        self,
        task: Task,
        sharded_model: ShardedModel,
        cut: StagePartition,
        wire: StageTransport,
        precision: MixedPrecision,
        phases: PhaseTimer,
        *,
        seeds: bool,
        reports: bool = True,
    ) -> None:
        self.buffers = MicroBatchBuffers(sharded_model.model, reports=reports)
        self.chunks = [StageModule(links) for links in cut.chunks]
        self.weights = [*map(WeightOverride, self.chunks)]
        self._task, self._cut, self._wire, self._seen = task, cut, wire, sharded_model.seen
        self._device, self._in_place_guard, self._parts = (
            sharded_model.device,
            InPlaceWriteGuard(sharded_model.computes),
            cut.parts[cut.stage],
        )
        self._inbox = PartReceiver(wire, cut.stage, cut.parts, cut.num_chunks)
        self._precision, self._phases, self._call_recorder, self._answers = (
            precision,
            phases,
            CallRecorder(),
            OutputStandIn(),
        )
        self._dropouts, self._seeded = (
            name_dropouts(sharded_model.model),
            sharded_model.device if seeds else None,
        )

    def train(self, mode: bool) -> None:
        """Switch all chunks."""
        for chunk in self.chunks:
            if chunk.training != mode:
                chunk.train(mode)

    def forward(
        self,
        action: PipelineAction,
        loaded: LoadedBatch,
        sums: LossSums,
        scale: float,
        weights: WeightByName | None,
    ) -> InFlightMicroBatch:
        """Run one micro-batch, or a part of it, through a chunk, and send on what comes out.

        Args:
            loaded: the whole micro-batch.
            sums: takes the loss, on the last chunk.
            weights: in place of the chunk's parameters, by their names in it.
        """
        micro_batch, num_samples = loaded.micro_batch, len(loaded.micro_batch.indices)
        own = part_samples(num_samples, self._parts, action.part)
        arrived, stream = self._arrived(action, num_samples)
        part = loaded.batch if self._parts == 1 else slice_batch(loaded.batch, own, num_samples)
        self._phases.begin("forward")
        self._seed(micro_batch.key, own, num_samples)
        self.buffers.lend()
        try:
            with self._seen(part) as batch, self._in_place_guard, self._precision.autocast():
                ask = self._scaled_loss(sums, scale, joins=own.start > 0)
                outputs = self._run_links(action, batch, ask, arrived, stream, weights)
        except ValueError as error:
            raise_for_too_few_values(error, len(own))
            raise
        buffers = self.buffers.take_back(action.micro_batch, action.chunk)
        if self._parts > 1 and self.buffers.changed:
            raise changed_buffer_error(self.buffers.changed[0])
        inputs = [x for x in arrived if x.requires_grad]
        return InFlightMicroBatch(
            micro_batch.shard, micro_batch.key, inputs, outputs, action, num_samples, buffers
        )

    def answer(self, loaded: LoadedBatch, ask: ModelFunction) -> None:
        """Run one batch forward through every chunk of this rank; see `ModelRunner.answer`."""
        for chunk in range(len(self.chunks)):
            action = PipelineAction("F", 0, chunk)
            arrived, stream = self._arrived(action)
            with self._precision.autocast(), self._seen(loaded.batch) as batch:
                self._run_links(action, batch, ask, arrived, stream)

    def backward(
        self,
        in_flight_batch: InFlightMicroBatch,
        weights: WeightByName | None = None,
        note: float = 0.0,
        *,
        split: bool = False,
    ) -> tuple[list[Tensor | None], float]:
        """Run one micro-batch backward, and send the gradients of what came in.

        Args:
            weights: those of the forward, if they were not the chunk's parameters.
            note: a number that the last chunk tells all others.
            split: put off the gradients of weights until `end_backward`.
        Returns:
            Gradients of those `weights` that are trained, in their order; without them they are added to
            `.grad` of the parameters. And the note of the last chunk.
        """
        action = in_flight_batch.action._replace(kind="B")
        arrived, note = self._arrived_gradients(action, in_flight_batch, note)
        self._phases.begin("backward")
        with self._as_forward_left(in_flight_batch, counts=weights is None):
            if split:
                own = [p for p in self.chunks[action.chunk].parameters() if p.requires_grad]
                found, back = list[Tensor | None](), in_flight_batch.backward_inputs(arrived, own)
            else:
                found, back = in_flight_batch.gradients(arrived, weights)
        there = previous_chunk(self._cut.stage, action, self._cut.num_stages)
        if there is not None:
            self._wire.send(there[0], back, note, key=self._inbox.key(there[1]))
        return found, note

    def end_backward(self, in_flight_batch: InFlightMicroBatch) -> None:
        """The gradients of weights that were put off, added to `.grad`."""
        self._phases.begin("backward")
        with self._as_forward_left(in_flight_batch):
            in_flight_batch.backward_weights()

    @contextmanager
    def _as_forward_left(self, in_flight_batch: InFlightMicroBatch, *, counts: bool = True) -> Iterator[None]:
        """Around a backward: what it draws for activations that are recomputed, and the buffers it sees.

        A second half repeats what the first has recomputed, and some of its hooks: buffers do not count then.
        """
        action, again, num_samples = (
            in_flight_batch.action,
            in_flight_batch.again,
            in_flight_batch.num_samples,
        )
        self._seed(in_flight_batch.key, part_samples(num_samples, self._parts, action.part), num_samples)
        self.buffers.lend(in_flight_batch.buffers if again is None else again)
        yield
        in_flight_batch.buffers = self.buffers.take_back(
            action.micro_batch, action.chunk, counts=counts and again is None
        )

    def abort(self) -> None:
        """Forget what has come and was not taken."""
        self._inbox.abort()

    def _seed(self, key: int, own: range, num_samples: int) -> None:
        everything = self._seeded is not None and self._precision.seeds_everything
        seed_micro_batch(key, self._seeded, self._dropouts, everything=everything)
        for dropout in self._dropouts if self._parts > 1 else ():
            dropout.take_samples(own, num_samples)

    def _arrived(self, action: PipelineAction, num_samples: int = 0) -> tuple[list[Tensor], Tensor | None]:
        """What the chunk before has sent, leaves if they can have a gradient, and its generator's state.

        Args:
            num_samples: of the whole micro-batch; 0: of an evaluation, which nobody divides.
        """
        source = previous_chunk(self._cut.stage, action, self._cut.num_stages)
        if source is None:
            return [], None
        self._phases.begin("communication")
        received, drawn = self._inbox.take(source[0], action, num_samples)
        stream = received.pop() if drawn else None
        return [x.requires_grad_(torch.is_grad_enabled() and _can_have_gradient(x)) for x in received], stream

    def _arrived_gradients(
        self, action: PipelineAction, in_flight_batch: InFlightMicroBatch, note: float
    ) -> tuple[list[Tensor], float]:
        source = self._after(action)
        if source is None:
            return [torch.ones_like(in_flight_batch.outputs[0])], note
        self._phases.begin("communication")
        return self._inbox.take(source[0], action, in_flight_batch.num_samples)

    def _after(self, action: PipelineAction) -> tuple[int, PipelineAction] | None:
        return next_chunk(self._cut.stage, action, self._cut.num_stages, len(self.chunks))

    def _run_links(
        self,
        action: PipelineAction,
        batch: Any,
        ask: ModelFunction,
        arrived: Sequence[Tensor],
        stream: Tensor | None,
        weights: WeightByName | None = None,
    ) -> list[Tensor]:
        """The links of a chunk, and what comes of them: what is sent on, or what `ask` returns."""
        fresh = torch.default_generator.get_state() if self._seeded is not None else None
        chunk, there = self.chunks[action.chunk], self._after(action)

        def links() -> Any:
            given = self._given(action, batch, ask, arrived)
            if stream is not None:  # what is drawn goes on there
                torch.default_generator.set_state(stream.cpu())
            with self.weights[action.chunk].within(weights) if weights is not None else nullcontext():
                return chunk(*given.inputs, **given.named)

        made = ask(self._answers.by(links, training=chunk.training), batch) if there is None else links()
        if self._parts > 1 and torch.is_grad_enabled():
            require_unchanged_rng(fresh if stream is None else stream)
        return [made] if there is None else self._send(there, as_tuple(made), fresh)

    def _scaled_loss(self, sums: LossSums, scale: float, *, joins: bool) -> ModelFunction:
        """Asks for the task's loss, which goes to the sums, and is multiplied for backward."""

        def ask(model: nn.Module, batch: Any) -> Tensor:
            loss = check_loss(self._task.loss(model, batch))
            sums.add(loss, joins=joins)
            return loss.total if scale == 1.0 else loss.total * scale

        return ask

    def _send(
        self, there: tuple[int, PipelineAction], found: Sequence[Tensor], fresh: Tensor | None
    ) -> list[Tensor]:
        """Send what came out, and, once somebody has drawn, where the generator stands."""
        sent, drawn = append_rng_state(found, fresh, self._device)
        self._wire.send(there[0], sent, drawn, key=self._inbox.key(there[1]))
        return [x for x in found if _can_have_gradient(x)]

    def _given(
        self, action: PipelineAction, batch: Any, ask: ModelFunction, arrived: Sequence[Tensor]
    ) -> ModelCall:
        """The arguments of a chunk's first link."""
        if previous_chunk(self._cut.stage, action, self._cut.num_stages) is None:
            return self._call_recorder.of(ask, batch, training=self.chunks[action.chunk].training)
        return ModelCall(tuple(WritableInput.apply(x) if x.requires_grad else x for x in arrived), {})


def _can_have_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
