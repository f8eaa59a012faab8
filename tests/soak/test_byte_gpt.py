"""The main job, to its end: `make soak`. A minute and a half on two idle cores."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.capability("V9", "A1")
@pytest.mark.timeout(900)
def test_the_byte_gpt_beats_the_trigram_on_text_it_never_saw(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        "recipes/byte-gpt.toml",
        "--set",
        f"run_dir={tmp_path}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"bits per byte: model ([\d.]+) \| unigram ([\d.]+) \| trigram ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    model, unigram, trigram = map(float, found.groups())
    assert model < trigram - 0.2 < unigram
