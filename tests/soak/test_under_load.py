"""Ten minutes of training on a machine that is busier than it can be: nobody is taken for lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.hostile.jobs import end_of, prepare, start

MINUTES = 10
BURN = "while True: pass"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(processes):
            burner = stack.enter_context(subprocess.Popen([sys.executable, "-c", BURN]))
            stack.callback(burner.kill)
        yield


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.capability("N5", clause="ten minutes under load without a false alarm")
def test_ten_minutes_under_load_raise_no_alarm(tmp_path: Path) -> None:
    """A busy process for each core; steps wait a little, so that their number gives the time."""
    prepare(tmp_path)
    steps = MINUTES * 60 * 5
    words = {"steps": steps, "options.pause": 0.2, "checkpoint.every_steps": steps // 4}
    changes = [word for key, value in words.items() for word in ("--set", f"{key}={value}")]
    with busy(os.cpu_count() or 1), start(tmp_path, "train", "recipe.toml", "-n", "2", *changes) as job:
        try:
            end = end_of(job, seconds=2400)
        finally:
            job.kill()
    assert end.code == 0, end.err
    assert "stopped" not in end.err and "lost" not in end.err and "goes on" not in end.err
    assert f"step {steps}/{steps}" in end.out + end.err
