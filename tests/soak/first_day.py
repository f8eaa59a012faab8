"""The walk of a first day: what a newcomer types, in one folder, and what it prints.

`python -m tests.soak.first_day` writes docs/first-day.md anew; `test_first_day.py` runs the same.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.job.cluster import process_environment

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "first_day"
PAGE = ROOT / "docs" / "first-day.md"

_SHOWN = 12
"""Lines at the beginning and at the end of an output that the page has."""

CELLS = (
    "import paceline\nfrom models import cnn\n"
    "recipe = paceline.Recipe(steps=60, batch={'size': 32, 'shards': 2})",
    "result = paceline.train(recipe, cnn, processes=2)",
    "result = paceline.train(recipe, cnn, processes=2)",
    "print(f\"accuracy {result.evaluation.metrics['alike.accuracy']:.2f}, {type(result.model).__name__}\")",
)


class Step(NamedTuple):
    """A command, or a notebook.

    Args:
        title: what the newcomer wants.
        command: the words after `paceline`, or after `python` if the first is a script.
        shows: what its output has to hold.
    """

    title: str
    command: str
    shows: str


STEPS = (
    Step(
        "Train a CNN on two processes, with early stopping",
        "train cnn.toml -n 2",
        "early-stop:",
    ),
    Step("Compare it with one process", "verify cnn.toml -n 2 --steps 5", "verified"),
    Step("Train an LSTM on padded sequences", "train lstm.toml -n 2", "epoch 8/8"),
    Step(
        "Verify it with a sharded optimizer state",
        'verify lstm.toml -n 2 --strategy "shard=2 zero=1" --steps 5',
        "verified",
    ),
    Step("Train a GPT-2 of Hugging Face from a config", "train gpt2.toml -n 2", "step 60/60"),
    Step(
        "Verify it with all state sharded",
        'verify gpt2.toml -n 2 --strategy "shard=2 zero=3" --steps 5',
        "verified",
    ),
    Step("Train a BERT of Hugging Face", "train bert.toml -n 2", "step 60/60"),
    Step("Train on a stream of unknown length", "train stream.toml -n 2", "the data is a stream"),
    Step("Verify the stream", "verify stream.toml -n 2 --steps 5", "verified"),
    Step("Your own loop with two updates per step", "run -n 2 gan.py", "300 steps; the generator's middle"),
    Step(
        "Verify both updates",
        "verify gan.toml -n 2 --steps 5 --loop gan.py:train_loop",
        "verified",
    ),
    Step(
        "Export the best weights of the CNN",
        "export runs/cnn/checkpoints/best --to cnn.safetensors",
        "tensors",
    ),
    Step("Predict with plain PyTorch", "predict.py", "right"),
    Step(
        "Evaluate the best weights on all held-out sets",
        "evaluate runs/cnn/checkpoints/best",
        "noisy.accuracy",
    ),
    Step(
        "Evaluate on noisier images",
        "evaluate runs/cnn --data models.py:stripes --option noise=1.5 --option seed=3 --json",
        '"accuracy"',
    ),
    Step("Predict on new images", "predict runs/cnn models.py:unseen", "3  1"),
)


class Done(NamedTuple):
    """A step, and what it printed."""

    step: Step
    code: int
    output: str


def walk(folder: Path) -> Iterator[Done]:
    """Take all steps in a folder; the last is a notebook."""
    shutil.copytree(FILES, folder, dirs_exist_ok=True)
    for step in STEPS:
        yield Done(step, *_run(step.command, folder))
    (folder / "notebook.py").write_text(_NOTEBOOK.format(cells=CELLS))
    code, output = _run("notebook.py", folder)
    yield Done(Step("A notebook that runs a cell twice", "\n".join(CELLS), "accuracy"), code, output)


_NOTEBOOK = """
import nbclient, nbformat, traitlets.config
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in {cells!r}])
config = traitlets.config.Config(KernelManager=dict(transport="ipc"))
nbclient.NotebookClient(book, timeout=600, config=config).execute()
for cell in book.cells:
    for out in cell.outputs:
        print(out.get("text", ""), end="")
"""


def _run(command: str, folder: Path) -> tuple[int, str]:
    words = _words(command)
    line = (
        [sys.executable, *words] if words[0].endswith(".py") else [sys.executable, "-m", "paceline", *words]
    )
    done = subprocess.run(
        line,
        cwd=folder,
        env={**process_environment(), "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    return done.returncode, done.stdout.replace(f"{folder}/", "")


def _words(command: str) -> list[str]:
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', command)]


def page(done: list[Done]) -> str:
    """The page of a walk."""
    lines = [
        "# A first day",
        "",
        "The commands of a first day in the folder [examples/first_day](../examples/first_day), with their"
        f" output ({platform.machine()}, two shared cores). `pip install 'paceline[walk]'` installs"
        " transformers and nbclient.",
        "`python -m tests.soak.first_day` writes this page, and `make soak` runs the same commands.",
    ]
    for one in done:
        command = one.step.command
        shown = (
            command
            if "\n" in command
            else ("python " if _words(command)[0].endswith(".py") else "paceline ") + command
        )
        kind = "python" if "\n" in command else ""
        lines += [
            "",
            f"## {one.step.title}",
            "",
            f"```{kind}",
            shown,
            "```",
            "",
            "```",
            _seen(one.output),
            "```",
        ]
    return "\n".join(lines) + "\n"


def _seen(output: str) -> str:
    """As a reader sees it: of a line that is written over, the last state; of a long table, both ends."""
    lines = [line.split("\r")[-1].rstrip() for line in output.rstrip("\n").split("\n")]
    left_out = len(lines) - 2 * _SHOWN
    if left_out > 1:
        lines[_SHOWN:-_SHOWN] = [f"... {left_out} lines ..."]
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = list(walk(Path(folder)))
    wrong = [one for one in found if one.code or one.step.shows not in one.output]
    for one in wrong:
        sys.stderr.write(f"{one.step.command}: {one.code}\n{one.output}\n")
    if wrong:
        sys.exit(1)
    PAGE.write_text(page(found), encoding="utf-8")
