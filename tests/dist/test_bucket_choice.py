"""`runtime.bucket_latency` in a session: links are measured, ranks agree, a run that goes on keeps to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.comm.link_profile import LinkModel, LinkProfile
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import build_session
from paceline.testing import run_ranks
from paceline.testing.parity import make_task
from paceline.tuning.bucket_choice import MIN_BUCKET_BYTES


def chosen(cluster: Cluster, recipe: Recipe) -> tuple[Recipe, list[str]]:
    said: list[str] = []
    session = build_session(recipe, make_task(recipe), cluster, torch.device("cpu"), warn=said.append)
    found = session.recipe
    session.close()
    return found, [text for text in said if text.startswith("buckets: ")]


@pytest.mark.capability("G10")
def test_links_are_measured_ranks_agree_and_a_run_that_goes_on_keeps_to_it() -> None:
    most = 1 << 24
    recipe = Recipe(
        task="digits",
        steps=1,
        strategy="replicas=2 route=native",
        runtime={"bucket_latency": 0.5, "bucket_bytes": most},
    )
    (first, said), (second, _) = run_ranks(chosen, 2, recipe)
    assert first == second and MIN_BUCKET_BYTES <= first.runtime.bucket_bytes <= most
    assert len(said) == 1 and "measured in" in said[0] and f"{first.runtime.bucket_bytes:,} bytes" in said[0]
    (again, silence), _ = run_ranks(chosen, 2, first)
    assert again.runtime == first.runtime and silence == []


@pytest.mark.capability("G10")
def test_links_that_are_known_are_not_measured(tmp_path: Path) -> None:
    LinkProfile(("h0", "h1"), (), LinkModel(5e-4, 8e-8, 0.0, ())).save(tmp_path / "links.json")
    runtime = {"bucket_latency": 0.05, "link_profile": str(tmp_path / "links.json")}
    recipe = Recipe(task="digits", steps=1, strategy="replicas=2 route=native", runtime=runtime)
    (first, said), _ = run_ranks(chosen, 2, recipe)
    assert first.runtime.bucket_bytes == 1 << 18 and "links.json" in said[0]
    assert run_ranks(chosen, 2, first)[0] == (first, [])
