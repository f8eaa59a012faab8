"""`codec=auto` in sessions: ranks agree, only what is allowed is taken, the folder would keep the answer."""

from __future__ import annotations

from functools import partial

import pytest

from paceline.job.cluster import Cluster
from paceline.session.build import build_session
from paceline.studies.codec_report import CodecComparison, render_codec_table, report_codecs
from paceline.tasks import load_task
from paceline.testing.parity import CPU
from paceline.testing.rank_processes import run_ranks
from tests.recipes import recipe_of

digits_recipe = partial(recipe_of, task="digits", steps=2, options={"model": "mlp", "hidden": [64]})


@pytest.mark.capability("H9", clause="bytes and loss gap; times are computed from one measurement")
def test_a_report_of_a_task_has_ratio_losses_and_steps_of_every_codec() -> None:
    def run(cluster: Cluster) -> list[CodecComparison]:
        recipe = digits_recipe("replicas=2").replace(precision={"compute": "fp32"})
        return report_codecs(recipe, cluster, ["int8", "topk:0.01"], [1, 2])

    first, second = run_ranks(run, 2)
    assert first == second
    plain, int8, top = first
    assert (plain.codec, plain.ratio, plain.gap, plain.break_even) == ("fp32", 1.0, 0.0, 0.0)
    assert 2.5 < int8.ratio < 4 and int8.ratio < top.ratio and abs(int8.gap) < abs(top.gap)
    for row in first:
        fast, medium, slow = row.step_seconds
        assert 0 < fast <= medium <= slow and len(row.losses) == 2 and row.losses[0] != row.losses[1]
    head, *lines = render_codec_table(first)
    assert "ms at 10 Mbit/s" in head and len(lines) == 3 and {"spread", "bandwidths"} <= top.record().keys()


@pytest.mark.capability("H9", clause="the break-even bandwidth")
def test_ranks_agree_on_a_codec_and_train_with_it(tmp_path) -> None:
    def run(cluster: Cluster) -> list[tuple[str, str, float, list[str]]]:
        found = []
        for words in ("route=native codec=auto:int8,topk:0.01", "codec=auto:int8", "route=native codec=auto"):
            recipe = digits_recipe(f"replicas=2 {words}")
            task = load_task("digits", dict(recipe.options), recipe.seed, tmp_path, tmp_path)
            said: list[str] = []
            session = build_session(recipe, task, cluster, CPU, warn=said.append)
            codec = session.recipe.strategy.codec
            assert codec == session.strategy.codec
            records = dict(session.events.take())
            loss = [stats.loss for stats in session.rounds()][-1]
            session.close()
            line = next(text for text in said if text.startswith("codec: "))
            found.append((codec, line, loss, sorted(records["codec"])))
        return found

    first, second = run_ranks(run, 2)
    assert first == second
    measured, shared, alone = first
    assert measured[0] in ("fp32", "int8", "topk:0.01") and "break-even bandwidth: int8 " in measured[1]
    assert shared[0] == "fp32" and "share the memory of one host" in shared[1]
    assert alone[0] in ("fp32", "lossless") and "lossless " in alone[1]
    assert measured[3] == sorted(
        ["codec", "reason", "compute_seconds", "bits_per_second", "step_seconds", "break_even"]
    )
