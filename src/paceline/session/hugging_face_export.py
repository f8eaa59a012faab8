"""The model of a run as a folder that `from_pretrained` of Hugging Face's transformers reads.

The task's build function runs, because the model's config is known only to the model. Weights and config are
written by `save_pretrained` of the model itself, and tokenizer files are copied from where the run got its
weights or its tokenizer.

Invariant: the folder appears whole or not at all, and an existing one is never changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from paceline.checkpoint.model_weights import WhichWeights
from paceline.checkpoint.pretrained import find_tokenizer_files, require_same_vocabulary
from paceline.data.tokenizer import TOKENIZER_FILE, vocabulary_of
from paceline.errors import CheckpointError, MissingExtraError, TaskError
from paceline.session.arguments import TaskLike
from paceline.session.saved_run import open_run


@dataclass(frozen=True)
class ExportedFolder:
    """The result of an export.

    Args:
        path: of the folder.
        checkpoint: name of the checkpoint of the weights.
        model: class of the model, such as "GPT2LMHeadModel".
        tokenizer: where the tokenizer files were found; None: nowhere, and the folder has none.
        left_out: names of the task's parameters and buffers that are not part of that model.
    """

    path: Path
    checkpoint: str
    model: str
    tokenizer: str | None
    left_out: tuple[str, ...]


def export_hugging_face(
    run: Path,
    to: Path,
    *,
    weights: WhichWeights | None = None,
    task: TaskLike | str | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> ExportedFolder:
    """Write `config.json`, `model.safetensors` and tokenizer files to a new folder.

    Args:
        run: a run folder, or a checkpoint in it.
        to: the folder, which must not exist or be empty.
        weights, task, warn: as for `open_run`.
    Raises:
        MissingExtraError: transformers is not installed.
        TaskError: the task's model does not come from transformers.
        CheckpointError: the folder exists or cannot be written, there is no valid checkpoint, or the
            tokenizer is not the one of the training.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise CheckpointError(
            f"cannot export to '{to}': it exists", next_step="choose a new folder, or remove this one"
        )
    _require_transformers()
    with open_run(run, task, weights=weights, warn=warn) as opened:
        name, model = find_model(opened.task.model)
        prefix = f"{name}." if name else ""
        left_out = tuple(key for key in opened.task.model.state_dict() if not key.startswith(prefix))
        source, tokenizer = find_tokenizer(opened.session.recipe.options, _run_source(run), model)
        if TOKENIZER_FILE in tokenizer:
            vocabulary = vocabulary_of(tokenizer[TOKENIZER_FILE].decode())
            require_same_vocabulary(opened.task.vocabulary or "", vocabulary, str(source))
        with _new_folder(to) as draft:
            model.save_pretrained(draft)
            for file, data in tokenizer.items():
                (draft / file).write_bytes(data)
        return ExportedFolder(to, opened.checkpoint, type(model).__name__, source, left_out)


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "--format hf needs Hugging Face's transformers, which is not installed",
            next_step="pip install 'paceline[hf]'",
        ) from error


def find_model(model: nn.Module) -> tuple[str, Any]:
    """Return the name and the module of the one model of transformers in a task's model, itself included."""
    from transformers import PreTrainedModel

    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        # named_modules yields a module before those inside of it, which are parts of its config
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found[name] = module
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise TaskError(
            f"expected one model of transformers in the task's model, found {names}",
            where=f"the task's model, {type(model).__name__}",
            next_step="use --format safetensors, which writes the weights of any model",
        )
    return next(iter(found.items()))


def _run_source(run: Path) -> str | None:
    """Return the `init_from` of a run."""
    from paceline.recipe.recipe_loading import load_recipe
    from paceline.report.run_files import RECIPE
    from paceline.session.run_folder import run_folder_of

    return load_recipe(run_folder_of(run) / RECIPE).init_from


def find_tokenizer(
    options: dict[str, Any], init_from: str | None, model: Any
) -> tuple[str | None, dict[str, bytes]]:
    """Return the first place with tokenizer files, and the files: the task's own tokenizer before that of the
    first weights.
    """
    from_hub = str(model.config.name_or_path or "")  # where `from_pretrained` of the build function read
    places = [options.get("tokenizer"), init_from, from_hub if Path(from_hub).is_dir() else None]
    for place in places:
        files = find_tokenizer_files(place) if isinstance(place, str) and place else {}
        if files:
            return place, files
    return None, {}


@contextmanager
def _new_folder(to: Path) -> Iterator[Path]:
    """Yield a folder that takes the name `to` when the block has ended well."""
    draft = to.with_name(f".{to.name}.{os.getpid()}")  # next to it: a rename stays in one file system
    try:
        draft.mkdir(parents=True)
        yield draft
        draft.replace(to)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model: {error}", where=str(to), next_step="free space, or choose another place"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
