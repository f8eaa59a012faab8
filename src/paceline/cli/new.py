"""`paceline new`: write a model, a recipe and a test for the user to edit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import print_plain
from paceline.errors import RunFolderError

_MODEL = '''\
"""Model, data and loss. `build` returns the task; its arguments are [options] in recipe.toml."""

import torch
from torch import nn
from torch.nn import functional as F

from paceline import Loss, Task


def load_samples(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of a point and the ring that it lies on. Replace it by your own data."""
    generator = torch.Generator().manual_seed(0)
    angle, noise = torch.rand(2, count, generator=generator)
    ring = torch.arange(count) % 2
    radius = 1 + ring + 0.3 * noise
    points = torch.stack([radius * torch.cos(6.2832 * angle), radius * torch.sin(6.2832 * angle)], dim=1)
    return list(zip(points, ring, strict=True))


def build(width: int = 32) -> Task:
    """Return the task. Every process calls this, with the same random numbers."""
    samples = load_samples(2304)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
        points, ring = batch
        out = model(points)
        right = (out.argmax(-1) == ring).sum()
        # The sum over the samples and their number: so the mean is right for any number of processes.
        return Loss(F.cross_entropy(out, ring, reduction="sum"), len(ring), {"accuracy": right})

    return Task(model, data=samples[:2048], loss=loss, held_out=samples[2048:])
'''

_RECIPE = """\
# paceline train recipe.toml            trains on one process
# paceline train recipe.toml -n 2       on two, with the same result
# paceline recipe show recipe.toml      prints every key with its meaning

task = "model.py:build"
steps = 200

[options]  # arguments of build
width = 32

[batch]
size = 64

[optimizer]
name = "adamw"
lr = 1e-2

[evaluate]
every_steps = 50

[runtime]
threads = 1  # enough for a small model; remove it for a larger one
"""

_TEST = '''\
"""The model learns, and two processes compute what one does. Run it with `pytest`."""

from pathlib import Path

import paceline

RECIPE = Path(__file__).with_name("recipe.toml")


def test_the_model_learns(tmp_path: Path) -> None:
    recipe = paceline.load_recipe(RECIPE, ["steps=100", f"run_dir='{tmp_path / 'run'}'"])
    result = paceline.train(recipe, base_dir=RECIPE.parent)
    assert result.evaluation is not None
    assert result.evaluation.metrics["accuracy"] > 0.9


def test_two_processes_compute_what_one_does() -> None:
    recipe = paceline.load_recipe(RECIPE, strategy="replicas=2")
    assert paceline.verify(recipe, base_dir=RECIPE.parent, processes=2, steps=3).ok
'''


def new(
    folder: Annotated[
        Path,
        typer.Argument(metavar="NAME", help="The folder to create, by name or path.", show_default=False),
    ],
) -> None:
    """Write a model, a recipe and a test for you to edit to a new folder."""
    files = render_files(folder.resolve().name)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunFolderError(
                f"'{folder}' exists", next_step="choose another name; `paceline new` overwrites nothing"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as stream:  # fails if the file exists
                stream.write(text)
    except OSError as error:
        raise RunFolderError(
            f"cannot write the files: {error.strerror}",
            where=str(error.filename or folder),
            next_step="choose a folder that you may write to, on a disk with space",
        ) from error
    print_plain(f"wrote {', '.join(str(folder / name) for name in files)}")
    print_plain(f"train: paceline train {folder / 'recipe.toml'}")
    print_plain(f"test:  pytest {folder}")


def render_files(name: str) -> dict[str, str]:
    """Return the texts of the files of a new folder, by file name.

    Args:
        name: of the folder. The test is named after it, because pytest wants different names.
    """
    word = re.sub(r"\W+", "_", name)
    return {"model.py": _MODEL, "recipe.toml": _RECIPE, f"test_{word}.py": _TEST}
