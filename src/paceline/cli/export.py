"""`paceline export`: write the weights of a run to a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.console import print_plain
from paceline.errors import format_count


def export(
    run: Annotated[
        Path, typer.Argument(help="A run folder, or a checkpoint inside one.", show_default=False)
    ],
    to: Annotated[Path, typer.Option("--to", help="The file to write, *.safetensors.", show_default=False)],
    weights: Annotated[
        Literal["average", "last"] | None,
        typer.Option(
            help="Which weights, if the run keeps an average of them. Default: the average.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the parameters and buffers of a run to a safetensors file.

    They come from the newest valid checkpoint, or from the checkpoint that is named; RUN/checkpoints/best is
    the best one by evaluation.
    """
    from paceline.checkpoint.model_weights import export_weights, find_checkpoint
    from paceline.cli.resume import find_recipe
    from paceline.recipe.recipe_loading import load_recipe
    from paceline.session.checkpointing import checkpoint_files

    folder = find_recipe(run).parent
    name = None if run.resolve() == folder.resolve() else run.name
    files = checkpoint_files(load_recipe(folder / "recipe.toml"), folder)
    written = export_weights(find_checkpoint(files, print_plain, name), to, weights)
    print_plain(
        f"{written.path}: {format_count(written.num_tensors, 'tensor')}, {written.num_values:,} values,"
        f" step {written.step}"
    )
    print_plain(f"to start a training from them: paceline train RECIPE --set init_from={written.path}")
