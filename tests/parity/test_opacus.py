"""DP-SGD of Paceline and Opacus is one rule, where Opacus is installed."""

from __future__ import annotations

import pytest

from benchmarks import private

pytest.importorskip("dp_accounting", reason="needs paceline[private]")
pytest.importorskip("opacus", reason="needs Opacus: pip install opacus")


def test_without_noise_steps_are_those_of_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.opacus_peer import MODES, OpacusRun

    task, noise, samples = private.task_of(private.build_mlp, 0), 1e-6, private.SAMPLES
    start = private.weights_of(task.model)
    ours = private.PacelineRun(task, 3, noise, samples)
    sides = [
        OpacusRun(private.task_of(private.build_mlp, 0), mode, noise=noise, expected=samples)
        for mode in MODES
    ]
    # The twin: another clip.
    monkeypatch.setattr(private, "CLIP", 0.8)
    sides.append(OpacusRun(private.task_of(private.build_mlp, 0), "hooks", noise=noise, expected=samples))
    for run in (ours, *sides):
        for _ in range(3):
            run.step()
    weights = private.weights_of(ours.model)
    *apart, twin = [float((weights - private.weights_of(side.model)).norm()) for side in sides]
    assert max(apart) < 1e-5 and twin > 1e-2 and (weights - start).norm() > 0.1
