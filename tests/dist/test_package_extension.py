"""A codec and a sink are added to the package itself with one new file and one line each."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.launch.actors import as_users_have_it

ROOT = Path(__file__).parents[2]

CODEC = '''
"""A float16 number for each value."""

import torch


class HalfCodec:
    needs_error_feedback, ragged, block = True, False, 1

    def num_bytes(self, num_values):
        return 2 * num_values

    def encode(self, x, keys, workspace):
        return x.to(torch.float16).contiguous().view(torch.uint8)

    def decode(self, payload, out, keys, workspace):
        out.copy_(payload.clone().view(torch.float16))


def half(argument):
    return HalfCodec()
'''
SINK = '''
"""A file with the loss of every step."""


class LossFileSink:
    def __init__(self, path):
        self.file = path.open("w")

    def step(self, stats):
        self.file.write(f"{stats.step} {stats.loss!r}\\n")

    def event(self, name, record):
        pass

    def close(self):
        self.file.close()


def loss_file(site, argument):
    return LossFileSink(site.run_dir / "losses.txt")
'''


def add_line(path: Path, table: str, line: str) -> None:
    """Insert one line at the head of a table of specs."""
    text = path.read_text()
    changed, count = re.subn(rf"^({table}\b.*\()$", rf"\1\n    {line}", text, flags=re.MULTILINE)
    assert count == 1 and changed.count("\n") == text.count("\n") + 1
    path.write_text(changed)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with two files and two lines more."""
    source = tmp_path_factory.mktemp("source")
    package = source / "paceline"
    shutil.copytree(ROOT / "src" / "paceline", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "comm" / "codecs" / "half.py").write_text(CODEC)
    (package / "observe" / "loss_file.py").write_text(SINK)
    registry = package / "recipe" / "registry"
    build = "paceline.comm.codecs.half:half"
    add_line(
        registry / "codec_specs.py",
        "CODEC_SPECS",
        f'CodecSpec(word="half", summary="float16", build="{build}"),',
    )
    build = "paceline.observe.loss_file:loss_file"
    add_line(
        registry / "sink_specs.py",
        "SINK_SPECS",
        f'SinkSpec(word="losses", summary="losses.txt", build="{build}"),',
    )
    return source


def run(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=source,
        env={**as_users_have_it(), "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.soak
@pytest.mark.capability("Z1")
@pytest.mark.timeout(400)
def test_the_package_trains_with_a_codec_and_a_sink_of_one_file_and_one_line_each(source: Path) -> None:
    settings = ("steps=3", "epochs=", "options.hidden=[16]", "run_dir=run", "log.sinks=['jsonl', 'losses']")
    strategy = ("--strategy", "replicas=2 codec=half")
    recipe = str(ROOT / "recipes" / "digits.toml")
    done = run(source, "train", recipe, "-n", "2", *strategy, *(w for s in settings for w in ("--set", s)))
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (source / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    assert len(steps) == 3
    assert (source / "run" / "losses.txt").read_text() == "".join(
        f"{s['step']} {s['loss']!r}\n" for s in steps
    )
    assert not (source / "run" / "log.txt").exists()  # `text` is not among the sinks
    (start,) = (record for record in records if record["event"] == "run")
    assert "codec=half" in start["strategy"]


@pytest.mark.capability("Z1")
def test_the_new_words_are_listed(source: Path) -> None:
    listed = run(source, "strategies", "--json")
    assert listed.returncode == 0, listed.stderr
    assert {row["name"]: row["supported"] for row in json.loads(listed.stdout)}["codec=half"]
    shown = run(
        source,
        "recipe",
        "show",
        str(ROOT / "recipes" / "digits.toml"),
        "--set",
        "log.sinks=['jsonl', 'loss']",
    )
    assert shown.returncode == 2 and 'did you mean "losses"?' in shown.stderr
