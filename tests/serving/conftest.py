"""A small GPT that is trained once, and its server as a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import commands
from tests.serving.clients import ServerProcess
from tests.texts import SMALL_TEXT

RECIPE = f"""
task = "byte-gpt"
steps = 10
run_dir = "run"
[options]
text = "{SMALL_TEXT}"
held_out_tokens = 2048
context = 128
layers = 2
heads = 2
width = 32
sample_tokens = 0
[batch]
size = 8
[optimizer]
lr = 1e-2
"""


@pytest.fixture(scope="session")
def gpt_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of byte-gpt."""
    place = tmp_path_factory.mktemp("served")
    (place / "recipe.toml").write_text(RECIPE)
    done = commands.run(place, "train", "recipe.toml")
    assert done.returncode == 0, done.stderr
    return place / "run"


@pytest.fixture(scope="session")
def server(gpt_run: Path) -> Iterator[ServerProcess]:
    """`paceline serve` with 4 slots, which ends well on SIGTERM."""
    pytest.importorskip("uvicorn", reason="needs paceline[serve]")
    with ServerProcess(gpt_run, "--slots", "4") as started:
        yield started
        assert started.stop() == 0, started.communicate()
