"""The replicas of a run with an own loop, all in one process: each runs the loop on a model of its own.

So a loop remembers here what it remembers there: how many batches it has seen, a sample that it made before
an update and uses behind it. Invariant: a replica's model has the oracle's values whenever its loop runs, and
of these only what an update has changed is written, as in a run.

A user's own loop on both sides of a verification: a round of the session, and the losses of the oracle.

The loop is a function of `loop`, as `paceline.own_loop` gives one. On the strategy's side it runs as it is,
from one complete step to the next. For the oracle the same function runs again, once for each replica
(`OracleLoopReplicas`): what it gives to `backward` until it calls `step` is the loss of an update, and the oracle
does the rest by itself. So the loop's own losses are verified, not those of the task. What asks for a loss
beside the steps, to look at the task or to explain a failure, gets it from a loop that begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.data.work import MicroBatch, split_evenly
from paceline.errors import StrategyError
from paceline.observe.step_stats import StepStats
from paceline.recipe.recipe import Recipe
from paceline.session.evaluation import Evaluation
from paceline.session.fit_loop import fitting
from paceline.session.own_loop_steps import OwnLoop
from paceline.session.session import Session
from paceline.sync.update import UpdateResult
from paceline.task import Loss
from paceline.verification.error_bounds import KernelAgreement
from paceline.verification.model_copy import copy_model
from paceline.verification.oracle import (
    Oracle,
    ShardResult,
    StepTotals,
    Tensors,
    accumulate_shards,
    buffers_of,
    has_tied_parameters,
    seed_all,
)
from paceline.verification.oracle_loop import (
    EvaluateModel,
    GeneratorStates,
    LoopRequest,
    LoopThread,
    OracleLoop,
    OwnLoopFunction,
    RequestedUpdate,
    loop_ended_error,
    missing_step_error,
    resolve_reductions,
)
from paceline.verification.plain_evaluation import EvaluationValues, PlainEvaluation, evaluation_values


class OracleLoopReplicas:
    """All replicas' loops.

    Args:
        oracle: whose state each of them computes with.
        evaluates: in one process.
        num_replicas: that share the virtual shards.

    Attributes:
        told: the evaluations of the run, which its loops hear here too.
        found: each of these as it is in one process, once the first replica's loop has asked for it.
    """

    def __init__(
        self, oracle: Oracle, loop: OwnLoopFunction, evaluates: EvaluateModel, num_replicas: int
    ) -> None:
        self._oracle, self._evaluates = oracle, evaluates
        self.told: Sequence[Evaluation | None] = ()
        self.found: list[Evaluation | None] = []
        self._asked = [0] * num_replicas
        self._sides = [
            OracleLoop(loop, copy_model(oracle.model), oracle, partial(self._evaluated, rank), num_replicas)
            for rank in range(num_replicas)
        ]
        self._made: UpdateResult | None = None

    def totals(
        self,
        micro_batches: tuple[MicroBatch, ...],
        scale: float,
        part: str,
        number: int,
        made: UpdateResult | None,
    ) -> StepTotals:
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
        totals = accumulate_shards(shards, before, self._oracle.task.buffers)
        self._made = made
        options = self._sides[0].options()
        if options is not None:
            self._oracle.options = lambda update: options
        return totals

    def _evaluated(self, rank: int, model: nn.Module, step: int, source: Any) -> Evaluation | None:
        """What the run has found where a replica's loop evaluates."""
        place, self._asked[rank] = self._asked[rank], self._asked[rank] + 1
        if place >= len(self.told):
            raise _different_updates_error("no evaluation", f"one after {step} steps")
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
    ) -> Iterator[ShardResult]:
        for together in self._by_turn(micro_batches):
            sizes = [self._sizes(micro_batch, scale) for _, micro_batch in together]
            said = [self._said(side, micro_batch, number) for side, micro_batch in together]
            asked = resolve_reductions([side for side, _ in together], said)
            for (side, micro_batch), one, size in zip(together, asked, sizes, strict=True):
                if one is None or one.part != part:
                    found = "no update" if one is None else _describe_update(one.part)
                    raise _different_updates_error(_describe_update(part), found)
                (one.loss.total * scale).backward()
                yield self._shard(side, micro_batch, one, scale, size)

    def _by_turn(
        self, micro_batches: tuple[MicroBatch, ...]
    ) -> Iterator[list[tuple[OracleLoop, MicroBatch]]]:
        """The first micro-batch of every replica that has one, then the second, and so on."""
        owned = [[m for m in micro_batches if self._owner(m) == rank] for rank in range(len(self._sides))]
        for turn in range(max(map(len, owned), default=0)):
            yield [(self._sides[rank], own[turn]) for rank, own in enumerate(owned) if turn < len(own)]

    def _said(self, side: OracleLoop, micro_batch: MicroBatch, number: int) -> LoopRequest:
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
        sides = [side for side in self._sides if not side.needs_next_batch]
        for side in sides:
            self._write(side)
        for asked in resolve_reductions(sides, [side.go_on(self._made) for side in sides]):
            if asked is not None:
                raise _different_updates_error("no further update", _describe_update(asked.part))

    def _owner(self, micro_batch: MicroBatch) -> int:
        shards, num = self._oracle.work.num_shards, len(self._sides)
        return next(r for r in range(num) if micro_batch.shard in split_evenly(shards, num, r))

    def _write(self, side: OracleLoop) -> None:
        """The oracle's values, where they differ: what is written in place cannot be differentiated later."""
        right = self._oracle.model.state_dict()
        with torch.no_grad():
            for name, value in side.model.state_dict(keep_vars=True).items():
                if not torch.equal(value, right[name]):
                    value.copy_(right[name])

    def _sizes(self, micro_batch: MicroBatch, scale: float) -> Tensors:
        """Of a tied parameter the magnitudes of its uses, from a loop that begins anew."""
        if not has_tied_parameters(self._oracle.model):
            return {}
        (shard,) = list(self._oracle.shards((micro_batch,), scale))
        return shard.uses

    def _shard(
        self, side: OracleLoop, micro_batch: MicroBatch, asked: RequestedUpdate, scale: float, sizes: Tensors
    ) -> ShardResult:
        inside = f"{asked.part}." if asked.part else ""
        gradients = {
            n: p.grad / scale
            for n, p in side.model.named_parameters()
            if p.grad is not None and n.startswith(inside)
        }
        total, count = float(asked.loss.total.detach()), float(asked.loss.count)
        return ShardResult(micro_batch, total, count, gradients, buffers_of(side.model), sizes)


def _different_updates_error(made: str, asked: str) -> StrategyError:
    return StrategyError(
        f"run a second time, for the oracle, the loop makes {asked} where it made {made}",
        next_step="let the batches, and what the loop keeps in variables of its own, decide what is updated",
    )


def _describe_update(part: str) -> str:
    return f"an update of '{part}'" if part else "an update of all parameters"


_MOST_TURNS = 100


class OwnLoopRounds(Iterator[StepStats]):
    """The steps of an own loop as rounds: between two of them the state is consistent; collective."""

    def __init__(self, session: Session, loop: OwnLoopFunction) -> None:
        self._session, self._loop = session, loop
        self._turns = LoopThread(self._run, "own loop")
        self._own: _RecordedOwnLoop | None = None
        self._reason = ""

    def __next__(self) -> StepStats:
        stats = self._turns.resume()
        if stats is None:
            if self._session.state.step < self._session.num_steps and not self._reason:
                raise loop_ended_error()
            raise StopIteration
        found: StepStats = stats
        return found

    @property
    def parts(self) -> Sequence[str]:
        """What the last step has updated, in its order."""
        return self._own.updated if self._own is not None else ()

    @property
    def evaluations(self) -> Sequence[Evaluation | None]:
        """All that the loop has asked for so far."""
        return self._own.evaluations if self._own is not None else ()

    def close(self) -> None:
        """Leave the loop where it stands."""
        self._turns.end()

    def _run(self) -> None:
        with fitting(self._session, None, ()) as found:
            self._own = _RecordedOwnLoop(self._session, found, after_round=self._turns.hand_over)
            self._loop(self._own)
            self._own.end()
            self._reason = found.course.reason


class _RecordedOwnLoop(OwnLoop):
    """A loop whose evaluations are kept."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.evaluations: list[Evaluation | None] = []

    def evaluate(self, source: Any = None) -> Evaluation | None:
        """See `OwnLoop`."""
        self.evaluations.append(super().evaluate(source))
        return self.evaluations[-1]


class LoopPair:
    """A user's loop on the side of a session and on that of its oracle.

    Args:
        oracle: whose loss is the loop's from now on.
        evaluates: in one process.
    """

    def __init__(
        self, session: Session, oracle: Oracle, loop: OwnLoopFunction, evaluates: EvaluateModel
    ) -> None:
        self.rounds, self._loop_loss = OwnLoopRounds(session, loop), OwnLoopLoss(oracle, loop, evaluates)
        oracle.task = replace(oracle.task, loss=self._loop_loss)
        num_replicas = min(session.mesh.data.size, oracle.work.num_shards)  # it may run all samples at once
        self._replicas = (
            OracleLoopReplicas(oracle, loop, evaluates, num_replicas) if session.is_first else None
        )
        self._compared = 0

    def parts(self) -> Sequence[str]:
        """What the last step has updated, in its order; an empty name stands for all of the model."""
        return self.rounds.parts

    def totals(
        self,
        micro_batches: tuple[MicroBatch, ...],
        scale: float,
        part: str,
        number: int,
        made: UpdateResult | None,
    ) -> StepTotals:
        """See `OracleLoopReplicas.totals`; on rank 0."""
        assert self._replicas is not None
        self._replicas.told = self.rounds.evaluations
        self._loop_loss.update, self._loop_loss.step_number = number, micro_batches[0].step
        return self._replicas.totals(micro_batches, scale, part, number, made)

    def evaluations(self, kernels: KernelAgreement) -> Sequence[EvaluationValues]:
        """What is to be compared of the evaluations since the last call; behind `totals`.

        Raises:
            StrategyError: the oracle's loop has not asked for all of them.
        """
        told, first = self.rounds.evaluations, self._compared
        self._compared = len(told)
        found = self._replicas.found if self._replicas is not None else [None] * len(told)
        if len(found) < len(told):
            raise StrategyError(
                "run a second time, for the oracle, the loop does not evaluate where it did",
                next_step="let loop.step_number say when",
            )
        pairs = list(zip(told, found, strict=True))[first:]
        return [evaluation_values(mine, right, kernels) for mine, right in pairs if mine is not None]

    def close(self) -> None:
        """Leave all loops where they stand."""
        self.rounds.close()
        if self._replicas is not None:
            self._replicas.close()


def use_loop_loss(oracle: Oracle, loop: OwnLoopFunction | None, recipe: Recipe) -> EvaluateModel:
    """Let the oracle's loss be that of an own loop, if there is one; returns what evaluates by the task's."""
    evaluates = PlainEvaluation(oracle, oracle.task, recipe)
    if loop is not None:
        oracle.task = replace(oracle.task, loss=OwnLoopLoss(oracle, loop, evaluates))
    return evaluates


class OwnLoopLoss:
    """The loss of a micro-batch as an own loop computes it from its beginning; see `LossFunction`.

    Attributes:
        update: which of a step's updates is asked for, from 0; those before it are not made.
        step_number: of the step.
    """

    def __init__(self, oracle: Oracle, loop: OwnLoopFunction, evaluates: EvaluateModel) -> None:
        self._oracle, self._loop, self._evaluates = oracle, loop, evaluates
        self.update = self.step_number = 0

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        """The loss of one update."""
        side = OracleLoop(self._loop, model, self._oracle, self._evaluates)
        side.step_number = self.step_number
        try:
            return self._asked(side, batch)
        finally:
            side.close()

    def _asked(self, side: OracleLoop, batch: Any) -> Loss:
        draws = GeneratorStates()
        resolve_reductions([side], [side.go_on(None)])
        draws.put_back()
        for _ in range(_MOST_TURNS):  # not every turn of a loop makes every update
            (asked,) = resolve_reductions([side], [side.take(batch)])
            if asked is None:
                raise missing_step_error()
            for _ in range(self.update):
                (found,) = resolve_reductions([side], [side.go_on(None)])
                if found is None:
                    break
                asked = found
            else:
                return asked.loss
        raise StrategyError(
            f"in {_MOST_TURNS} steps on the same batch the loop makes no update number {self.update + 1}",
            next_step="let what decides which parts are updated follow from the batches",
        )
