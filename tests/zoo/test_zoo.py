"""Models that users bring, under every strategy, end where a plain loop ends that knows nothing of Paceline.

A cell is a kind (`kinds.py`) with a way (`runs.py`). Its plain loop (`plain.py`) trains virtual shards one
after another and makes one update a step; losses, parameters and buffers agree within rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from paceline.testing import run_ranks
from tests.zoo.kinds import KINDS
from tests.zoo.refused import refusal
from tests.zoo.runs import WAYS, Ran, fits, run_many, verdict

FAMILIES = (  # `make test` runs every kind in one way of each, `make soak` in all ways
    ("replicas-3", "small-buckets-2", "zero1-2", "zero3-2", "local-2", "server-3"),
    ("one", "lanes-1", "pipeline-2", "pipeline-1f1b-2", "pipeline-zero-bubble-2", "stage-threads-1"),
    ("same-bits-2", "same-bits-pipeline-2", "same-bits-zero1-2"),
)
SAMPLED = [way for family in FAMILIES for way in family]
SAME_BITS = [way for way in WAYS if way.startswith("same-bits-") and way != "same-bits-1"]


def kinds_of(way: str, *, sampled: bool) -> list[str]:
    """The kinds that go with a way; of those that go with a family, its share."""
    going = [kind for kind in KINDS if fits(kind, way)]
    if not sampled:
        return going
    family = next(family for family in FAMILIES if way in family)
    shares = {kind: [w for w in family if fits(kind, w)] for kind in going}
    return [
        kind for k, kind in enumerate(KINDS) if kind in shares and way == shares[kind][k % len(shares[kind])]
    ]


def train_all(kinds: list[str], way: str) -> dict[str, list[Ran]]:
    """By kind, how the ranks fared."""
    by_rank = run_ranks(run_many, WAYS[way].processes, kinds, way)
    return {kind: [ran[kind] for ran in by_rank] for kind in kinds}


def check(kinds: list[str], way: str) -> None:
    """Each ends where its plain loop does, or is refused as `REFUSED` says; with the bits of one process."""
    rans = train_all(kinds, way)
    found = {kind: verdict(kind, way, rans[kind]) for kind in kinds}
    for kind in [kind for kind in kinds if refusal(kind, way)]:
        said = found.pop(kind)
        assert said.startswith("refused:") and refusal(kind, way) in said, (kind, said)
    assert not {kind: said for kind, said in found.items() if said}
    if way in SAME_BITS:
        check_bits(rans, way)


def check_bits(rans: Mapping[str, Sequence[Ran]], way: str) -> None:
    """Each that agrees has the bits of one process."""
    kinds = [k for k in rans if not refusal(k, way) and not refusal(k, "same-bits-1")]
    alone = train_all(kinds, "same-bits-1")
    assert not [k for k in kinds if max(ran.end.distance(alone[k][0].end) for ran in rans[k]) > 0.0]


@pytest.mark.capability("A2", "A11", "N2", "Z2")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", SAMPLED)
def test_a_share_of_the_kinds_ends_where_a_plain_loop_does(way: str) -> None:
    check(kinds_of(way, sampled=True), way)


@pytest.mark.soak
@pytest.mark.capability("A2", "A11", "N2", "Z2")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_every_kind_ends_where_a_plain_loop_does(way: str) -> None:
    check(kinds_of(way, sampled=False), way)


def test_every_kind_is_in_the_sample_of_every_family_that_it_goes_with() -> None:
    for family in FAMILIES:
        sampled = [kind for way in family for kind in kinds_of(way, sampled=True)]
        assert sorted(sampled) == sorted({kind for way in family for kind in kinds_of(way, sampled=False)})
