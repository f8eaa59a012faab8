"""Rounds of rollouts: rows are made before the first step of an iteration, and another rule takes the steps.

Invariant: a checkpoint between two iterations has the open episodes from which the next one begins, and one
within an iteration has its rows.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import cast

from paceline.data.work import TrainingFeed
from paceline.errors import TaskError
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.rl.actor_ranks import ActorsRule
from paceline.rl.ppo import NOT_EQUAL
from paceline.rl.rollouts import RolloutRecord, Rollouts, mean_or_nan
from paceline.session.session import Session
from paceline.sync.sync_rule import SyncRule
from paceline.sync.update import UpdateStep

_NUM_REPORTS = 10


class RolloutRounds:
    """A sync rule that makes the rows of an iteration before its first step; another rule takes the steps.

    Args:
        inner: takes the steps.
        rollouts: makes the rows.
        session: of this rank.
    Attributes:
        num_not_equal: rows of the last first minibatch whose log-probability has other bits than the actor's;
            None where that minibatch has not come yet, or the loss does not count them.
    """

    def __init__(self, inner: SyncRule, rollouts: Rollouts, session: Session) -> None:
        self.inner, self.rollouts, self._session = inner, rollouts, session
        self.num_not_equal: int | None = None
        self._reported = 0

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """Train to the end of the run; see `SyncRule.rounds`."""
        state, settings = update_step.state, self.rollouts.settings
        rounds = cast("Generator[StepStats, None, None]", self.inner.rounds(feed, runner, update_step))
        with closing(rounds):
            while state.step < feed.num_steps:
                # After the caller has saved the state, if it did: the open episodes of a checkpoint are those
                # from which the iteration begins.
                record = self.rollouts.before_step(self._session)
                stats = next(rounds)
                if record is not None:
                    if stats.step % settings.updates_per_iteration == 0:
                        self._check_ratio(stats)
                    self._report(stats, record)
                yield stats

    def abort(self) -> None:
        """Drop the step that an error has interrupted."""
        self.inner.abort()

    @property
    def expects_equal_bits(self) -> bool:
        """Return whether actor and learner run the same kernels: a micro-batch is whole on one rank."""
        axes = self._session.mesh.axes
        return axes["tensor"].size == 1 and axes["context"].size == 1

    def _check_ratio(self, stats: StepStats) -> None:
        """Count the rows of the first minibatch in which learner and actor differ.

        Raises:
            TaskError: there are some, and the run is reproducible.
        """
        share = stats.metrics.get(NOT_EQUAL)
        self.num_not_equal = None if share is None else round(share * stats.num_items)
        if self.num_not_equal and self.expects_equal_bits and self.rollouts.recipe.reproducible:
            raise TaskError(
                f"{self.num_not_equal} of {stats.num_samples} rows of the first minibatch have another"
                " log-probability in the learner than in the actor",
                where=f"step {stats.step}",
                next_step="remove what differs between both from the policy (dropout, BatchNorm), set"
                " MKL_CBWR=AUTO,STRICT in the environment of Python, or set reproducible = false",
            )

    def _report(self, stats: StepStats, record: RolloutRecord) -> None:
        settings, episodes = self.rollouts.settings, self.rollouts.episodes
        iteration = settings.iteration_of(stats.step) + 1
        done, recent = iteration * settings.num_rows, mean_or_nan(episodes.recent)
        self._session.events.add(
            "rollout",
            {
                "step": stats.step,
                "environment_steps": done,
                "episodes": len(record.returns),
                "mean_return": mean_or_nan(record.returns),
                "mean_length": mean_or_nan(record.lengths),
                "recent_return": recent,
                "terminated": record.num_terminated,
                "truncated": record.num_truncated,
                "version": record.version,
                "ages": {str(age): count for age, count in sorted(record.ages.items())},
                "not_equal": -1 if self.num_not_equal is None else self.num_not_equal,
                "seconds": record.seconds,
                "sha256": record.sha256,
            },
        )
        part = _NUM_REPORTS * iteration // settings.num_iterations
        if part > self._reported:
            self._reported = part
            self._session.session_base.context.warn(
                f"environment step {done}/{settings.num_iterations * settings.num_rows}: mean return"
                f" {recent:.1f} of the last {len(episodes.recent)} episodes"
            )


def attach(rollouts: Rollouts, session: Session) -> None:
    """Let a session make its rows with these environments, and keep the open episodes in its state."""

    def around(rule: SyncRule) -> SyncRule:
        return RolloutRounds(rule, rollouts, session)

    def install() -> None:
        rule = session.parts.rule
        if isinstance(rule, ActorsRule):
            rule.attach(rollouts, around)
        else:
            session.parts = replace(session.parts, rule=around(rule))
        if not isinstance(rule, ActorsRule) or rule.learns:
            session.state.extra_states.update(rollouts.extra_states)

    install()
    session.reinstall_hooks.append(install)
    session.session_base.layout.exit_callbacks.append(rollouts.close)
