"""Verification of a user's own loop: it runs once for the session, and again for the oracle.

For the session the function runs as `paceline.own_loop` runs it, from one complete step to the next
(`OwnLoopRounds`). For the oracle it runs a second time, in one process, once for each replica
(`OracleLoopReplicas`): the losses that it passes to `backward` before `step` are the loss of an update, and
the oracle does the rest. So the losses of the loop are verified, not those of the task. A loss outside the
steps, to check the task or to explain a failure, comes from a loop that starts anew (`OwnLoopLoss`).

Invariant: the model of a replica has the values of the oracle whenever its loop runs, and only values that an
update has changed are written, as in a run. So a loop keeps what it keeps in a run: the number of batches
that it has seen, or a sample that it computed before an update and uses after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.data.work import MicroBatch, split_evenly
from paceline.errors import StrategyError, format_count
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
    """The loops of all replicas, in one process.

    Args:
        oracle: all loops compute with its state.
        evaluate: evaluates a model in one process.
        num_replicas: number of replicas that share the virtual shards.

    Attributes:
        run_evaluations: the evaluations of the run, which the loops get here too.
        own_evaluations: the same evaluations in one process, made when the first replica's loop evaluates.
    """

    def __init__(
        self, oracle: Oracle, loop: OwnLoopFunction, evaluate: EvaluateModel, num_replicas: int
    ) -> None:
        self._oracle, self._evaluate = oracle, evaluate
        self.run_evaluations: Sequence[Evaluation | None] = ()
        self.own_evaluations: list[Evaluation | None] = []
        self._num_evaluations = [0] * num_replicas
        self._loops = [
            OracleLoop(
                *(loop, copy_model(oracle.model), oracle),
                partial(self._answer_evaluation, rank),
                num_replicas,
            )
            for rank in range(num_replicas)
        ]
        self._result: UpdateResult | None = None

    def totals(
        self,
        micro_batches: tuple[MicroBatch, ...],
        scale: float,
        part: str,
        number: int,
        result: UpdateResult | None,
    ) -> StepTotals:
        """Return the sums over the losses of the next update; the oracle is in the state before it.

        Args:
            micro_batches: shards of the step, in order.
            scale: factor of the loss in backward.
            part: submodule that the strategy has updated.
            number: number of the update in its step, from 0.
            result: value that `step` returns for it in the loops.
        """
        before = self._oracle.buffers()
        if number == 0:
            self._finish()
        shards = self._shards(micro_batches, scale, part, number)
        totals = accumulate_shards(shards, before, self._oracle.task.buffers)
        self._result = result
        options = self._loops[0].options()
        if options is not None:
            self._oracle.options = lambda update: options
        return totals

    @property
    def models(self) -> Sequence[nn.Module]:
        """Return the model of each replica's loop."""
        return [loop.model for loop in self._loops]

    def _answer_evaluation(self, rank: int, model: nn.Module, step: int, source: Any) -> Evaluation | None:
        """Return the evaluation of the run at this point of a replica's loop."""
        index = self._num_evaluations[rank]
        self._num_evaluations[rank] += 1
        if index >= len(self.run_evaluations):
            raise _different_updates_error("no evaluation", f"one after {format_count(step, 'step')}")
        if rank == 0:
            self.own_evaluations.append(self._evaluate(model, step, source))
        return self.run_evaluations[index]

    def close(self) -> None:
        """End all loops at their present requests."""
        for loop in self._loops:
            loop.close()

    def _shards(
        self, micro_batches: tuple[MicroBatch, ...], scale: float, part: str, number: int
    ) -> Iterator[ShardResult]:
        for turn in self._by_turn(micro_batches):
            sizes = [self._use_magnitudes(micro_batch, scale) for _, micro_batch in turn]
            requests = [self._request(loop, micro_batch, number) for loop, micro_batch in turn]
            updates = resolve_reductions([loop for loop, _ in turn], requests)
            for (loop, micro_batch), update, uses in zip(turn, updates, sizes, strict=True):
                if update is None or update.part != part:
                    actual = "no update" if update is None else _describe_update(update.part)
                    raise _different_updates_error(_describe_update(part), actual)
                (update.loss.total * scale).backward()
                yield self._shard_result(loop, micro_batch, update, scale, uses)

    def _by_turn(
        self, micro_batches: tuple[MicroBatch, ...]
    ) -> Iterator[list[tuple[OracleLoop, MicroBatch]]]:
        """Yield the first micro-batch of every replica with its loop, then the second, and so on.

        Replicas take turns, since a call of `loop.reduce` needs the values of all of them.
        """
        batches_by_replica = [
            [m for m in micro_batches if self._owner(m) == rank] for rank in range(len(self._loops))
        ]
        for turn in range(max(map(len, batches_by_replica), default=0)):
            yield [
                (self._loops[rank], replica_batches[turn])
                for rank, replica_batches in enumerate(batches_by_replica)
                if turn < len(replica_batches)
            ]

    def _request(self, loop: OracleLoop, micro_batch: MicroBatch, number: int) -> LoopRequest:
        """Continue a loop to its next request, with a new batch for the first update of a step."""
        self._write_values(loop)
        loop.model.zero_grad()
        if number:
            return loop.go_on(self._result)
        # Under gradient accumulation, the previous micro-batch of the loop is still open.
        loop.go_on(None)
        self._write_values(loop)
        self._oracle.enter_training(loop.model)
        loop.step_number = micro_batch.step
        batch = self._oracle.load(micro_batch)
        seed_all(loop.model, micro_batch.key)
        return loop.take(batch)

    def _finish(self) -> None:
        """Continue the loops to their next batch, after the last update of a step."""
        loops = [loop for loop in self._loops if not loop.needs_next_batch]
        for loop in loops:
            self._write_values(loop)
        for request in resolve_reductions(loops, [loop.go_on(self._result) for loop in loops]):
            if request is not None:
                raise _different_updates_error("no further update", _describe_update(request.part))

    def _owner(self, micro_batch: MicroBatch) -> int:
        shards, num = self._oracle.work.num_shards, len(self._loops)
        return next(r for r in range(num) if micro_batch.shard in split_evenly(shards, num, r))

    def _write_values(self, loop: OracleLoop) -> None:
        """Write the oracle's values to the model of a loop, where they differ."""
        right = self._oracle.model.state_dict()
        with torch.no_grad():
            for name, value in loop.model.state_dict(keep_vars=True).items():
                # A write in place invalidates graphs that the loop keeps, so unchanged values are left alone.
                if not torch.equal(value, right[name]):
                    value.copy_(right[name])

    def _use_magnitudes(self, micro_batch: MicroBatch, scale: float) -> Tensors:
        """Return the magnitudes of the uses of tied parameters, from a loop that starts anew."""
        if not has_tied_parameters(self._oracle.model):
            return {}
        (shard,) = list(self._oracle.shards((micro_batch,), scale))
        return shard.uses

    def _shard_result(
        self, loop: OracleLoop, micro_batch: MicroBatch, update: RequestedUpdate, scale: float, uses: Tensors
    ) -> ShardResult:
        prefix = f"{update.part}." if update.part else ""
        gradients = {
            n: p.grad / scale
            for n, p in loop.model.named_parameters()
            if p.grad is not None and n.startswith(prefix)
        }
        total, count = float(update.loss.total.detach()), float(update.loss.count)
        return ShardResult(micro_batch, total, count, gradients, buffers_of(loop.model), uses)


def _different_updates_error(first: str, second: str) -> StrategyError:
    return StrategyError(
        f"run a second time, for the oracle, the loop makes {second} where it made {first}",
        next_step="let only the batches and local variables of the loop decide what is updated",
    )


def _describe_update(part: str) -> str:
    return f"an update of '{part}'" if part else "an update of all parameters"


_MOST_TURNS = 100


class OwnLoopRounds(Iterator[StepStats]):
    """The steps of an own loop as rounds of a session: the state is consistent between them; collective."""

    def __init__(self, session: Session, loop: OwnLoopFunction) -> None:
        self._session, self._loop = session, loop
        self._thread = LoopThread(self._run, "own loop")
        self._recorded: _RecordedOwnLoop | None = None
        self._reason = ""

    def __next__(self) -> StepStats:
        stats = self._thread.resume()
        if stats is None:
            if self._session.state.step < self._session.num_steps and not self._reason:
                raise loop_ended_error()
            raise StopIteration
        round_stats: StepStats = stats
        return round_stats

    @property
    def parts(self) -> Sequence[str]:
        """Return the submodules that the last step has updated, in order."""
        return self._recorded.updated if self._recorded is not None else ()

    @property
    def evaluations(self) -> Sequence[Evaluation | None]:
        """Return all evaluations of the loop so far."""
        return self._recorded.evaluations if self._recorded is not None else ()

    def close(self) -> None:
        """End the loop at its present step."""
        self._thread.end()

    def _run(self) -> None:
        with fitting(self._session, None, ()) as fit:
            self._recorded = _RecordedOwnLoop(self._session, fit, after_round=self._thread.hand_over)
            self._loop(self._recorded)
            self._recorded.end()
            self._reason = fit.schedule.reason


class _RecordedOwnLoop(OwnLoop):
    """An own loop that records its evaluations."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.evaluations: list[Evaluation | None] = []

    def evaluate(self, source: Any = None) -> Evaluation | None:
        self.evaluations.append(super().evaluate(source))
        return self.evaluations[-1]


class LoopPair:
    """A user's loop in a session and in its oracle.

    Args:
        oracle: its loss becomes that of the loop.
        evaluate: evaluates a model in one process.
    """

    def __init__(
        self, session: Session, oracle: Oracle, loop: OwnLoopFunction, evaluate: EvaluateModel
    ) -> None:
        self.rounds, self._loop_loss = OwnLoopRounds(session, loop), OwnLoopLoss(oracle, loop, evaluate)
        oracle.task = replace(oracle.task, loss=self._loop_loss)
        # An oracle that runs the whole batch at once has one shard.
        num_replicas = min(session.mesh.data.size, oracle.work.num_shards)
        self._replicas = (
            OracleLoopReplicas(oracle, loop, evaluate, num_replicas) if session.is_first else None
        )
        self._compared = 0

    def parts(self) -> Sequence[str]:
        """Return the submodules that the last step has updated, in order; an empty name: the whole model."""
        return self.rounds.parts

    def totals(
        self,
        micro_batches: tuple[MicroBatch, ...],
        scale: float,
        part: str,
        number: int,
        result: UpdateResult | None,
    ) -> StepTotals:
        """Return the sums of the next update, as `OracleLoopReplicas.totals`; only on rank 0."""
        assert self._replicas is not None
        self._replicas.run_evaluations = self.rounds.evaluations
        self._loop_loss.update, self._loop_loss.step_number = number, micro_batches[0].step
        return self._replicas.totals(micro_batches, scale, part, number, result)

    def models(self) -> Sequence[nn.Module]:
        """Return the models of the loops of the oracle; only rank 0 has any."""
        return self._replicas.models if self._replicas is not None else ()

    def evaluations(self, kernels: KernelAgreement) -> Sequence[EvaluationValues]:
        """Return the values of all evaluations since the last call; called after `totals`.

        Raises:
            StrategyError: the loop of the oracle has made fewer evaluations.
        """
        run, first = self.rounds.evaluations, self._compared
        self._compared = len(run)
        oracle_evaluations = (
            self._replicas.own_evaluations if self._replicas is not None else [None] * len(run)
        )
        if len(oracle_evaluations) < len(run):
            raise StrategyError(
                "run a second time, for the oracle, the loop does not evaluate where it did",
                next_step="let loop.step_number decide when the loop evaluates",
            )
        pairs = list(zip(run, oracle_evaluations, strict=True))[first:]
        return [evaluation_values(mine, theirs, kernels) for mine, theirs in pairs if mine is not None]

    def close(self) -> None:
        """End all loops at their present requests."""
        self.rounds.close()
        if self._replicas is not None:
            self._replicas.close()


def use_loop_loss(oracle: Oracle, loop: OwnLoopFunction | None, recipe: Recipe) -> EvaluateModel:
    """Set the loss of an own loop, if there is one, as the oracle's; return an evaluation by the task."""
    evaluate = PlainEvaluation(oracle, oracle.task, recipe)
    if loop is not None:
        oracle.task = replace(oracle.task, loss=OwnLoopLoss(oracle, loop, evaluate))
    return evaluate


class OwnLoopLoss:
    """The loss of a micro-batch in an own loop that starts anew; a `LossFunction`.

    Attributes:
        update: number of the update of a step whose loss is returned, from 0; earlier ones are not made.
        step_number: number of the step.
    """

    def __init__(self, oracle: Oracle, loop: OwnLoopFunction, evaluate: EvaluateModel) -> None:
        self._oracle, self._loop, self._evaluate = oracle, loop, evaluate
        self.update = self.step_number = 0

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of one update."""
        loop = OracleLoop(self._loop, model, self._oracle, self._evaluate)
        loop.step_number = self.step_number
        try:
            return self._loss_of_update(loop, batch)
        finally:
            loop.close()

    def _loss_of_update(self, loop: OracleLoop, batch: Any) -> Loss:
        draws = GeneratorStates()
        resolve_reductions([loop], [loop.go_on(None)])
        draws.put_back()
        # A loop need not make every update in every step.
        for _ in range(_MOST_TURNS):
            (request,) = resolve_reductions([loop], [loop.take(batch)])
            if request is None:
                raise missing_step_error()
            for _ in range(self.update):
                (following,) = resolve_reductions([loop], [loop.go_on(None)])
                if following is None:
                    break
                request = following
            else:
                return request.loss
        raise StrategyError(
            f"the loop never made update {self.update + 1} of a step in {_MOST_TURNS} steps on one batch",
            next_step="let the batches decide which parts of the model are updated",
        )
