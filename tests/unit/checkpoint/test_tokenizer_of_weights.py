"""Weights are not trained on with another model's tokenizer, even if the two have as many tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from paceline.checkpoint.model_weights import export_weights, find_checkpoint
from paceline.checkpoint.pretrained import load_weights
from paceline.checkpoint.storage import StorageFolder
from paceline.data.tokenizer import ByteTokenizer, train_bpe, vocabulary_of
from paceline.errors import CheckpointError
from paceline.recipe import Recipe
from paceline.session import train
from tests.web import serving

pytestmark = pytest.mark.capability("W6")

TEXTS = ("abc abx aby " * 9, "xyz xzy yzx " * 9)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of one model, each with a tokenizer of 260 tokens, and the weights in the first."""
    found = []
    for name, text in zip("ab", TEXTS, strict=True):
        folder = tmp_path / name
        tokenizer = train_bpe([text], 260, folder / "tokenizer.json")
        assert tokenizer.vocab_size == 260
        found.append(folder)
    save_model(nn.Linear(2, 2), str(found[0] / "model.safetensors"))
    return found[0], found[1]


def vocabulary_in(folder: Path) -> str:
    return vocabulary_of((folder / "tokenizer.json").read_text())


@pytest.mark.parametrize("place", ["folder", "file", "http"])
def test_a_tokenizer_beside_the_weights_is_compared(place: str, folders: tuple[Path, Path]) -> None:
    right, wrong = folders
    with serving(right) as web:
        where = {"folder": str(right), "file": str(right / "model.safetensors"), "http": web.url}[place]
        for vocabulary in (vocabulary_in(right), ""):
            load_weights(nn.Linear(2, 2), where, vocabulary=vocabulary)
        for vocabulary in (vocabulary_in(wrong), ByteTokenizer.vocabulary):
            model = nn.Linear(2, 2)
            before = model.weight.detach().clone()
            with pytest.raises(CheckpointError, match="is not the one that these weights") as error:
                load_weights(model, where, vocabulary=vocabulary)
            assert error.value.next_step and torch.equal(model.weight, before)


def test_it_is_the_vocabulary_and_not_the_file_that_is_compared(folders: tuple[Path, Path]) -> None:
    text = (folders[0] / "tokenizer.json").read_text()
    found = json.loads(text)
    other = dict(reversed(found.items())) | {"truncation": {"max_length": 3}}
    other["model"] = {**found["model"], "merges": [" ".join(pair) for pair in found["model"]["merges"]]}
    assert vocabulary_of(json.dumps(other)) == vocabulary_of(text)
    pieces = dict(found["model"]["vocab"])
    pieces["a"], pieces["b"] = pieces["b"], pieces["a"]
    swapped = {**found, "model": {**found["model"], "vocab": pieces}}
    fewer = {**found, "added_tokens": []}
    assert len({vocabulary_of(json.dumps(one)) for one in (found, swapped)}) == 2
    assert vocabulary_of(json.dumps(fewer)) == vocabulary_of(text)  # the piece is in the vocabulary too
    for broken in ("[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}, "added_tokens": [1]}'):
        with pytest.raises(ValueError, match=r"no tokenizer\.json"):
            vocabulary_of(broken)


def recipe_of(folder: Path, tokenizer: Path) -> Recipe:
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(TEXTS[0] * 40)
    options = {"text": [str(folder / "*.txt")], "tokenizer": str(tokenizer), "held_out": 0.5}
    options |= {"context": 8, "layers": 1, "heads": 1, "width": 8, "sample_tokens": 0}
    settings: dict[str, Any] = {"task": "byte-gpt", "steps": 1, "batch": {"size": 2}, "options": options}
    return Recipe(**settings, precision={"compute": "fp32"})


def test_checkpoints_and_exports_know_their_vocabulary(folders: tuple[Path, Path], tmp_path: Path) -> None:
    right, wrong = (recipe_of(tmp_path, folder) for folder in folders)
    run, path = tmp_path / "run", tmp_path / "alone" / "model.safetensors"
    train(right.replace(run_dir=str(run)))
    export_weights(find_checkpoint(StorageFolder(str(run / "checkpoints")), print), path)
    train(right.replace(run_dir=str(tmp_path / "second"), init_from=str(path)))
    with pytest.raises(CheckpointError, match="is not the one that these weights"):
        train(wrong.replace(run_dir=str(tmp_path / "third"), init_from=str(path)))
    (folders[0] / "tokenizer.json").write_text((folders[1] / "tokenizer.json").read_text())
    with pytest.raises(CheckpointError, match="is not the one that these weights"):
        train(right.replace(run_dir=str(run), steps=2), resume=run)
