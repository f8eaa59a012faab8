"""The task `byte-gpt`: what is scored, in which micro-batch, and the report."""

import lzma
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from paceline.optim import build_optimizer
from paceline.recipe import OptimizerRecipe, load_recipe
from paceline.task import Task
from paceline.tasks import load_task
from paceline.tasks.byte_gpt import bits_per_byte, measure_baselines, text_bytes, trigram_probabilities

RECIPES = Path(__file__).parents[3] / "recipes"
TINY = {
    "text": "texts",
    "context": 32,
    "layers": 1,
    "heads": 2,
    "width": 32,
    "held_out": 0.3,
    "sample_tokens": 40,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for i in range(4):
        text = "".join(f"line {n} of file {i}: {n * n % 97} über\n" for n in range(150))
        (tmp_path / "texts" / f"{i}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def load(folder: Path, **options: object) -> Task:
    task = load_task("byte-gpt", TINY | options, 1, folder, folder / "cache")
    assert task.initialize is not None
    task.initialize(task.model, 1)
    return task


def evaluate(task: Task) -> float:
    """Mean nats per token over all held-out windows."""
    assert task.held_out is not None
    with torch.no_grad():
        loss = task.loss(task.model, torch.stack([task.held_out[i] for i in range(len(task.held_out))]))
    assert loss.count == task.held_out.num_targets
    return (loss.total / loss.count).item()


def test_targets_are_the_next_tokens(folder: Path) -> None:
    task = load(folder)
    seen: list[torch.Tensor] = []

    class Oracle(torch.nn.Module):
        def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            seen.append(tokens_BT)
            return 50.0 * torch.nn.functional.one_hot(following, 256).float()

    window = task.data[3]
    following = window[None, 1:]
    loss = task.loss(Oracle(), window[None])
    assert torch.equal(seen[0], window[None, :-1])
    assert loss.total.item() < 1e-3
    assert loss.count == 32


def test_training_on_text_beats_the_trigram_of_the_same_held_out_text(folder: Path) -> None:
    task = load(folder)
    optimizer = build_optimizer(task.model, OptimizerRecipe(lr=1e-2), fused_allowed=True)
    for step in range(250):
        batch = torch.stack([task.data[(step * 16 + i) * 7 % len(task.data)] for i in range(16)])
        loss = task.loss(task.model, batch)
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    scored = task.held_out.tokens[1 : task.held_out.num_targets + 1]
    trigram = measure_baselines(task.data.tokens, scored).trigram
    assert evaluate(task) / math.log(2) < trigram


def test_report_scores_the_same_bytes_for_all_and_shows_a_sample(folder: Path) -> None:
    task = load(folder, prompt="line ")
    nats = evaluate(task)
    lines = task.report(task.model, {"loss": nats})
    scored = task.held_out.tokens[1 : task.held_out.num_targets + 1]
    expected = measure_baselines(task.data.tokens, scored)
    assert lines[0].startswith(f"held-out text: {len(scored):,} bytes (1 of 4 files")
    assert lines[1] == (
        f"bits per byte: model {nats / math.log(2):.3f} | unigram {expected.unigram:.3f} | "
        f"trigram {expected.trigram:.3f} | lzma {expected.lzma:.3f}"
    )
    assert lines[2] == "sample:"
    assert lines[3].startswith("line ")
    assert lines == load(folder, prompt="line ").report(task.model, {"loss": nats})
    assert len(load(folder, sample_tokens=0).report(task.model, {"loss": nats})) == 2


def test_report_of_a_part_scores_that_part(folder: Path) -> None:
    task = load(folder)
    lines = task.report(task.model, {"loss": 1.0, "count": 64})
    expected = measure_baselines(task.data.tokens, task.held_out.tokens[1:65])
    assert lines[0].startswith("held-out text: 64 bytes")
    assert f"lzma {expected.lzma:.3f}" in lines[1]


def test_a_sample_has_no_control_characters(folder: Path) -> None:
    text = "".join(load(folder).report(load(folder).model, {"loss": 1.0})[3:])
    assert all(c.isprintable() or c in "\n\t" for c in text)


def test_limits_of_the_text_hold(folder: Path) -> None:
    task = load(folder, train_tokens=200, held_out_tokens=100)
    assert (len(task.data), len(task.held_out)) == (6, 3)


def test_bits_per_byte_do_not_depend_on_the_tokenizer(folder: Path) -> None:
    pytest.importorskip("tokenizers", reason="pip install 'paceline[text]'")
    texts = [path.read_text(encoding="utf-8") for path in sorted((folder / "texts").iterdir())]
    train_bpe(texts, 400, folder / "tokenizer.json")
    by_bytes, by_tokens = load(folder), load(folder, tokenizer="tokenizer.json")
    assert len(by_tokens.held_out.tokens) < len(by_bytes.held_out.tokens) / 2
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    spelled = text_bytes(by_tokens.held_out.tokens, tokenizer)
    np.testing.assert_array_equal(spelled, by_bytes.held_out.tokens)
    assert by_tokens.model.config.vocab == tokenizer.vocab_size
    lines = by_tokens.report(by_tokens.model, {"loss": 2.0})
    scored = text_bytes(by_tokens.held_out.tokens[1 : by_tokens.held_out.num_targets + 1], tokenizer)
    assert f"model {2.0 * by_tokens.held_out.num_targets / len(scored) / math.log(2):.3f}" in lines[1]


def test_bits_per_byte_of_a_uniform_guess_is_eight() -> None:
    assert math.isclose(bits_per_byte(math.log(256), 10, 10), 8.0)
    assert text_bytes(np.array([0, 255], np.uint8), ByteTokenizer()).tolist() == [0, 255]


@pytest.mark.capability("V9")
@pytest.mark.parametrize(
    ("name", "millions"),
    [("byte-gpt", 1.82), ("gpt-10m", 10.7), ("gpt-85m", 85.2), ("gpt-300m", 302.3), ("gpt-1b", 1007.2)],
)
def test_recipes_reach_from_tiny_to_a_billion_parameters(name: str, millions: float, folder: Path) -> None:
    """Each is built without memory, as under every strategy; its strategy goes with its shape."""
    recipe = load_recipe(RECIPES / f"{name}.toml")
    task = load_task(recipe.task, {**recipe.options, "text": "texts"}, 1, folder, folder / "cache")
    assert all(p.is_meta for p in task.model.parameters() if p.dim() > 1)
    assert sum(p.numel() for p in task.model.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)
    assert task.num_tokens_per_sample == recipe.options["context"]


TRAIN = b"the cat sat on the mat and the rat sat on the cat; that was that." * 7
HELD_OUT = b"the bat sat on that mat, and \xff\xfe the rat ate it"


def as_array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def chance(train: bytes, context: bytes, byte: int) -> float:
    """Witten-Bell by its definition: p(c | context) from the followers of the context and of its tail."""
    if not context:
        return (train.count(bytes([byte])) + 1) / (len(train) + 256)
    followers: dict[bytes, Counter] = defaultdict(Counter)
    for i in range(len(train) - len(context)):
        followers[train[i : i + len(context)]][train[i + len(context)]] += 1
    lower = chance(train, context[1:], byte)
    seen = followers[context]
    if not seen:
        return lower
    return (seen[byte] + len(seen) * lower) / (seen.total() + len(seen))


def test_trigram_equals_its_definition() -> None:
    found = trigram_probabilities(as_array(TRAIN), as_array(HELD_OUT))
    expected = [chance(TRAIN, HELD_OUT[max(i - 2, 0) : i], HELD_OUT[i]) for i in range(len(HELD_OUT))]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("context", [b"th", b"\xff\xff", b"e "])
def test_the_chances_of_all_bytes_sum_to_one(context: bytes) -> None:
    texts = [as_array(context + bytes([byte])) for byte in range(256)]
    assert math.isclose(sum(trigram_probabilities(as_array(TRAIN), text)[2] for text in texts), 1.0)


def test_bits_per_byte() -> None:
    found = measure_baselines(as_array(TRAIN), as_array(HELD_OUT))
    unigram = -sum(math.log2(chance(TRAIN, b"", byte)) for byte in HELD_OUT) / len(HELD_OUT)
    assert math.isclose(found.unigram, unigram)
    assert found.lzma == 8 * len(lzma.compress(HELD_OUT)) / len(HELD_OUT)
    assert found.trigram < found.unigram


def test_uniform_noise_costs_eight_bits_and_a_repeated_byte_almost_none() -> None:
    noise = np.random.default_rng(1).integers(256, size=1 << 16, dtype=np.uint8)
    assert 7.99 < measure_baselines(noise[: 1 << 15], noise[1 << 15 :]).unigram < 8.02
    constant = measure_baselines(np.zeros(10**5, np.uint8), np.zeros(10**4, np.uint8))
    assert max(constant.unigram, constant.trigram) < 0.01
