"""A damaged checkpoint is refused before anything is loaded from it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn, optim

from paceline import checkpoint
from paceline.errors import CheckpointError
from paceline.state import TrainState

pytestmark = pytest.mark.capability("N1")


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)


def change_a_digit(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 3', '"step": 7'))


@pytest.mark.parametrize(
    "name, damage",
    [
        ("state.safetensors", flip_bit),
        ("state.safetensors", cut_short),
        ("state.safetensors", Path.unlink),
        ("state.json", cut_short),
        ("state.json", Path.unlink),
        ("state.json", change_a_digit),
        ("state.json", lambda path: path.write_text("[]")),
        ("state.json", lambda path: path.write_bytes(b"\xff\xfe")),
    ],
)
def test_damage_is_refused_before_anything_is_loaded(
    name: str, damage: Callable[[Path], object], tmp_path: Path
) -> None:
    model = nn.Linear(4, 3)
    state = TrainState(model, optim.SGD(model.parameters(), lr=0.1), step=3)
    path = checkpoint.save(tmp_path, state, keep=1)
    damage(path / name)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)
    assert str(path) in caught.value.where
    assert caught.value.next_step
