"""A user's own loop on both sides of a verification: a round of the session, and the losses of the oracle.

The loop is a function of `loop`, as `paceline.own_loop` gives one. On the strategy's side it runs as it is,
from one complete step to the next. For the oracle the same function runs again, once for each replica
(`LoopReplicas`): what it gives to `backward` until it calls `step` is the loss of an update, and the oracle
does the rest by itself. So the loop's own losses are verified, not those of the task. What asks for a loss
beside the steps, to look at the task or to explain a failure, gets it from a loop that begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from paceline.data import MicroBatch
from paceline.errors import StrategyError
from paceline.observe import Stats
from paceline.recipe import Recipe
from paceline.sync import Update
from paceline.task import Loss
from paceline.training import Session
from paceline.training.evaluation import Evaluation
from paceline.training.loop import fitting
from paceline.training.own import OwnLoop
from paceline.verification.compare import Kernels
from paceline.verification.loop_replicas import LoopReplicas
from paceline.verification.loop_side import Draws, Evaluated, Loop, LoopSide, loop_ended, met, no_step
from paceline.verification.oracle import Oracle, Totals
from paceline.verification.plain_evaluation import PlainEvaluation, Values, values_of
from paceline.verification.turns import Turns

_MOST_TURNS = 100


class LoopRounds(Iterator[Stats]):
    """The steps of an own loop as rounds: between two of them the state is consistent; collective."""

    def __init__(self, session: Session, loop: Loop) -> None:
        self._session, self._loop = session, loop
        self._turns = Turns(self._run, "own loop")
        self._own: _Heard | None = None
        self._reason = ""

    def __next__(self) -> Stats:
        stats = self._turns.resume()
        if stats is None:
            if self._session.state.step < self._session.num_steps and not self._reason:
                raise loop_ended()
            raise StopIteration
        found: Stats = stats
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
            self._own = _Heard(self._session, found, after_round=self._turns.hand_over)
            self._loop(self._own)
            self._own.end()
            self._reason = found.course.reason


class _Heard(OwnLoop):
    """A loop whose evaluations are kept."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.evaluations: list[Evaluation | None] = []

    def evaluate(self, source: Any = None) -> Evaluation | None:
        """See `OwnLoop`."""
        self.evaluations.append(super().evaluate(source))
        return self.evaluations[-1]


class BothLoops:
    """A user's loop on the side of a session and on that of its oracle.

    Args:
        oracle: whose loss is the loop's from now on.
        evaluates: in one process.
    """

    def __init__(self, session: Session, oracle: Oracle, loop: Loop, evaluates: Evaluated) -> None:
        self.rounds, self._spoken = LoopRounds(session, loop), LoopLoss(oracle, loop, evaluates)
        oracle.task = replace(oracle.task, loss=self._spoken)
        num_replicas = min(session.mesh.data.size, oracle.work.num_shards)  # it may run all samples at once
        self._replicas = LoopReplicas(oracle, loop, evaluates, num_replicas) if session.is_first else None
        self._compared = 0

    def parts(self) -> Sequence[str]:
        """What the last step has updated, in its order; an empty name stands for all of the model."""
        return self.rounds.parts

    def totals(
        self, micro_batches: tuple[MicroBatch, ...], scale: float, part: str, number: int, made: Update | None
    ) -> Totals:
        """See `LoopReplicas.totals`; on rank 0."""
        assert self._replicas is not None
        self._replicas.told = self.rounds.evaluations
        self._spoken.update, self._spoken.step_number = number, micro_batches[0].step
        return self._replicas.totals(micro_batches, scale, part, number, made)

    def evaluations(self, kernels: Kernels) -> Sequence[Values]:
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
        return [values_of(mine, right, kernels) for mine, right in pairs if mine is not None]

    def close(self) -> None:
        """Leave all loops where they stand."""
        self.rounds.close()
        if self._replicas is not None:
            self._replicas.close()


def spoken_by(oracle: Oracle, loop: Loop | None, recipe: Recipe) -> Evaluated:
    """Let the oracle's loss be that of an own loop, if there is one; returns what evaluates by the task's."""
    evaluates = PlainEvaluation(oracle, oracle.task, recipe)
    if loop is not None:
        oracle.task = replace(oracle.task, loss=LoopLoss(oracle, loop, evaluates))
    return evaluates


class LoopLoss:
    """The loss of a micro-batch as an own loop computes it from its beginning; see `LossFunction`.

    Attributes:
        update: which of a step's updates is asked for, from 0; those before it are not made.
        step_number: of the step.
    """

    def __init__(self, oracle: Oracle, loop: Loop, evaluates: Evaluated) -> None:
        self._oracle, self._loop, self._evaluates = oracle, loop, evaluates
        self.update = self.step_number = 0

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        """The loss of one update."""
        side = LoopSide(self._loop, model, self._oracle, self._evaluates)
        side.step_number = self.step_number
        try:
            return self._asked(side, batch)
        finally:
            side.close()

    def _asked(self, side: LoopSide, batch: Any) -> Loss:
        draws = Draws()
        met([side], [side.go_on(None)])
        draws.put_back()
        for _ in range(_MOST_TURNS):  # not every turn of a loop makes every update
            (asked,) = met([side], [side.take(batch)])
            if asked is None:
                raise no_step()
            for _ in range(self.update):
                (found,) = met([side], [side.go_on(None)])
                if found is None:
                    break
                asked = found
            else:
                return asked.loss
        raise StrategyError(
            f"in {_MOST_TURNS} steps on the same batch the loop makes no update number {self.update + 1}",
            next_step="let what decides which parts are updated follow from the batches",
        )
