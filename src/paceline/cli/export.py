"""`paceline export`: write the weights of a run to a safetensors file, or its model for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli import common_options
from paceline.cli.console import print_plain
from paceline.errors import RecipeError, format_count


def export(
    run: Annotated[
        Path, typer.Argument(help="A run folder, or a checkpoint inside one.", show_default=False)
    ],
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            help="The file to write, *.safetensors; with --format hf a new folder.",
            show_default=False,
        ),
    ],
    weights: common_options.WeightsOf = None,
    kind: Annotated[
        Literal["safetensors", "hf"],
        typer.Option(
            "--format",
            help="hf: a folder for from_pretrained of transformers; it runs the task's build function.",
        ),
    ] = "safetensors",
    task: Annotated[
        str | None,
        typer.Option(help='With --format hf: a task in place of the recipe\'s, "file.py:function".'),
    ] = None,
    trust: common_options.Trust = False,
) -> None:
    """Write the parameters and buffers of a run to a safetensors file.

    They come from the newest valid checkpoint, or from the checkpoint that is named; RUN/checkpoints/best is
    the best one by evaluation.
    """
    if kind == "hf":
        _export_hugging_face(run, to, weights, task, trust)
        return
    if task is not None or trust:
        raise RecipeError(
            "--task and --trust have no effect without --format hf: no code of the task runs",
            next_step="leave them out, or add --format hf",
        )
    _export_safetensors(run, to, weights)


def _export_safetensors(run: Path, to: Path, weights: Literal["average", "last"] | None) -> None:
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
    if written.masks is not None:
        print_plain(f"{written.masks}: masks, under which {written.num_masked:,} values are zero")
    print_plain(f"to start a training from them: paceline train RECIPE --set init_from={written.path}")


def _export_hugging_face(
    run: Path, to: Path, weights: Literal["average", "last"] | None, task: str | None, trust: bool
) -> None:
    from paceline.cli.resume import find_recipe, require_own_run
    from paceline.session.hugging_face_export import export_hugging_face

    find_recipe(run)
    require_own_run(run, trust)
    done = export_hugging_face(run, to, weights=weights, task=task, warn=print_plain)
    print_plain(f"{done.path}: {done.model} of {done.checkpoint}")
    if done.left_out:
        names = ", ".join(done.left_out[:3]) + (", ..." if len(done.left_out) > 3 else "")
        count = format_count(len(done.left_out), "tensor")
        print_plain(f"not written, since they are not part of that model: {count} ({names})")
    if done.tokenizer is None:
        print_plain("no tokenizer files: neither init_from nor options.tokenizer names a folder with them")
    else:
        print_plain(f"tokenizer files from {done.tokenizer}")
