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


def both(cluster: Cluster, name: str) -> tuple[str, str]:
    case = REFUSALS[name]
    return trains(cluster, case.wrong, case.recipe), trains(cluster, case.fixed, case.fixed_recipe)


@pytest.mark.capability("Z17")
@pytest.mark.parametrize("name", REFUSALS)
def test_a_known_mistake_is_refused_and_its_mended_twin_trains(name: str) -> None:
    for wrong, fixed in run_ranks(both, REFUSALS[name].processes, name):
        assert REFUSALS[name].says in wrong
        assert fixed == ""
