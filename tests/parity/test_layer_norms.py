"""Norms of whole tensors from parts: each element counted once, one call, equal bits; and the wrong form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.optim import ByGroup, Lamb, slot_norms
from paceline.session.model_setup import build_slot_group
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from paceline.testing.planted_faults import PLANTED_FAULTS
from paceline.verification import VerificationReport, compare_with_oracle
from tests.contract.test_optimizers import TestLamb as Lambs
from tests.contract.test_optimizers import TestLars as Larses

LAYOUTS = {
    2: ("replicas=2", "replicas=1 shard=2 zero=2", "replicas=1 shard=2 zero=3", "replicas=1 tensor=2"),
    4: ("replicas=2 tensor=2", "replicas=1 shard=2 zero=1 tensor=2", "replicas=1 tensor=2 pipeline=2"),
}


def norms(cluster: Cluster, strategy: str) -> tuple[dict[str, float], int, int, float]:
    """Return norms by name, calls and bytes of the second measurement, and its sum by rows."""
    session = build_test_session(cluster, Lambs().recipe(strategy), Lambs().task)
    group = build_slot_group(session.session_base.context, session.runner.sharded_model)
    values = {slot: p.detach() for slot, p in session.runner.sharded_model.updates.items()}
    before = {key: (row.calls, row.payload_bytes) for key, row in session.net.ledger.rows.items()}
    found, doubled = slot_norms([values, {slot: 2 * x for slot, x in values.items()}], group)
    rows = {key: (row.calls, row.payload_bytes) for key, row in session.net.ledger.rows.items()}
    calls = sum(rows[key][0] - before.get(key, (0, 0))[0] for key in rows)
    num_bytes = sum(rows[key][1] - before.get(key, (0, 0))[1] for key in rows)
    assert all(torch.equal(doubled[slot], 2 * found[slot]) for slot in found)
    (by_row,) = slot_norms([values], replace(group, by_row=True))
    gap = max(float((by_row[slot] / found[slot] - 1).abs()) for slot in found)
    session.close()
    return {slot.name: float(norm) for slot, norm in found.items()}, calls, num_bytes, gap


@pytest.mark.capability("J5")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_element_is_counted_once_in_one_call_with_equal_bits(num_ranks: int) -> None:
    right = {name: float(p.detach().norm()) for name, p in Lambs().task().model.named_parameters()}

    def measure(cluster: Cluster) -> list[tuple[dict[str, float], int, int, float]]:
        return [norms(cluster, strategy) for strategy in LAYOUTS[num_ranks]]

    for strategy, *ranks in zip(LAYOUTS[num_ranks], *run_ranks(measure, num_ranks), strict=True):
        seen: dict[str, float] = {}
        for found, calls, num_bytes, gap in ranks:
            assert found == pytest.approx({name: right[name] for name in found}, rel=1e-14)
            assert all(seen.setdefault(name, norm) == norm for name, norm in found.items()), strategy
            assert calls == (0 if strategy == "replicas=2" else 1) and num_bytes <= 2 * 4 * 8 * len(right)
            assert gap < 1e-15
        assert seen.keys() == right.keys()


@pytest.mark.capability("J5", "Z2")
@pytest.mark.parametrize("kind", [Lambs, Larses])
def test_verify_names_a_norm_per_shard(kind: type[Any]) -> None:
    contract, components = kind(), PLANTED_FAULTS["norm-per-shard"].components(2)

    def verify(cluster: Cluster) -> list[VerificationReport]:
        return [
            compare_with_oracle(
                contract.recipe(strategy), contract.task(), cluster, CPU, 3, components=components
            )
            for strategy in LAYOUTS[2]
        ]

    for reports in run_ranks(verify, 2):
        harmless, *others = reports
        assert harmless.ok  # tensors are whole
        for report in others:
            assert report.diagnosis is not None
            assert report.diagnosis.cause == "norm per shard", report.diagnosis


def test_several_servers_are_refused_by_name() -> None:
    def refusal(cluster: Cluster) -> str:
        try:
            build_test_session(cluster, Lambs().recipe("servers=2 sync=server"), Lambs().task)
        except StrategyError as error:
            return error.what
        return ""

    for text in run_ranks(refusal, 4):
        assert text.startswith("Lamb needs norms or sums of whole tensors")


class Lonely(Lambs):
    """A `ByGroup` whose second member has one tensor of one row, of which most ranks hold nothing."""

    build = staticmethod(
        lambda model: ByGroup(
            torch.optim.AdamW(model[0].parameters(), lr=0.01), Lamb([model[4].weight], lr=0.1, eps=1e-3)
        )
    )
    options: ClassVar[Mapping[str, Any]] = {}


def test_a_rank_without_a_part_takes_part_in_the_sums() -> None:
    """Within the deadline, and with the values of one process."""

    def ends(cluster: Cluster) -> list[Any]:
        layouts = ("replicas=1 shard=3 zero=1", "replicas=1 shard=3 zero=3")
        return [Lonely().train(cluster, layout) for layout in layouts]

    right = Lonely().train(Cluster.single(), "replicas=1")
    assert isinstance(right, dict)
    parameters = {name: t for name, t in right.items() if name.startswith("model/")}
    for found in run_ranks(ends, 3):
        assert all(Lonely().distance(end, parameters) < 1e-12 for end in found)
    assert not torch.equal(right["model/4.weight"], nn.Linear(10, 1).weight)
