"""Weights as a file: every name of the state dict, nothing damaged, nothing of another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from paceline.checkpoint.model_weights import export_weights, find_checkpoint
from paceline.checkpoint.pretrained import load_weights
from paceline.checkpoint.storage import StorageFolder
from paceline.data.tokenizer import ByteTokenizer, train_bpe, vocabulary_of
from paceline.errors import CheckpointError
from paceline.parallel.sharded_model import unsharded_model
from paceline.recipe import Recipe
from paceline.session import train
from paceline.state.train_state import TrainState
from paceline.testing.parity import make_task
from tests.recipes import recipe_of
from tests.unit.checkpoint.states import flip_bit, save
from tests.web import serving

pytestmark = pytest.mark.capability("W6")


class Tied(nn.Module):
    """An output layer that is the embedding, statistics, a scalar, and a scratch buffer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 6, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def exported(folder: Path, model: nn.Module) -> Path:
    state = TrainState(unsharded_model(model), torch.optim.SGD(model.parameters(), lr=0.1), step=7)
    save(folder / "checkpoints", state)
    path = folder / "model.safetensors"
    done = export_weights(find_checkpoint(StorageFolder(str(folder / "checkpoints")), print), path)
    assert (done.step, done.num_values) == (7, 24 + 4 * 4 + 1)
    return path


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


def test_tied_weights_have_all_their_names_and_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    path = exported(tmp_path, model)
    assert load_file(path).keys() == model.state_dict().keys()
    plain, ours = Tied(), Tied()
    plain.load_state_dict(load_file(path), strict=True)
    load_weights(ours, path)
    assert equal(plain, model) and equal(ours, model) and not equal(Tied(), model)
    assert ours.out.weight is ours.embed.weight


@pytest.mark.parametrize("kept", ["embed.weight", "out.weight"])
def test_of_tied_weights_one_name_is_enough_in_files_of_others(kept: str, tmp_path: Path) -> None:
    model = Tied()
    values = {name: t for name, t in model.state_dict().items() if not name.endswith("d.weight")}
    values.pop("out.weight")
    save_file(values | {kept: model.embed.weight.detach()}, tmp_path / "model.safetensors")
    other = Tied()
    load_weights(other, tmp_path)  # a folder, as others publish them
    assert equal(other, model)


def test_a_folder_of_several_files_with_an_index(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    for name, value in model.state_dict().items():
        save_file({name: value}, tmp_path / f"part-{name}.safetensors")
    table = {name: f"part-{name}.safetensors" for name in model.state_dict()}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    other = nn.Linear(3, 2)
    load_weights(other, tmp_path)
    assert equal(other, model)
    (tmp_path / "part-bias.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        load_weights(other, tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="no weight_map"):
        load_weights(other, tmp_path)


def test_one_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = exported(tmp_path, Tied())
    flip_bit(path)
    with pytest.raises(CheckpointError, match="damaged: SHA-256"):
        load_weights(Tied(), path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        load_weights(Tied(), path)


def test_the_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    path = exported(tmp_path, Tied())
    with pytest.raises(CheckpointError, match=r"weight has the shape \[6, 4\], the model's has \[6, 5\]"):
        load_weights(Tied(5), path)
    with pytest.raises(CheckpointError, match="weight is missing"):
        load_weights(nn.Linear(4, 6), path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported(tmp_path, Tied())
    before, found = path.read_bytes(), find_checkpoint(StorageFolder(str(tmp_path / "checkpoints")), print)

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export_weights(found, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.glob("*.safetensors*")] + [*tmp_path.glob(".*")] == [path.name]


def test_a_run_begins_with_them_and_does_not_need_them_when_it_goes_on(tmp_path: Path) -> None:
    recipe = Recipe(
        task="digits",
        options={"model": "mlp", "hidden": [8]},
        steps=1,
        optimizer={"lr": 0.0},
        run_dir=str(tmp_path),
    )
    path = tmp_path / "mlp.safetensors"
    save_file({n: torch.full_like(t, 0.5) for n, t in make_task(recipe).model.state_dict().items()}, path)
    first = recipe.replace(init_from=str(path))
    train(first)
    found = find_checkpoint(StorageFolder(str(tmp_path / "checkpoints")), print)
    assert all((value == 0.5).all() for value in found.tensors.values())
    path.unlink()
    assert train(first.replace(steps=2), resume=tmp_path).steps == 2
    assert str(path) in (tmp_path / "recipe.toml").read_text()
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        train(first)


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


def gpt_recipe(folder: Path, tokenizer: Path) -> Recipe:
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(TEXTS[0] * 40)
    options = {"text": [str(folder / "*.txt")], "tokenizer": str(tokenizer), "held_out": 0.5}
    options |= {"context": 8, "layers": 1, "heads": 1, "width": 8, "sample_tokens": 0}
    return recipe_of(task="byte-gpt", batch={"size": 2}, options=options, precision={"compute": "fp32"})


def test_checkpoints_and_exports_know_their_vocabulary(folders: tuple[Path, Path], tmp_path: Path) -> None:
    right, wrong = (gpt_recipe(tmp_path, folder) for folder in folders)
    run, path = tmp_path / "run", tmp_path / "alone" / "model.safetensors"
    train(right.replace(run_dir=str(run)))
    export_weights(find_checkpoint(StorageFolder(str(run / "checkpoints")), print), path)
    train(right.replace(run_dir=str(tmp_path / "second"), init_from=str(path)))
    with pytest.raises(CheckpointError, match="is not the one that these weights"):
        train(wrong.replace(run_dir=str(tmp_path / "third"), init_from=str(path)))
    (folders[0] / "tokenizer.json").write_text((folders[1] / "tokenizer.json").read_text())
    with pytest.raises(CheckpointError, match="is not the one that these weights"):
        train(right.replace(run_dir=str(run), steps=2), resume=run)
