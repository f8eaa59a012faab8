"""A run folder is code: that of another user runs only for who says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hostile.jobs import end_of, prepare, start

pytestmark = [pytest.mark.capability("N13"), pytest.mark.timeout(240)]


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_the_run_of_another_user_asks_for_trust(tmp_path: Path) -> None:
    prepare(tmp_path)
    with start(tmp_path, "train", "recipe.toml") as process:
        assert end_of(process).code == 0
    for words in (("train", "--resume", "run", "--set", "steps=8"), ("verify", "run", "--steps", "1")):
        (tmp_path / "building-0").unlink()
        os.chown(tmp_path / "run" / "recipe.toml", 65534, 65534)
        with start(tmp_path, *words) as process:
            end = end_of(process)
        assert end.code == 2 and "the run belongs to another user (65534)" in end.err, end.err
        assert not (tmp_path / "building-0").exists(), "its code was run"
        with start(tmp_path, *words, "--trust") as process:
            end = end_of(process)
        assert end.code == 0, end.err
