"""Forward and backward of one micro-batch through one chunk of a model, with messages to other stages.

Random numbers follow from the micro-batch's key and the module's name, so they do not depend on where the
model is split. What is drawn from the global generators continues from chunk to chunk: a chunk that draws
sends their states along. Messages are found by what they are for, in whatever order they
arrive. The order of forwards and backwards is not decided here; see `pipeline_runner`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from paceline.data.work import LoadedBatch
from paceline.models.dropout import name_dropouts
from paceline.models.training_mode import enter_training
from paceline.observe.step_stats import PhaseTimer
from paceline.parallel.data_parallel import InPlaceWriteGuard
from paceline.parallel.forward_errors import FORWARD_ERRORS, explain_forward_error
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
    describe_missing_graph,
)
from paceline.parallel.pipeline.p2p import StageTransport
from paceline.parallel.pipeline.rechunk import PartReceiver, changed_buffer_error, slice_batch
from paceline.parallel.pipeline.split_backward import SplitBackward, UnsplitBackward, split_backward
from paceline.parallel.pipeline.stage_partition import StagePartition
from paceline.parallel.recompute import explain_checkpoint_error
from paceline.parallel.rng_state import (
    RngStates,
    append_rng_state,
    require_unchanged_rng,
    seed_micro_batch,
)
from paceline.parallel.sharded_model import ShardedModel
from paceline.pipeline_schedule.schedule_table import PipelineAction, next_chunk, part_samples, previous_chunk
from paceline.task import Task


class WeightOverride:
    """Temporary replacement of a chunk's parameters by other tensors, such as weights of earlier updates.

    Modules see what `torch.func.functional_call` would show them: a shared parameter is replaced wherever it
    occurs. The places of the parameters are looked up once, which makes it cheaper.

    Args:
        chunk: its modules keep their parameters, whose values may change.
    """

    def __init__(self, chunk: nn.Module) -> None:
        self.parameters = dict(chunk.named_parameters())
        names = {id(p): name for name, p in self.parameters.items()}
        # The tables of the modules, since setattr accepts nothing but parameters in place of a parameter.
        self._places: list[tuple[dict[str, Any], str, str]] = [
            (module._parameters, own_name, names[id(p)])
            for module in chunk.modules()
            for own_name, p in module._parameters.items()
            if p is not None
        ]

    @contextmanager
    def within(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Run a block in which the modules have these weights.

        Args:
            weights: of all parameters, by their names in the chunk.
        """
        originals = [(table, own_name, table[own_name]) for table, own_name, _ in self._places]
        try:
            for table, own_name, name in self._places:
                table[own_name] = weights[name]
            yield
        finally:
            for table, own_name, p in originals:
                table[own_name] = p


WeightByName = Mapping[str, Tensor]


@dataclass
class InFlightMicroBatch:
    """Micro-batch between its forward and its backward on one chunk.

    Args:
        shard: virtual shard of the step.
        key: seed of its random numbers.
        inputs: received tensors that can have a gradient.
        outputs: sent tensors that can have a gradient; the scaled loss on the last stage.
        action: its forward.
        num_samples: of the whole micro-batch.
        buffers: of the rank's model, as this micro-batch has left them.
        halves: its split backward, after the first half has run.
        again: buffers that the second half of the backward sees: those that the first half saw.
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

    def backward_inputs(self, output_grads: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of every input; those of the weights are deferred.

        Args:
            output_grads: gradients of the outputs.
        """
        pairs = [(x, g) for x, g in zip(self.outputs, output_grads, strict=True) if x.requires_grad]
        self.halves = split_backward([x for x, _ in pairs], self.inputs, weights)
        # Recomputation in the first half changes the buffers; the second must begin from the same values.
        if not self.halves.is_fully_deferred:
            self.again = [b.clone() for b in self.buffers]
        back = self.halves.input_gradients([g for _, g in pairs])
        # The previous stage waits for a gradient of every input, even if no output depends on it.
        return [torch.zeros_like(x) if g is None else g for x, g in zip(self.inputs, back, strict=True)]

    def backward_weights(self) -> None:
        """Add the deferred gradients to `.grad` of the weights, and call the hooks that see them."""
        assert self.halves is not None
        for weight, g in self.halves.weight_gradients().items():
            weight.grad = g if weight.grad is None else weight.grad.add_(g)
            # autograd.grad does not call accumulation hooks, which GradientHooks and users rely on.
            hooks = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
            for hook in () if self.halves.has_called_hooks else [*hooks.values()]:
                hook(weight)

    def gradients(
        self, output_grads: Sequence[Tensor], weights: WeightByName | None
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Run autograd once.

        Args:
            output_grads: gradients of the outputs.
            weights: tensors that the forward used in place of the stage's parameters.
        Returns:
            Gradients of the trained weights, and of every input. Without `weights` the first list is empty,
            and the gradients are added to `.grad` of the parameters.
        """
        pairs = [(x, g) for x, g in zip(self.outputs, output_grads, strict=True) if x.requires_grad]
        outputs, grads = [x for x, _ in pairs], [g for _, g in pairs]
        if weights is None:
            if outputs:
                torch.autograd.backward(outputs, grads)
            return [], [torch.zeros_like(x) if x.grad is None else x.grad for x in self.inputs]
        trained = [w for w in weights.values() if w.requires_grad]
        all_grads = torch.autograd.grad(outputs, [*trained, *self.inputs], grads, allow_unused=True)
        input_grads = zip(self.inputs, all_grads[len(trained) :], strict=True)
        return list(all_grads[: len(trained)]), [
            torch.zeros_like(x) if g is None else g for x, g in input_grads
        ]


class ChunkExecutor:
    """Executor of forwards and backwards on the chunks of one rank.

    Args:
        task: its loss; the first chunk learns from it what the model is called with.
        sharded_model, cut, transport, precision, phases: see `PipelineRunner`.
        seeds: see `PipelineRunner`.
        reports: whether this rank records what buffers change.
    """

    def __init__(
        self,
        task: Task,
        sharded_model: ShardedModel,
        cut: StagePartition,
        transport: StageTransport,
        precision: MixedPrecision,
        phases: PhaseTimer,
        *,
        seeds: bool,
        reports: bool = True,
    ) -> None:
        self.buffers = MicroBatchBuffers(sharded_model.model, reports=reports)
        self.chunks = [StageModule(links) for links in cut.chunks]
        self.weights = [*map(WeightOverride, self.chunks)]
        self._task, self._cut, self._transport, self._seen = task, cut, transport, sharded_model.seen
        self._device, self._num_parts = sharded_model.device, cut.parts[cut.stage]
        self._in_place_guard = InPlaceWriteGuard(sharded_model.computes)
        self._inbox = PartReceiver(transport, cut.stage, cut.parts, cut.num_chunks)
        self.precision, self._phases = precision, phases
        self.began = 0.0  # when the last action had its inputs and began to compute, of `perf_counter`
        self._call_recorder, self._output_stand_in = CallRecorder(), OutputStandIn()
        self._dropouts = name_dropouts(sharded_model.model)
        self._seeded = sharded_model.device if seeds else None

    def enter_training(self, model: nn.Module) -> None:
        """Put all chunks into training mode, and then the model: its own `train()` has the last word."""
        # Switching visits every module, which takes time in every step.
        if model.training and all(chunk.training for chunk in self.chunks):
            return
        for chunk in self.chunks:
            enter_training(chunk)
        enter_training(model)

    def forward(
        self,
        action: PipelineAction,
        loaded: LoadedBatch,
        sums: LossSums,
        scale: float,
        weights: WeightByName | None,
    ) -> InFlightMicroBatch:
        """Run one micro-batch, or a part of it, through a chunk, and send its outputs on.

        Args:
            loaded: the whole micro-batch.
            sums: receives the loss, on the last chunk.
            weights: tensors in place of the chunk's parameters, by their names in it.
        """
        micro_batch, num_samples = loaded.micro_batch, len(loaded.micro_batch.indices)
        samples = part_samples(num_samples, self._num_parts, action.part)
        inputs, rng_state = self._receive_inputs(action, num_samples)
        local_batch = (
            loaded.batch if self._num_parts == 1 else slice_batch(loaded.batch, samples, num_samples)
        )
        self.began = self._phases.begin("forward")
        self._seed(micro_batch.key, samples, num_samples)
        # Micro-batches in flight share the modules, so each has buffers of its own until its backward.
        self.buffers.swap_in()
        try:
            with self._seen(local_batch) as batch, self._in_place_guard, self.precision.autocast():
                loss_function = self._scaled_loss(sums, scale, continues_micro_batch=samples.start > 0)
                outputs = self._run_links(action, batch, loss_function, inputs, rng_state, weights)
        except FORWARD_ERRORS as error:
            raise_for_too_few_values(error, len(samples))
            explain_forward_error(error, micro_batch, local_batch)
            raise
        buffers = self.buffers.swap_out(action.micro_batch, action.chunk)
        if self._num_parts > 1 and self.buffers.changed:
            raise changed_buffer_error(self.buffers.changed[0])
        leaves = [x for x in inputs if x.requires_grad]
        return InFlightMicroBatch(
            micro_batch.shard, micro_batch.key, leaves, outputs, action, num_samples, buffers
        )

    def forward_only(self, loaded: LoadedBatch, function: ModelFunction) -> None:
        """Run one batch forward through every chunk of this rank."""
        for chunk in range(len(self.chunks)):
            action = PipelineAction("F", 0, chunk)
            inputs, rng_state = self._receive_inputs(action)
            try:
                with self.precision.autocast(), self._seen(loaded.batch) as batch:
                    self._run_links(action, batch, function, inputs, rng_state)
            except FORWARD_ERRORS as error:
                explain_forward_error(error, loaded.micro_batch, loaded.batch)
                raise

    def backward(
        self,
        in_flight_batch: InFlightMicroBatch,
        weights: WeightByName | None = None,
        note: float = 0.0,
        *,
        split: bool = False,
    ) -> tuple[list[Tensor | None], float]:
        """Run one micro-batch backward, and send the gradients of its inputs.

        Args:
            weights: those of the forward, if they were not the chunk's parameters.
            note: a number that the last chunk sends to all others.
            split: defer the gradients of weights until `end_backward`.
        Returns:
            Gradients of the trained `weights`, in their order, and the note of the last chunk. Without
            `weights` the list is empty, and gradients are added to `.grad` of the parameters.
        """
        action = in_flight_batch.action._replace(kind="B")
        output_grads, note = self._receive_gradients(action, in_flight_batch, note)
        self.began = self._phases.begin("backward")
        with self._as_forward_left(in_flight_batch, counts=weights is None):
            if split:
                trained = [p for p in self.chunks[action.chunk].parameters() if p.requires_grad]
                weight_grads = list[Tensor | None]()
                input_grads = in_flight_batch.backward_inputs(output_grads, trained)
            else:
                weight_grads, input_grads = in_flight_batch.gradients(output_grads, weights)
        receiver = previous_chunk(self._cut.stage, action, self._cut.num_stages)
        if receiver is not None:
            self._transport.send(receiver[0], input_grads, note, key=self._inbox.key(receiver[1]))
        return weight_grads, note

    def end_backward(self, in_flight_batch: InFlightMicroBatch) -> None:
        """Add the deferred gradients of weights to `.grad`."""
        self.began = self._phases.begin("backward")
        with self._as_forward_left(in_flight_batch):
            in_flight_batch.backward_weights()

    @contextmanager
    def _as_forward_left(self, in_flight_batch: InFlightMicroBatch, *, counts: bool = True) -> Iterator[None]:
        """Run a backward with the random numbers and buffers of the forward, for recomputation.

        The second half of a split backward repeats recomputation and hooks of the first, so its buffers do
        not count.
        """
        action, again = in_flight_batch.action, in_flight_batch.again
        num_samples = in_flight_batch.num_samples
        self._seed(in_flight_batch.key, part_samples(num_samples, self._num_parts, action.part), num_samples)
        self.buffers.swap_in(in_flight_batch.buffers if again is None else again)
        try:
            yield
        except CheckpointError as error:
            raise explain_checkpoint_error(error) from error
        # Not in a finally: after an error, `abort_step` restores the buffers.
        in_flight_batch.buffers = self.buffers.swap_out(
            action.micro_batch, action.chunk, counts=counts and again is None
        )

    def abort(self) -> None:
        """Drop messages that were received and not used."""
        self._inbox.abort()

    def _seed(self, key: int, samples: range, num_samples: int) -> None:
        seed_micro_batch(key, self._seeded, self._dropouts)
        for dropout in self._dropouts if self._num_parts > 1 else ():
            dropout.take_samples(samples, num_samples)

    def _receive_inputs(
        self, action: PipelineAction, num_samples: int = 0
    ) -> tuple[list[Tensor], RngStates | None]:
        """Return the tensors that the previous chunk has sent, as leaves, and the states of its generators.

        Args:
            num_samples: of the whole micro-batch; 0 in an evaluation, whose batches are never divided.
        """
        source = previous_chunk(self._cut.stage, action, self._cut.num_stages)
        if source is None:
            return [], None
        self._phases.begin("communication")
        received, has_rng_state = self._inbox.take(source[0], action, num_samples)
        rng_state = RngStates.from_bytes(received.pop()) if has_rng_state else None
        # Leaves: the backward of this chunk ends here, and their gradients are sent back.
        with_grad = torch.is_grad_enabled()
        return [x.requires_grad_(with_grad and _can_have_gradient(x)) for x in received], rng_state

    def _receive_gradients(
        self, action: PipelineAction, in_flight_batch: InFlightMicroBatch, note: float
    ) -> tuple[list[Tensor], float]:
        source = self._next(action)
        if source is None:
            # The output of the last chunk is the scaled loss, whose gradient is 1.
            return [torch.ones_like(in_flight_batch.outputs[0])], note
        self._phases.begin("communication")
        return self._inbox.take(source[0], action, in_flight_batch.num_samples)

    def _next(self, action: PipelineAction) -> tuple[int, PipelineAction] | None:
        return next_chunk(self._cut.stage, action, self._cut.num_stages, len(self.chunks))

    def _run_links(
        self,
        action: PipelineAction,
        batch: Any,
        function: ModelFunction,
        inputs: Sequence[Tensor],
        rng_state: RngStates | None,
        weights: WeightByName | None = None,
    ) -> list[Tensor]:
        """Run the links of a chunk; return its outputs, or on the last chunk what the function returns."""
        fresh = RngStates.current() if self._seeded is not None else None
        chunk, receiver = self.chunks[action.chunk], self._next(action)

        # A function, since on the last chunk the loss decides when the model is called.
        def links() -> Any:
            call = self._first_call(action, batch, function, inputs)
            if rng_state is not None:
                # The previous chunk has drawn numbers, and this one continues where its generators stopped.
                rng_state.restore()
            with self.weights[action.chunk].within(weights) if weights is not None else nullcontext():
                return chunk(*call.inputs, **call.named)

        if receiver is None:
            with describe_missing_graph():
                outputs = function(self._output_stand_in.with_output(links, training=chunk.training), batch)
        else:
            outputs = links()
        if self._num_parts > 1 and torch.is_grad_enabled():
            require_unchanged_rng(fresh if rng_state is None else rng_state)
        return [outputs] if receiver is None else self._send(receiver, as_tuple(outputs), fresh)

    def _scaled_loss(self, sums: LossSums, scale: float, *, continues_micro_batch: bool) -> ModelFunction:
        """Return a function that adds the task's loss to the sums and returns it scaled for backward."""

        def scaled_loss(model: nn.Module, batch: Any) -> Tensor:
            loss = check_loss(self._task.loss(model, batch))
            sums.add(loss, continues_micro_batch=continues_micro_batch)
            # A product, unlike in `backward_scaled`: the backward of a stage begins with a gradient of 1.
            return loss.total if scale == 1.0 else loss.total * scale

        return scaled_loss

    def _send(
        self, receiver: tuple[int, PipelineAction], outputs: Sequence[Tensor], fresh: RngStates | None
    ) -> list[Tensor]:
        """Send the outputs, with the states of the global generators if a chunk has drawn from one."""
        tensors, has_rng_state = append_rng_state(outputs, fresh, self._device)
        self._transport.send(receiver[0], tensors, has_rng_state, key=self._inbox.key(receiver[1]))
        return [x for x in outputs if _can_have_gradient(x)]

    def _first_call(
        self, action: PipelineAction, batch: Any, function: ModelFunction, inputs: Sequence[Tensor]
    ) -> ModelCall:
        """Return the arguments of a chunk's first link."""
        if previous_chunk(self._cut.stage, action, self._cut.num_stages) is None:
            return self._call_recorder.record(function, batch, training=self.chunks[action.chunk].training)
        return ModelCall(tuple(WritableInput.apply(x) if x.requires_grad else x for x in inputs), {})


def _can_have_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
