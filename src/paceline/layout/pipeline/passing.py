"""A micro-batch passes through one chunk of a model: forward, backward, and what neighbours send each other.

Random numbers follow from the micro-batch's key and the module's name, so they do not depend on the cut; what
is drawn from PyTorch's own stream goes on from chunk to chunk, since one that draws tells the next where its
generator stands. Messages are found by what they are for, in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data import LoadedBatch
from paceline.layout.buffers import MicroBatchBuffers
from paceline.layout.holding import Holding
from paceline.layout.pipeline.chain import Enter, Stage, as_tuple
from paceline.layout.pipeline.check_parts import changes_buffers
from paceline.layout.pipeline.drawn import require_no_draws, with_state
from paceline.layout.pipeline.flight import Flight, Weights
from paceline.layout.pipeline.other_weights import OtherWeights
from paceline.layout.pipeline.parts import Inbox, batch_part
from paceline.layout.pipeline.stage import Cut
from paceline.layout.pipeline.view import Answers, Asks, Call
from paceline.layout.pipeline.wire import Neighbours
from paceline.layout.placed import Ask
from paceline.layout.precision import Precision
from paceline.layout.seed import seed_micro_batch
from paceline.layout.steady import Steady
from paceline.layout.sums import Sums, checked, explain_few_values
from paceline.models.dropout import name_dropouts
from paceline.observe import Phases
from paceline.schedule import Action, after, before, samples_of
from paceline.task import Task


class Passing:
    """The chunks of one rank.

    Args:
        task: its loss; the first chunk finds out from it what the model is called with.
        holding, cut, wire, precision, phases: see `Pipeline`.
        seeds: see `Pipeline`.
        reports: whether this rank notes what buffers change.
    """

    def __init__(
        self,
        task: Task,
        holding: Holding,
        cut: Cut,
        wire: Neighbours,
        precision: Precision,
        phases: Phases,
        *,
        seeds: bool,
        reports: bool = True,
    ) -> None:
        self.buffers = MicroBatchBuffers(holding.model, reports=reports)
        self.chunks = [Stage(links) for links in cut.chunks]
        self.weights = [*map(OtherWeights, self.chunks)]
        self._task, self._cut, self._wire, self._seen = task, cut, wire, holding.seen
        self._device, self._steady, self._parts = (
            holding.device,
            Steady(holding.computes),
            cut.parts[cut.stage],
        )
        self._inbox = Inbox(wire, cut.stage, cut.parts, cut.num_chunks)
        self._precision, self._phases, self._asks, self._answers = precision, phases, Asks(), Answers()
        self._dropouts, self._seeded = name_dropouts(holding.model), holding.device if seeds else None

    def train(self, mode: bool) -> None:
        """Switch all chunks."""
        for chunk in self.chunks:
            if chunk.training != mode:
                chunk.train(mode)

    def forward(
        self, action: Action, loaded: LoadedBatch, sums: Sums, scale: float, weights: Weights | None
    ) -> Flight:
        """Run one micro-batch, or a part of it, through a chunk, and send on what comes out.

        Args:
            loaded: the whole micro-batch.
            sums: takes the loss, on the last chunk.
            weights: in place of the chunk's parameters, by their names in it.
        """
        micro_batch, num_samples = loaded.micro_batch, len(loaded.micro_batch.indices)
        own = samples_of(num_samples, self._parts, action.part)
        arrived, stream = self._arrived(action, num_samples)
        part = loaded.batch if self._parts == 1 else batch_part(loaded.batch, own, num_samples)
        self._phases.begin("forward")
        self._seed(micro_batch.key, own, num_samples)
        self.buffers.lend()
        try:
            with self._seen(part) as batch, self._steady, self._precision.autocast():
                ask = self._scaled_loss(sums, scale, joins=own.start > 0)
                outputs = self._run_links(action, batch, ask, arrived, stream, weights)
        except ValueError as error:
            explain_few_values(error, len(own))
            raise
        buffers = self.buffers.take_back(action.micro_batch, action.chunk)
        if self._parts > 1 and self.buffers.changed:
            raise changes_buffers(self.buffers.changed[0])
        inputs = [x for x in arrived if x.requires_grad]
        return Flight(micro_batch.shard, micro_batch.key, inputs, outputs, action, num_samples, buffers)

    def answer(self, loaded: LoadedBatch, ask: Ask) -> None:
        """Run one batch forward through every chunk of this rank; see `Placed.answer`."""
        for chunk in range(len(self.chunks)):
            action = Action("F", 0, chunk)
            arrived, stream = self._arrived(action)
            with self._precision.autocast(), self._seen(loaded.batch) as batch:
                self._run_links(action, batch, ask, arrived, stream)

    def backward(
        self, flight: Flight, weights: Weights | None = None, note: float = 0.0, *, split: bool = False
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
        action = flight.action._replace(kind="B")
        arrived, note = self._arrived_gradients(action, flight, note)
        self._phases.begin("backward")
        with self._as_forward_left(flight, counts=weights is None):
            if split:
                own = [p for p in self.chunks[action.chunk].parameters() if p.requires_grad]
                found, back = list[Tensor | None](), flight.first_half(arrived, own)
            else:
                found, back = flight.gradients(arrived, weights)
        there = before(self._cut.stage, action, self._cut.num_stages)
        if there is not None:
            self._wire.send(there[0], back, note, key=self._inbox.key(there[1]))
        return found, note

    def end_backward(self, flight: Flight) -> None:
        """The gradients of weights that were put off, added to `.grad`."""
        self._phases.begin("backward")
        with self._as_forward_left(flight):
            flight.second_half()

    @contextmanager
    def _as_forward_left(self, flight: Flight, *, counts: bool = True) -> Iterator[None]:
        """Around a backward: what it draws for activations that are recomputed, and the buffers it sees.

        A second half repeats what the first has recomputed, and some of its hooks: buffers do not count then.
        """
        action, again, num_samples = flight.action, flight.again, flight.num_samples
        self._seed(flight.key, samples_of(num_samples, self._parts, action.part), num_samples)
        self.buffers.lend(flight.buffers if again is None else again)
        yield
        flight.buffers = self.buffers.take_back(
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

    def _arrived(self, action: Action, num_samples: int = 0) -> tuple[list[Tensor], Tensor | None]:
        """What the chunk before has sent, leaves if they can have a gradient, and its generator's state.

        Args:
            num_samples: of the whole micro-batch; 0: of an evaluation, which nobody divides.
        """
        source = before(self._cut.stage, action, self._cut.num_stages)
        if source is None:
            return [], None
        self._phases.begin("communication")
        received, drawn = self._inbox.take(source[0], action, num_samples)
        stream = received.pop() if drawn else None
        return [x.requires_grad_(torch.is_grad_enabled() and _differentiable(x)) for x in received], stream

    def _arrived_gradients(self, action: Action, flight: Flight, note: float) -> tuple[list[Tensor], float]:
        source = self._after(action)
        if source is None:
            return [torch.ones_like(flight.outputs[0])], note
        self._phases.begin("communication")
        return self._inbox.take(source[0], action, flight.num_samples)

    def _after(self, action: Action) -> tuple[int, Action] | None:
        return after(self._cut.stage, action, self._cut.num_stages, len(self.chunks))

    def _run_links(
        self,
        action: Action,
        batch: Any,
        ask: Ask,
        arrived: Sequence[Tensor],
        stream: Tensor | None,
        weights: Weights | None = None,
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
            require_no_draws(fresh if stream is None else stream)
        return [made] if there is None else self._send(there, as_tuple(made), fresh)

    def _scaled_loss(self, sums: Sums, scale: float, *, joins: bool) -> Ask:
        """Asks for the task's loss, which goes to the sums, and is multiplied for backward."""

        def ask(model: nn.Module, batch: Any) -> Tensor:
            loss = checked(self._task.loss(model, batch))
            sums.add(loss, joins=joins)
            return loss.total if scale == 1.0 else loss.total * scale

        return ask

    def _send(self, there: tuple[int, Action], found: Sequence[Tensor], fresh: Tensor | None) -> list[Tensor]:
        """Send what came out, and, once somebody has drawn, where the generator stands."""
        sent, drawn = with_state(found, fresh, self._device)
        self._wire.send(there[0], sent, drawn, key=self._inbox.key(there[1]))
        return [x for x in found if _differentiable(x)]

    def _given(self, action: Action, batch: Any, ask: Ask, arrived: Sequence[Tensor]) -> Call:
        """The arguments of a chunk's first link."""
        if before(self._cut.stage, action, self._cut.num_stages) is None:
            return self._asks.of(ask, batch, training=self.chunks[action.chunk].training)
        return Call(tuple(Enter.apply(x) if x.requires_grad else x for x in arrived), {})


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
