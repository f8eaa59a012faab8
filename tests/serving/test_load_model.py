"""Models and tokenizers of runs, exports and Hugging Face folders; what does not fit is refused."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.data.tokenizer import train_bpe
from paceline.errors import CheckpointError, PacelineError
from paceline.models.gpt import GPT
from paceline.serving import GenerationRequest, SamplingOptions, build_engine
from paceline.serving.answers import Answer, encode_prompt
from paceline.serving.kv_cache import SlotSettings
from paceline.serving.load_model import ServedModel, load_served_model, plan_slots
from tests import commands

PROMPT = "import a"


def text_of(served: ServedModel, num_tokens: int = 12) -> str:
    """Return the likeliest continuation."""
    engine = build_engine(served.model, context=served.context, slots=2)
    tokens = encode_prompt(served, PROMPT)
    request = GenerationRequest(tokens, num_tokens, SamplingOptions(temperature=0.0))
    answer, text = Answer(served, request), ""
    engine.submit(request)
    while not engine.is_idle:
        text += "".join(part.text for event in engine.step() if (part := answer.push(event)))
    return text


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is that of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            return line.endswith(".safetensors")
    return False


@pytest.mark.capability("W6", clause="a run, a checkpoint and an export; mapped, without doubling memory")
def test_a_run_a_checkpoint_and_an_export_are_the_same_model(gpt_run: Path, tmp_path: Path) -> None:
    export = tmp_path / "gpt.safetensors"
    assert commands.run(tmp_path, "export", gpt_run, "--to", export).returncode == 0
    places = (gpt_run, *(gpt_run / "checkpoints" / name for name in ("step-00000010", "best")), export)
    models = [load_served_model(place) for place in places]
    texts = {text_of(served) for served in models}
    assert len(texts) == 1 and len(texts.pop()) == 12
    for served in models:
        assert isinstance(served.model, GPT) and served.context == 128 and served.vocab_size == 256
        assert served.model.head.weight is served.model.embed.weight
        assert all(is_mapped(p) for p in served.model.parameters())
    forward: Any = build_engine(models[1].model, context=100, slots=3, chunk=16).forward
    rows = forward.settings.rows  # that all slots compute the same bits may need more than 3
    planned = plan_slots(models[0].model, SlotSettings(3, 16, 100, rows=rows))
    assert planned.cache == forward.cache.num_bytes


def damaged(gpt_run: Path, tmp_path: Path, offset_from_end: int) -> Path:
    """Return a copy of a run in which one byte of the weights is another one."""
    copy = tmp_path / "copy"
    shutil.copytree(gpt_run, copy)
    (file,) = (copy / "checkpoints" / "step-00000010").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-offset_from_end] ^= 1
    file.write_bytes(data)
    return copy


@pytest.mark.capability("W6", clause="bad checksums refused")
def test_damage_and_values_that_are_not_finite_are_refused_by_name(gpt_run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no valid checkpoint"):
        load_served_model(damaged(gpt_run, tmp_path, 100))
    export = tmp_path / "gpt.safetensors"
    commands.run(tmp_path, "export", gpt_run, "--to", export)
    good = export.read_bytes()
    export.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    with pytest.raises(CheckpointError, match="damaged: SHA-256"):
        load_served_model(export)
    # With a valid checksum of values that are no numbers: training would have written them like that.
    from safetensors import safe_open

    export.write_bytes(good)
    tensors = load_file(export)
    with safe_open(export, "pt") as file:
        header = {key: value for key, value in file.metadata().items() if key != "values_sha256"}
    tensors["blocks.1.attention.qkv.weight"][3, 5] = torch.nan
    save_file(tensors, export, header)
    with pytest.raises(
        CheckpointError, match=r"1 value of 3072 in blocks\.1\.attention\.qkv\.weight are NaN"
    ):
        load_served_model(export)


def byte_level(folder: Path, num_tokens: int) -> Path:
    train_bpe([Path(__file__).read_text()], num_tokens, folder / "tokenizer.json")
    return folder / "tokenizer.json"


@pytest.mark.capability("W6", clause="another model's tokenizer refused")
def test_a_tokenizer_of_others_is_refused(gpt_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs paceline[text]")
    with pytest.raises(
        CheckpointError, match="tokenizer is not the one that these weights were trained with"
    ):
        load_served_model(gpt_run, tokenizer=str(byte_level(tmp_path, 270)))


def hugging_face(folder: Path, kind: str, vocab_size: int = 300) -> Any:
    """Write a folder as `save_pretrained` does, with random weights; returns the model."""
    transformers = pytest.importorskip("transformers", reason="needs paceline[hf]")
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    if kind != "GPT2":
        sizes |= {"intermediate_size": 48, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    name = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel", "Qwen2": "Qwen2ForCausalLM"}[kind]
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(folder)
    byte_level(folder, 280)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return model


@pytest.mark.capability("W6", clause="Hugging Face folders, offline")
@pytest.mark.parametrize("kind", ("Llama", "GPT2", "Qwen2"))
def test_a_folder_of_transformers_needs_no_network(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hugging_face(tmp_path, kind)

    def refuse(*args: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    warnings: list[str] = []
    served = load_served_model(tmp_path, warn=warnings.append)
    assert (served.context, served.vocab_size, served.tokenizer.end_tokens) == (64, 300, {0})
    assert "no checksum (model.safetensors)" in warnings[0]
    tokens = list(encode_prompt(served, PROMPT))
    for _ in range(12):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    expected = served.tokenizer.decode(tokens)
    assert PROMPT + text_of(served) == expected


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A vocabulary larger than the output layer, an unknown end token, a missing tensor, a wrong checksum."""

    def refusal(place: Path) -> str:
        with pytest.raises(PacelineError) as refused:
            load_served_model(place)
        return str(refused.value)

    hugging_face(tmp_path / "a", "Llama", vocab_size=270)
    assert "the tokenizer has 280 tokens, and the output layer 270 rows" in refusal(tmp_path / "a")
    hugging_face(folder := tmp_path / "b", "Llama")
    good = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps({**json.loads(good), "eos_token_id": 299}))
    (folder / "generation_config.json").unlink()
    assert "ends a text with token 299, and the tokenizer, of 280 tokens, has none" in refusal(folder)
    (folder / "config.json").write_text(good)
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    assert "is damaged: SHA-256" in refusal(folder)
    (folder / "SHA256SUMS").unlink()
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].fill_(torch.inf)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight are NaN or infinite" in refusal(folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "lack 1 tensor of LlamaForCausalLM, first model.layers.1.mlp.up_proj.weight" in refusal(folder)
    assert "does not exist" in refusal(tmp_path / "none")
    assert "neither recipe.toml nor config.json" in refusal(tmp_path)
