"""Mistakes that are refused: the error says what is wrong and what to do; the fixed task trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.known_mistakes.refusals import REFUSALS


def trains(cluster: Cluster, build: Callable[[], Task], changes: Mapping[str, Any]) -> str:
    """What is said on the way through two epochs; empty if nothing is."""
    torch.set_num_threads(1)
    settings: dict[str, Any] = {"task": "own", "steps": 4, "batch": {"size": 6, "shards": 2}}
    settings |= changes
    settings["strategy"] = Strategy.parse(settings.get("strategy", "replicas=all"))
    session = None
    try:
        session = build_test_session(cluster, Recipe(**settings), build)
        assert len(list(session.rounds())) == 4
    except PacelineError as error:
        assert error.next_step
        return str(error)
    finally:
        if session is not None:
            session.close()
    return ""


def both(cluster: Cluster, names: list[str]) -> dict[str, tuple[str, str]]:
    """By name, what is said of the mistake and of its mended twin."""
    cases = {name: REFUSALS[name] for name in names}
    return {
        name: (trains(cluster, case.wrong, case.recipe), trains(cluster, case.fixed, case.fixed_recipe))
        for name, case in cases.items()
    }


@pytest.fixture(scope="module")
def said() -> dict[int, list[dict[str, tuple[str, str]]]]:
    """By number of ranks, what each rank has said: one job for all cases."""
    counts = {case.processes for case in REFUSALS.values()}
    names = {n: [name for name, case in REFUSALS.items() if case.processes == n] for n in counts}
    return {n: run_ranks(both, n, names[n]) for n in counts}


@pytest.mark.capability("Z17")
@pytest.mark.parametrize("name", REFUSALS)
def test_a_known_mistake_is_refused_and_its_mended_twin_trains(
    name: str, said: dict[int, list[dict[str, tuple[str, str]]]]
) -> None:
    for wrong, fixed in (rank[name] for rank in said[REFUSALS[name].processes]):
        assert REFUSALS[name].says in wrong
        assert fixed == ""
