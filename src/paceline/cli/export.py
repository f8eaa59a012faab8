"""`paceline export`: the weights of a run as a file that any program reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.console import output


def export(
    run: Annotated[
        Path, typer.Argument(help="A run folder, or a checkpoint inside one.", show_default=False)
    ],
    to: Annotated[Path, typer.Option("--to", help="The file to write, *.safetensors.", show_default=False)],
    weights: Annotated[
        Literal["average", "last"] | None,
        typer.Option(help="Of a run with an average: which. Default: the average.", show_default=False),
    ] = None,
) -> None:
    """Write parameters and buffers of the newest valid checkpoint, or of the one that is named.

    RUN/checkpoints/best names the best one by evaluation.
    """
    from paceline.checkpoint.model_weights import export_weights, find_checkpoint
    from paceline.cli.resume import find_recipe
    from paceline.recipe.recipe_loading import load_recipe
    from paceline.session.checkpointing import checkpoint_files

    folder = find_recipe(run).parent

    def say(text: str) -> None:
        output().print(text, markup=False, highlight=False, soft_wrap=True)

    name = None if run.resolve() == folder.resolve() else run.name
    files = checkpoint_files(load_recipe(folder / "recipe.toml"), folder)
    done = export_weights(find_checkpoint(files, say, name), to, weights)
    say(f"{done.path}: {done.num_tensors} tensors, {done.num_values:,} values, step {done.step}")
    say(f"go on from them: paceline train RECIPE --set init_from={done.path}")
