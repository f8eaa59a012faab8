"""The task `digits`: classify scikit-learn's 1,797 real 8 x 8 images of handwritten digits."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.errors import MissingExtraError
from paceline.models.convnet import ConvNet
from paceline.models.initialize import InitializeByName, fan_in_rule
from paceline.models.mlp import MLP
from paceline.recipe.validation import RecipeTable
from paceline.state.keys import key
from paceline.task import Loss, Task
from paceline.tasks.task_options import Widths, read_options

_SIDE = 8  # pixels
_NUM_CLASSES = 10
_HELD_OUT_ONE_IN = 6  # 299 of the 1,797 images


class DigitsOptions(RecipeTable):
    """Options of the task `digits`.

    Args:
        model: `hidden` is for the MLP and `channels` for the ConvNet.
        shifts: whether each training image comes also moved by one pixel, up, down, left and right.
    """

    model: Literal["mlp", "convnet"] = "mlp"
    hidden: Widths = (128,)
    channels: int = Field(default=16, ge=1)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    shifts: bool = False


def build(**options: Any) -> Task:
    """Build the task; see `DigitsOptions`. The held-out images are the same for every seed."""
    chosen = read_options(DigitsOptions, options)
    data, held_out = load_digits()
    return Task(
        model=_build_model(chosen),
        data=add_shifts(data) if chosen.shifts else data,
        held_out=held_out,
        loss=cross_entropy,
        stages=_chain,
        tensor={"layers.0": "column", "layers.2": "split", "layers.3": "row"}
        if chosen.model == "mlp"
        else None,
        initialize=InitializeByName(lambda model: fan_in_rule),
        predict=classify,
    )


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Split the images into training and held-out ones by a hash of their index.

    Returns:
        Two sets of (float32 [64] in 0 to 1, int64 class).
    Raises:
        MissingExtraError: scikit-learn, which brings the images, is not installed.
    """
    pixels, classes, held_out = read_digits()
    images, targets, is_held_out = torch.tensor(pixels), torch.tensor(classes), torch.tensor(held_out)
    return (
        TensorDataset(images[~is_held_out], targets[~is_held_out]),
        TensorDataset(images[is_held_out], targets[is_held_out]),
    )


@cache
def read_digits() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """Pixels [N, 64], classes [N] and who is held out [N], read-only; their text is parsed once.

    A process that is forked later may have parsed them: nothing here starts a thread, as PyTorch may.
    """
    table = _read_image_table()
    pixels, classes = table[:, :-1], table[:, -1]
    held_out = [key("digits", "held out", i) % _HELD_OUT_ONE_IN == 0 for i in range(len(pixels))]
    images = pixels.astype(np.float32) / np.float32(16)
    arrays: tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]
    arrays = images, classes.astype(np.int64), np.array(held_out)
    for array in arrays:
        array.setflags(write=False)
    return arrays


def _read_image_table() -> NDArray[np.float64]:
    """Read scikit-learn's file: a row [pixels, class] for each image.

    scikit-learn itself is not imported, which would take most of the time that a short run needs to start.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise MissingExtraError(
            "the task digits needs the images of scikit-learn, which is not installed",
            next_step="pip install 'paceline[digits]'",
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        with gzip.open(path, "rt", encoding="ascii") as file:
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits as load_images  # a version that keeps the images elsewhere

    pixels, classes = load_images(return_X_y=True)
    return np.column_stack([pixels, classes])


def add_shifts(data: TensorDataset) -> TensorDataset:
    """Add to N images their copies moved by one pixel in four directions: 5 N samples."""
    images, targets = data.tensors
    padded = F.pad(images.view(-1, _SIDE, _SIDE), (1, 1, 1, 1))
    offsets = ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))
    shifted = [padded[:, row : row + _SIDE, column : column + _SIDE].flatten(1) for row, column in offsets]
    return TensorDataset(torch.cat(shifted), targets.repeat(len(offsets)))


def cross_entropy(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
    """Sum the cross-entropies of a batch (images, classes), and count what is `correct`."""
    images, targets = batch
    logits = model(images).float()
    total = F.cross_entropy(logits, targets, reduction="sum")
    return Loss(total, len(images), {"accuracy": (logits.argmax(1) == targets).sum()})


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Return the class of each image of a batch (images, classes), or of images alone, int64 [N]."""
    logits: Tensor = model(batch if isinstance(batch, Tensor) else batch[0])
    return logits.argmax(1)


def _chain(model: nn.Module) -> list[nn.Module]:
    return model.chain() if isinstance(model, ConvNet | MLP) else [model]


def _build_model(chosen: DigitsOptions) -> nn.Module:
    if chosen.model == "convnet":
        return ConvNet(chosen.channels, _NUM_CLASSES, dropout=chosen.dropout)
    return MLP(_SIDE**2, chosen.hidden, _NUM_CLASSES, dropout=chosen.dropout)
