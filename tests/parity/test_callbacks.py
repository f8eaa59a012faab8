"""Callbacks: called alike on every rank under every strategy; they may end the run, and have a state."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import Callback, Evaluation, Result, Session, fit, run_folder
from paceline.state.stateful import state_from_json, state_to_json
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

STRATEGIES = (
    "replicas=2",
    "replicas=1 shard=2 zero=3",
    "replicas=1 pipeline=2",
    "replicas=2 sync=local:2",
    "replicas=1 pipeline=2 sync=pipedream",
    "replicas=1 servers=1 sync=server-async",
)


class Listener(Callback):
    """Remembers what it was told, and asks to stop on one rank only."""

    def __init__(self, stop_at: int = 10**6, on_rank: int = 1) -> None:
        self.told: list[tuple[str, int]] = []
        self.rounds = 0
        self._stop_at, self._on_rank = stop_at, on_rank

    def on_begin(self, session: Session) -> None:
        self.told.append(("begin", session.state.step))

    def on_step(self, session: Session, stats: Any) -> None:
        self.rounds += 1
        self.told.append(("step", stats.step))
        if stats.step + 1 >= self._stop_at and session.cluster.global_rank == self._on_rank:
            session.stop("enough")

    def on_evaluation(self, session: Session, evaluation: Evaluation) -> None:
        self.told.append(("evaluation", evaluation.step))

    def on_end(self, session: Session, result: Result) -> None:
        self.told.append(("end", result.steps))

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state_dict: Any) -> None:
        self.rounds = state_dict["rounds"]


def digits(strategy: str, steps: int, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [16, 16]},
        "steps": steps,
        "batch": {"size": 16, "shards": 4},
        "evaluate": {"max_samples": 32, "every_steps": 4},
        "runtime": {"threads": 1},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def heard(cluster: Cluster, strategy: str) -> tuple[list[tuple[str, int]], Result]:
    session, listener = build_test_session(cluster, digits(strategy, 12)), Listener(stop_at=6)
    session.add_callbacks([listener])
    result = fit(session)
    session.close()
    return listener.told, result


def test_every_rank_hears_the_same_and_one_may_end_the_run_for_all() -> None:
    def run(cluster: Cluster) -> dict[str, tuple[list[tuple[str, int]], Result]]:
        torch.set_num_threads(1)
        return {strategy: heard(cluster, strategy) for strategy in STRATEGIES}

    ranks = run_ranks(run, 2)
    for strategy in STRATEGIES:
        (told, result), (other, same) = (rank[strategy] for rank in ranks)
        assert told == other, strategy
        assert (result.steps, result.reason, result.stopped) == (same.steps, same.reason, same.stopped)
        assert result.reason == "enough" and not result.stopped
        assert 6 <= result.steps < 12, "after the round in which it was asked for"
        assert told[0] == ("begin", 0) and told[-1] == ("end", result.steps)
        assert ("evaluation", 4) in told and ("evaluation", result.steps) in told
    assert ranks[0]["replicas=2"][1].steps == 6


def test_its_state_goes_through_a_checkpoint(tmp_path: Path) -> None:
    def run(steps: int, resume: bool) -> Listener:
        session = build_test_session(Cluster.single(), digits("replicas=1", steps, run_dir=str(tmp_path)))
        listener = Listener()
        session.add_callbacks([listener])
        folder = run_folder.prepare_folder(session, tmp_path if resume else None)
        if resume:
            run_folder.restore_run(session, folder)
        fit(session, folder)
        session.close()
        return listener

    assert run(3, resume=False).rounds == 3
    again = run(5, resume=True)
    assert again.rounds == 5 and again.told[0] == ("begin", 3)


def test_what_a_scheduler_keeps_comes_back_as_it_was() -> None:
    kept = {"milestones": Counter({3: 1, 7: 2}), "best": float("inf"), "lrs": [0.1, 1e-7], "none": None}
    found = state_from_json(state_to_json("scheduler", kept))
    assert found == kept | {"milestones": {3: 1, 7: 2}}
    with pytest.raises(CheckpointError, match=r"'mine\.f' is function"):
        state_to_json("mine", {"f": lambda: None})


def test_the_best_checkpoint_is_saved_when_it_is_found_and_goes_on(tmp_path: Path) -> None:
    recipe = digits(
        "replicas=1",
        8,
        run_dir=str(tmp_path),
        evaluate={"every_steps": 2, "metric": "accuracy", "better": "higher", "max_samples": 200},
        checkpoint={"keep": 1, "keep_best": 1},
        optimizer={"lr": 0.5},
    )
    session = build_test_session(Cluster.single(), recipe)
    scores: dict[int, float] = {}

    class Scores(Callback):
        def on_evaluation(self, session: Session, evaluation: Evaluation) -> None:
            scores[evaluation.step] = evaluation.metrics["accuracy"]

    session.add_callbacks([Scores()])
    result = fit(session, run_folder.prepare_folder(session, None))
    session.close()
    best = max(scores, key=lambda step: (scores[step], step))
    assert result.best is not None and f"step-{best:08d}" in result.best
    again = build_test_session(Cluster.single(), recipe)
    run_folder.prepare_folder(again, tmp_path)
    assert run_folder.restore_run(again, tmp_path / "checkpoints" / "best") == Path(result.best).name
    assert again.state.step == best
    again.close()
