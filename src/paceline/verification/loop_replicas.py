"""The replicas of a run with an own loop, all in one process: each runs the loop on a model of its own.

So a loop remembers here what it remembers there: how many batches it has seen, a sample that it made before
an update and uses behind it. Invariant: a replica's model has the oracle's values whenever its loop runs, and
of these only what an update has changed is written, as in a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.data import MicroBatch, split
from paceline.errors import StrategyError
from paceline.sync import Update
from paceline.training.evaluation import Evaluation
from paceline.verification.loop_side import Asked, Evaluated, Loop, LoopSide, Said, met
from paceline.verification.oracle import Oracle, Shard, Totals, accumulate
from paceline.verification.plain_buffers import Tensors, buffers_of
from paceline.verification.plain_micro_batches import seed_all
from paceline.verification.tied import has_tied
from paceline.verification.twin import twin


class LoopReplicas:
    """All replicas' loops.

    Args:
        oracle: whose state each of them computes with.
        evaluates: in one process.
        num_replicas: that share the virtual shards.

    Attributes:
        told: the evaluations of the run, which its loops hear here too.
        found: each of these as it is in one process, once the first replica's loop has asked for it.
    """

    def __init__(self, oracle: Oracle, loop: Loop, evaluates: Evaluated, num_replicas: int) -> None:
        self._oracle, self._evaluates = oracle, evaluates
        self.told: Sequence[Evaluation | None] = ()
        self.found: list[Evaluation | None] = []
        self._asked = [0] * num_replicas
        self._sides = [
            LoopSide(loop, twin(oracle.model), oracle, partial(self._evaluated, rank), num_replicas)
            for rank in range(num_replicas)
        ]
        self._made: Update | None = None

    def totals(
        self, micro_batches: tuple[MicroBatch, ...], scale: float, part: str, number: int, made: Update | None
    ) -> Totals:
        """What the losses of the next update add up to; the oracle is in the state before it.

        Args:
            micro_batches: of the step, in order.
            scale: of the loss in backward.
            part: that the strategy has updated.
            number: of the update in its step, from 0.
            made: what `step` returns for it, later.
        """
        before = self._oracle.buffers()
        if number == 0:
            self._finish()
        shards = self._shards(micro_batches, scale, part, number)
        totals = accumulate(shards, before, self._oracle.task.buffers)
        self._made = made
        options = self._sides[0].options()
        if options is not None:
            self._oracle.options = lambda update: options
        return totals

    def _evaluated(self, rank: int, model: nn.Module, step: int, source: Any) -> Evaluation | None:
        """What the run has found where a replica's loop evaluates."""
        place, self._asked[rank] = self._asked[rank], self._asked[rank] + 1
        if place >= len(self.told):
            raise _other_updates("no evaluation", f"one after {step} steps")
        model.eval()
        if rank == 0:
            self.found.append(self._evaluates(model, step, source))
        return self.told[place]

    def close(self) -> None:
        """Leave all loops where they stand."""
        for side in self._sides:
            side.close()

    def _shards(
        self, micro_batches: tuple[MicroBatch, ...], scale: float, part: str, number: int
    ) -> Iterator[Shard]:
        for together in self._by_turn(micro_batches):
            sizes = [self._sizes(micro_batch, scale) for _, micro_batch in together]
            said = [self._said(side, micro_batch, number) for side, micro_batch in together]
            asked = met([side for side, _ in together], said)
            for (side, micro_batch), one, size in zip(together, asked, sizes, strict=True):
                if one is None or one.part != part:
                    found = "no update" if one is None else _update_of(one.part)
                    raise _other_updates(_update_of(part), found)
                (one.loss.total * scale).backward()
                yield self._shard(side, micro_batch, one, scale, size)

    def _by_turn(self, micro_batches: tuple[MicroBatch, ...]) -> Iterator[list[tuple[LoopSide, MicroBatch]]]:
        """The first micro-batch of every replica that has one, then the second, and so on."""
        owned = [[m for m in micro_batches if self._owner(m) == rank] for rank in range(len(self._sides))]
        for turn in range(max(map(len, owned), default=0)):
            yield [(self._sides[rank], own[turn]) for rank, own in enumerate(owned) if turn < len(own)]

    def _said(self, side: LoopSide, micro_batch: MicroBatch, number: int) -> Said:
        """What a loop asks for in an update of its step."""
        self._write(side)
        side.model.zero_grad()
        if number:
            return side.go_on(self._made)
        side.go_on(None)  # where it accumulates, the micro-batch before is still open
        self._write(side)
        side.model.train()
        side.step_number = micro_batch.step
        batch = self._oracle.load(micro_batch)
        seed_all(side.model, micro_batch.key)
        return side.take(batch)

    def _finish(self) -> None:
        """Let the loops do what they do behind the last update of a step, or before the first batch."""
        sides = [side for side in self._sides if not side.waits_for_batch]
        for side in sides:
            self._write(side)
        for asked in met(sides, [side.go_on(self._made) for side in sides]):
            if asked is not None:
                raise _other_updates("no further update", _update_of(asked.part))

    def _owner(self, micro_batch: MicroBatch) -> int:
        shards, num = self._oracle.work.num_shards, len(self._sides)
        return next(r for r in range(num) if micro_batch.shard in split(shards, num, r))

    def _write(self, side: LoopSide) -> None:
        """The oracle's values, where they differ: what is written in place cannot be differentiated later."""
        right = self._oracle.model.state_dict()
        with torch.no_grad():
            for name, value in side.model.state_dict(keep_vars=True).items():
                if not torch.equal(value, right[name]):
                    value.copy_(right[name])

    def _sizes(self, micro_batch: MicroBatch, scale: float) -> Tensors:
        """Of a tied parameter the magnitudes of its uses, from a loop that begins anew."""
        if not has_tied(self._oracle.model):
            return {}
        (shard,) = list(self._oracle.shards((micro_batch,), scale))
        return shard.uses

    def _shard(
        self, side: LoopSide, micro_batch: MicroBatch, asked: Asked, scale: float, sizes: Tensors
    ) -> Shard:
        inside = f"{asked.part}." if asked.part else ""
        gradients = {
            n: p.grad / scale
            for n, p in side.model.named_parameters()
            if p.grad is not None and n.startswith(inside)
        }
        total, count = float(asked.loss.total.detach()), float(asked.loss.count)
        return Shard(micro_batch, total, count, gradients, buffers_of(side.model), sizes)


def _other_updates(made: str, asked: str) -> StrategyError:
    return StrategyError(
        f"run a second time, for the oracle, the loop makes {asked} where it made {made}",
        next_step="let the batches, and what the loop keeps in variables of its own, decide what is updated",
    )


def _update_of(part: str) -> str:
    return f"an update of '{part}'" if part else "an update of all parameters"
