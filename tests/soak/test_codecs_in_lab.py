"""The comparison of codecs at three bandwidths: steps on such links are as long as is foretold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab import Lab
from paceline.studies.codec_lab import BANDWIDTHS
from tests.commands import run
from tests.soak.test_sync_choice import Job

FACTOR = 4.0  # on a busy machine, where coded buckets also wait for the processor


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.capability("H9", clause="step time at 3 simulated bandwidths")
def test_steps_at_three_bandwidths_are_as_long_as_foretold(lab: Callable[..., Lab], tmp_path: Path) -> None:
    # Backward takes 0.1 s, in which gradients of 1.2 MB leave: sending decides at the slowest rate only.
    Job(8, 0, 0.1, 0.0, 512, ()).write(tmp_path / "job")
    words = ("--recipe", "job/recipe.toml", "--codecs", "int8,topk:0.01", "--seeds", "1", "--lab", "--json")
    done = run(tmp_path, "bench", "comm", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {float(bits): rows for bits, rows in json.loads(done.stdout).items()}
    (tmp_path / "found.json").write_text(done.stdout)
    assert tuple(found) == BANDWIDTHS
    rows = {(bits, row["codec"]): row for bits, table in found.items() for row in table}
    for (bits, codec), row in rows.items():
        # Foretold on the fastest link for the rate of this one. On the slowest link the probe of the link
        # itself foretells it, too; on a faster one it measures how busy this machine is.
        foretold = [rows[BANDWIDTHS[0], codec]["step_seconds"][BANDWIDTHS.index(bits)]]
        foretold += [row["expected_seconds"]] if bits == BANDWIDTHS[-1] else []
        for expected in foretold:
            assert 1 / FACTOR < row["measured_seconds"] / expected < FACTOR, (bits, codec, row, foretold)
    # On the slowest link the order is that of the bytes.
    plain, int8, top = (rows[BANDWIDTHS[-1], c]["measured_seconds"] for c in ("fp32", "int8", "topk:0.01"))
    assert plain > int8 > top
    assert plain > 3 * rows[BANDWIDTHS[0], "fp32"]["measured_seconds"]
