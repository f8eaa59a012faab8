"""Cases drawn at random: a model, a batch, an optimizer and a strategy end where the plain loop ends.

A failure names the number that draws it again, and the smallest case of fewer links that still fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from paceline import Loss, Task
from paceline.job.cluster import Cluster
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.marks import soak_param
from tests.zoo.drawn import Drawn, draw, make, without
from tests.zoo.plain import End, train
from tests.zoo.runs import distance_from, ended, zoo_recipe

TOLERANCE = 1e-9  # float64; AdamW divides by a root, which enlarges what rounding leaves of a zero
MANY = 100


def distances(cluster: Cluster, cases: Sequence[Drawn]) -> list[float]:
    """How far this rank ends from the plain loop, for each case."""
    torch.set_num_threads(1)
    return [distance_from(train(make(case), case.plan), trained(cluster, case)) for case in cases]


def trained(cluster: Cluster, case: Drawn) -> End:
    made = make(case)
    session = build_test_session(
        cluster,
        zoo_recipe(case.plan, case.way),
        lambda: Task(
            made.model,
            made.samples,
            lambda model, batch: Loss(*made.loss(model, batch)),
            blocks=lambda model: [*model][1:-1],
        ),
    )
    try:
        return ended(session, [stats.loss for stats in session.rounds()])
    finally:
        session.close()


def smallest(case: Drawn) -> Drawn:
    """Leave out links as long as it fails."""
    for place in range(len(case.links)):
        fewer = without(case, place)
        if max(d[0] for d in run_ranks(distances, case.way.processes, [fewer])) > TOLERANCE:
            return smallest(fewer)
    return case


@pytest.mark.capability("A2", "A11", "N2")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [soak_param(1), soak_param(2), 3, soak_param(4)])
@pytest.mark.parametrize(
    "first, number",
    [(0, 12), *(pytest.param(n, MANY, marks=pytest.mark.soak) for n in range(100, 1100, MANY))],
)
def test_drawn_cases_end_where_the_plain_loop_ends(first: int, number: int, processes: int) -> None:
    cases = [draw(first + k, processes) for k in range(number)]
    found = run_ranks(distances, processes, cases, deadline=300 + 5 * number)
    apart = [
        case for case, gaps in zip(cases, zip(*found, strict=True), strict=True) if max(gaps) > TOLERANCE
    ]
    assert not apart, f"{len(apart)} of {number}; the first, made small: {smallest(apart[0])}"


@pytest.mark.parametrize("processes", [soak_param(1), soak_param(2), 3])
def test_a_case_that_is_trained_otherwise_is_seen(processes: int) -> None:
    """The mutation twin: another rate in the plain loop."""

    def gaps(cluster: Cluster) -> list[float]:
        cases = [draw(k, processes) for k in range(3)]
        found = []
        for case in cases:
            other = train(make(case), replace(case.plan, lr=0.02))
            found.append(distance_from(other, trained(cluster, case)))
        return found

    assert all(min(row) > TOLERANCE for row in run_ranks(gaps, processes))
