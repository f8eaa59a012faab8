"""Export for transformers: `from_pretrained` reads the folder, and gives the logits of the trained model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline import Loss, Task, train
from paceline.cli.export import export
from paceline.data.tokenizer import train_bpe
from paceline.errors import CheckpointError, RecipeError, TaskError
from paceline.recipe import Recipe
from paceline.session.hugging_face_export import export_hugging_face

transformers = pytest.importorskip("transformers")
DATA = [(torch.arange(9) + i) % 50 for i in range(16)]


def gpt2() -> nn.Module:
    """A model whose output layer is its embedding."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
    )


class Wrapped(nn.Module):
    """A model of transformers with a layer of the user beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Linear(1, 1)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids)


def task_of(make: Callable[[], nn.Module]) -> Callable[[], Task]:
    def build() -> Task:
        def loss(model: nn.Module, tokens: torch.Tensor) -> Loss:
            out = model(input_ids=tokens[:, :-1]).logits
            total = F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            return Loss(total, tokens[:, 1:].numel())

        return Task(make(), DATA, loss)

    return build


def trained(folder: Path, build: Callable[[], Task], **keys: Any) -> Any:
    recipe = Recipe(steps=3, batch={"size": 8}, run_dir=str(folder), precision={"compute": "fp32"}, **keys)
    result = train(recipe, build)
    assert result.model is not None
    return result.model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.stack(DATA[:3])).logits


@pytest.mark.parametrize("make", [gpt2, llama])
def test_from_pretrained_gives_the_logits_of_the_trained_model(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    model = trained(tmp_path / "run", task_of(make))
    done = export_hugging_face(tmp_path / "run", tmp_path / "hf", task=task_of(make))
    assert (done.model, done.tokenizer, done.left_out) == (type(model).__name__, None, ())
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(read) is type(model) and torch.equal(logits(read), logits(model))
    assert not torch.equal(logits(read), logits(make().eval()))
    with pytest.raises(CheckpointError, match="it exists"):
        export_hugging_face(tmp_path / "run", tmp_path / "hf", task=task_of(make))
    assert {path.name for path in tmp_path.iterdir()} == {"run", "hf"}


def test_a_folder_that_was_the_start_gives_its_tokenizer_and_an_average_is_written(tmp_path: Path) -> None:
    start = tmp_path / "start"
    gpt2().save_pretrained(start)
    train_bpe(["an apple a day"], 260, start / "tokenizer.json")
    (start / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    build = task_of(gpt2)
    model = trained(tmp_path / "run", build, init_from=str(start), average={"decay": 0.5})
    done = export_hugging_face(tmp_path / "run", tmp_path / "last", weights="last", task=build)
    assert done.tokenizer == str(start)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "last" / name).read_bytes() == (start / name).read_bytes()
    export_hugging_face(tmp_path / "run", tmp_path / "average", task=build)
    read = {
        name: logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval())
        for name in ("start", "last", "average")
    }
    assert torch.equal(read["last"], logits(model)) or torch.equal(read["average"], logits(model))
    assert len({value.sum().item() for value in read.values()}) == 3
    # `start` is no folder of this package, so what reads ours reads any
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "last")
    assert again("an apple")["input_ids"]


def build_wrapped() -> Task:
    return task_of(lambda: Wrapped(gpt2()))()


def test_a_wrapped_model_is_found_and_what_is_not_part_of_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = task_of(lambda: Wrapped(gpt2()))
    model = trained(tmp_path / "run", build)
    done = export_hugging_face(tmp_path / "run", tmp_path / "hf", task=build)
    assert done.left_out == ("scale.weight", "scale.bias")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert torch.equal(logits(read), logits(model))
    export(tmp_path / "run", tmp_path / "again", kind="hf", task=f"{__file__}:build_wrapped")
    printed = capsys.readouterr().out
    assert "2 tensors (scale.weight, scale.bias)" in printed and "no tokenizer files" in printed
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "again")]
    assert weights[0] == weights[1]
    with pytest.raises(RecipeError, match="no effect without --format hf"):
        export(tmp_path / "run", tmp_path / "m.safetensors", task="a.py:build")


def test_a_model_that_is_not_of_transformers_is_refused(tmp_path: Path) -> None:
    def build() -> Task:
        return Task(
            nn.Linear(3, 1), torch.randn(8, 3), lambda model, x: Loss(model(x).square().sum(), len(x))
        )

    trained(tmp_path / "run", build)
    with pytest.raises(TaskError, match="found none") as caught:
        export_hugging_face(tmp_path / "run", tmp_path / "hf", task=build)
    assert "safetensors" in caught.value.next_step and not (tmp_path / "hf").exists()
