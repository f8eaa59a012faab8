"""Tokens per second of 1, 8 and 32 texts: the engine on a GPT-2, against transformers and CTranslate2.

All sides have the same weights and prompts, take the largest logit and write equally many tokens; one thread.
The engine attends to the whole cache under a mask, or slot by slot; "usual batch" is the same engine when it
attends to as many positions as the longest text has, which is faster and changes the bits of the others.
CTranslate2 runs the same weights, converted, if it is installed (`pip install ctranslate2`).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Series, Side, take_turns
from benchmarks.report import Options, Report, Table, present, series_data
from paceline.models import GPT, GPTConfig
from paceline.serving import Engine, GenerationRequest, SamplingOptions, build_engine
from paceline.serving.kv_cache import KVCache, SlotSettings
from paceline.serving.slot_forward import CachedForward, model_call

_VOCAB, _CONTEXT, _PROMPT = 2048, 256, 32
_SIZES = {"10 million": (384, 6, 6), "100 million": (768, 12, 12)}
"""Width, layers and heads by name."""
_CTRANSLATE2 = "CTranslate2"
_GREEDY = SamplingOptions(temperature=0.0)


class UsualBatch(KVCache):
    """Cache whose slots all attend to as many positions as the longest text has."""

    def _attend_masked(self, query: Tensor, layer: Any, scale: float | None) -> Tensor:
        stop = max(self._lengths) + 1
        mask = self._mask_S11L[..., :stop]
        return F.scaled_dot_product_attention(
            query, layer.keys[:, :, :stop], layer.values[:, :, :stop], mask, scale=scale
        )


def gpt2(size: str) -> nn.Module:
    """A GPT-2 of transformers with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    width, layers, heads = _SIZES[size]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=_VOCAB,
        n_positions=_CONTEXT,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def own_gpt(size: str) -> nn.Module:
    """Paceline's GPT of this size, with learned positions and biases as in a GPT-2."""
    width, layers, heads = _SIZES[size]
    torch.manual_seed(0)
    return GPT(GPTConfig(_VOCAB, _CONTEXT, layers, heads, width, positions="learned", bias=True)).eval()


def prompts(num_texts: int) -> Tensor:
    """Tokens of the prompts, [texts, 32]."""
    return torch.randint(1, _VOCAB, (num_texts, _PROMPT), generator=torch.Generator().manual_seed(1))


def run_engine(engine: Engine, texts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Continue all texts; returns the sum of the new tokens, so that sides can be compared."""
    tickets = [engine.submit(GenerationRequest(tuple(text), num_tokens, _GREEDY)) for text in texts]
    engine.run()
    return float(sum(sum(ticket.tokens) for ticket in tickets))


def run_transformers(model: nn.Module, texts: Tensor, num_tokens: int) -> float:
    """Continue all texts by transformers' cached generate."""
    with torch.inference_mode():
        found = model.generate(
            texts,
            attention_mask=torch.ones_like(texts),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return float(found[:, _PROMPT:].sum())


def convert_to_ctranslate2(model: Any) -> Any:
    """Return a generator of CTranslate2 with the weights of a GPT-2, in fp32 on one thread."""
    library: Any = importlib.import_module("ctranslate2")
    # The text of a token is its number: no tokenizer is needed.
    tokenizer = SimpleNamespace(get_vocab=lambda: {str(i): i for i in range(_VOCAB)})
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.unk_token = "0"

    class Converter(library.converters.TransformersConverter):
        """Converter of a folder without a tokenizer."""

        def load_tokenizer(self, *args: Any, **options: Any) -> Any:
            return tokenizer

    with TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/model")
        Converter(f"{folder}/model").convert(f"{folder}/converted")
        return library.Generator(
            f"{folder}/converted", compute_type="float32", intra_threads=torch.get_num_threads()
        )


def run_ctranslate2(generator: Any, texts: Sequence[Sequence[str]], num_tokens: int) -> float:
    """Continue all texts in one batch of CTranslate2."""
    found = generator.generate_batch(
        texts,
        max_length=num_tokens,
        min_length=num_tokens,
        sampling_topk=1,
        include_prompt_in_result=False,
        max_batch_size=0,
    )
    return float(sum(sum(result.sequences_ids[0]) for result in found))


def usual_engine(model: nn.Module, slots: int) -> Engine:
    """Return an engine that attends as a usual batch."""
    settings = SlotSettings(slots, _PROMPT, _CONTEXT, "masked")
    forward = CachedForward(model_call(model), model, settings, _VOCAB, "", torch.device("cpu"))
    forward.cache = UsualBatch(settings, torch.device("cpu"), model)
    return Engine(forward)


def sides(size: str, num_texts: int, num_tokens: int) -> list[Side]:
    """All sides for a number of texts."""
    model, texts = gpt2(size), prompts(num_texts)
    lists = texts.tolist()
    build: Callable[..., Engine] = partial(build_engine, context=_CONTEXT, slots=num_texts, chunk=_PROMPT)
    engines = {
        "engine, masked": build(model, attention="masked"),
        "engine, slot by slot": build(model),
        "engine, usual batch": usual_engine(model, num_texts),
        "engine, slot by slot, Paceline's GPT": build(own_gpt(size)),
    }
    peers = [Side("transformers", partial(run_transformers, model, texts, num_tokens))]
    if find_spec("ctranslate2") is not None:
        words = [[str(token) for token in text] for text in lists]
        generator = convert_to_ctranslate2(model)
        peers.append(Side(_CTRANSLATE2, partial(run_ctranslate2, generator, words, num_tokens)))
    return [
        *peers,
        *(Side(name, partial(run_engine, engine, lists, num_tokens)) for name, engine in engines.items()),
    ]


def rates(title: str, found: Sequence[Series], num_tokens: int) -> Table:
    """Tokens per second: as a multiple of transformers ("x tf", by wall and CPU time) and of CTranslate2
    ("x CT2", by CPU time), the CPU time of the usual batch as 1 ("time"), and whether the tokens are equal.
    """
    peer, usual = found[0], next(series for series in found if "usual" in series.name)
    faster = next((series for series in found if series.name == _CTRANSLATE2), None)
    rows = []
    for series in found:
        ordered = sorted(series.seconds)
        rows.append(
            (
                series.name,
                f"{num_tokens / series.median_seconds:,.0f}",
                f"{num_tokens / ordered[-1]:,.0f} .. {num_tokens / ordered[0]:,.0f}",
                f"{num_tokens / min(series.cpu_seconds):,.0f}",
                f"{peer.median_seconds / series.median_seconds:.2f}",
                f"{min(peer.cpu_seconds) / min(series.cpu_seconds):.2f}",
                "" if faster is None else f"{min(faster.cpu_seconds) / min(series.cpu_seconds):.2f}",
                f"{min(series.cpu_seconds) / min(usual.cpu_seconds):.2f}",
                "yes" if series.losses[-1] == peer.losses[-1] else "no",
            )
        )
    columns = (
        "side", "tokens/s", "min .. max", "by CPU", "x tf", "by CPU", "x CT2", "time", "same",
    )  # fmt: skip
    return Table(title, columns, rows)


def measure(options: Options) -> Report:
    """Measure all sizes and numbers of texts."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    cases = [("10 million", 1, 96), ("10 million", 8, 96), ("10 million", 32, 96)]
    cases += [("100 million", 1, 24), ("100 million", 8, 24)]
    if options.quick:
        cases = [("10 million", 2, 4)]
    tables, data = [], {}
    for size, num_texts, num_tokens in cases:
        found = take_turns(
            sides(size, num_texts, num_tokens),
            repeats=1 if options.quick else 5,
            steps=1,
            warmup=1,
            budget_seconds=30.0,
        )
        title = f"{size} parameters, {num_texts} texts of {_PROMPT} + {num_tokens} tokens, context {_CONTEXT}"
        tables.append(rates(title, found, num_texts * num_tokens))
        data[title] = series_data(found)
    absent = "" if find_spec("ctranslate2") else " CTranslate2 is not installed: `pip install ctranslate2`."
    return Report(f"Generated tokens per second, on one thread.{absent}", tables, {"series": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
