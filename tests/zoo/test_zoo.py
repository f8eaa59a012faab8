"""Models that users bring, under every strategy, end where a plain loop ends that knows nothing of Paceline.

A cell is a kind (`kinds.py`) with a way (`runs.py`). Its plain loop (`plain.py`) trains virtual shards one
after another and makes one update a step; losses, parameters and buffers agree within rounding.
"""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from paceline.testing import RanksFailed, run_ranks
from tests.zoo.kinds import KINDS
from tests.zoo.known import KNOWN, OTHER_BITS, known, refusal
from tests.zoo.runs import WAYS, Ran, fits, run_many, verdict

IN_SHORT = (  # the others in `make soak`
    *("one", "replicas-3", "zero1-2", "lanes-1", "pipeline-2", "stage-threads-1"),
    *("small-buckets-2", "local-2", "server-3", "same-bits-2", "same-bits-pipeline-2"),
)


def ways(pattern: str = "") -> list[ParameterSet]:
    return [
        pytest.param(way, marks=[] if way in IN_SHORT else [pytest.mark.soak])
        for way in WAYS
        if way.startswith(pattern)
    ]


def deadly() -> list[ParameterSet]:
    """Cells that end a process."""
    found = [(kind, way) for way in WAYS for kind in KINDS if fits(kind, way) and dies(kind, way)]
    return [
        pytest.param(kind, way, marks=[] if way in ("zero1-2", "lanes-1") else [pytest.mark.soak])
        for kind, way in found
    ]


def dies(kind: str, way: str) -> bool:
    entry = known(kind, way)
    return entry is not None and entry.dies


def agrees(kind: str, way: str) -> bool:
    return not (refusal(kind, way) or known(kind, way))


def train_all(kinds: list[str], way: str) -> dict[str, list[Ran]]:
    """By kind, how the ranks fared."""
    by_rank = run_ranks(run_many, WAYS[way].processes, kinds, way, deadline=110)
    return {kind: [ran[kind] for ran in by_rank] for kind in kinds}


@pytest.mark.capability("A2", "A11", "Z2")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ways())
def test_every_kind_ends_where_a_plain_loop_does(way: str) -> None:
    kinds = [kind for kind in KINDS if fits(kind, way) and not dies(kind, way)]
    found = {kind: verdict(kind, way, rans) for kind, rans in train_all(kinds, way).items()}
    for kind in [kind for kind in kinds if refusal(kind, way)]:
        said = found.pop(kind)
        assert said.startswith("refused:") and refusal(kind, way) in said, (kind, said)
    wrong = {kind: said for kind, said in found.items() if said and not known(kind, way)}
    assert not wrong
    mended = [kind for kind, said in found.items() if not said and known(kind, way)]
    assert not mended, "these agree now: take them out of KNOWN"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind, way", deadly())
def test_a_cell_that_ended_a_process_is_still_wrong(kind: str, way: str) -> None:
    try:
        by_rank = run_ranks(run_many, WAYS[way].processes, [kind], way, deadline=120, group_deadline=60)
    except RanksFailed:
        return
    said = verdict(kind, way, [ran[kind] for ran in by_rank])
    assert said, "it agrees now: take it out of KNOWN"


@pytest.mark.capability("N2")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", [way for way in ways("same-bits-") if way.values[0] != "same-bits-1"])
def test_reproducible_runs_have_the_bits_of_one_process(way: str) -> None:
    kinds = [k for k in KINDS if fits(k, way) and agrees(k, way) and agrees(k, "same-bits-1")]
    alone, spread = train_all(kinds, "same-bits-1"), train_all(kinds, way)
    apart = [k for k in kinds if max(ran.end.distance(alone[k][0].end) for ran in spread[k]) > 0.0]
    assert apart == [k for k in kinds if any(entry.covers(k, way) for entry in OTHER_BITS)]


def test_every_known_mistake_has_a_cell() -> None:
    for entry in KNOWN:
        assert any(entry.covers(kind, way) and fits(kind, way) for kind in KINDS for way in WAYS), entry
