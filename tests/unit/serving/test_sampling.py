"""Sampling: filters as in transformers, keyed draws, and the window of the penalty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as peers

from paceline.errors import RequestError
from paceline.serving import sampling
from paceline.serving.sampling import SamplingOptions, draw_token, draw_uniform, sample, token_chances

V = 50


def random_logits(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.random.default_rng(seed).standard_normal(V) * 2).astype(np.float32)


def options(**chosen: Any) -> SamplingOptions:
    return SamplingOptions(**{"temperature": 1.0, "top_p": 1.0, **chosen})


FILTERS = [
    options(),
    options(temperature=0.5),
    options(temperature=1.7),
    options(top_k=7),
    options(top_p=0.6),
    options(min_p=0.1),
    options(temperature=1.4, top_k=20, top_p=0.8, min_p=0.05, repeat_penalty=1.5),
]


def chances_of_transformers(logits: Any, text: list[int], chosen: SamplingOptions) -> torch.Tensor:
    """Return the distribution of transformers' processors, in the order of its `generate`."""
    processors = [
        peers.RepetitionPenaltyLogitsProcessor(chosen.repeat_penalty),
        peers.TemperatureLogitsWarper(chosen.temperature),
        *([peers.TopKLogitsWarper(chosen.top_k)] if chosen.top_k else []),
        *([peers.TopPLogitsWarper(chosen.top_p)] if chosen.top_p < 1 else []),
        *([peers.MinPLogitsWarper(chosen.min_p)] if chosen.min_p else []),
    ]
    scores = torch.from_numpy(logits).double()[None]
    for processor in processors:
        scores = processor(torch.tensor([text]), scores)
    return scores[0].softmax(-1)


@pytest.mark.capability("W1")
@pytest.mark.parametrize("chosen", FILTERS, ids=str)
def test_every_filter_has_the_distribution_of_transformers(chosen: SamplingOptions) -> None:
    text = [3, 3, 11, 40]
    for seed in range(5):
        logits = random_logits(seed)
        expected = chances_of_transformers(logits, text, chosen)
        penalised = sampling.penalise_repeats(logits.astype(np.float64), text, chosen.repeat_penalty)
        chances = torch.from_numpy(token_chances(penalised, chosen))
        torch.testing.assert_close(chances / chances.sum(), expected, rtol=1e-9, atol=1e-12)
    # Draws at 20,000 positions have it, too.
    counts = np.zeros(V)
    for position in range(20_000):
        counts[draw_token(chances.numpy(), draw_uniform(5, 0, position))] += 1
    assert 0.5 * np.abs(counts / counts.sum() - expected.numpy()).sum() < 0.025
    assert not counts[expected.numpy() == 0].any()


@pytest.mark.capability("W1")
def test_temperature_0_takes_the_largest_logit_and_the_first_of_equal_ones() -> None:
    logits = random_logits(1)
    logits[[20, 9, 30]] = logits.max() + 1
    assert sample(logits, [1], SamplingOptions(temperature=0.0, seed=4)).token == 9
    assert {sample(logits, [1] * n, options(temperature=1e-3)).token for n in range(60)} == {9, 20, 30}
    assert sample(logits, [1], options(top_k=3, top_p=1e-9)).token == 9


def test_a_draw_depends_on_seed_sample_and_position_alone() -> None:
    base = draw_uniform(1, 0, 5)
    assert 0 <= base < 1 and base == draw_uniform(1, 0, 5)
    assert len({base, draw_uniform(2, 0, 5), draw_uniform(1, 1, 5), draw_uniform(1, 0, 6)}) == 4
    assert draw_uniform(2**64 - 1, 0, 0) != draw_uniform(0, 0, 0)


Window = Callable[[list[int], SamplingOptions], int]


def penalty_of_window_is_right(sample_token: Callable[..., Any]) -> bool:
    """Compare with the definition: tokens of the last n places; positive logits are divided."""
    for length in (1, 3, 4, 9):
        for window in (0, 1, 4, 100):
            text = [(7 * i) % V for i in range(length)]
            logits = np.linspace(-1, 1, V).astype(np.float32)
            logits[text] += 3.0  # all of the text is likelier than the rest, unless it is penalised
            expected = logits.astype(np.float64)
            for token in set(text[max(length - window, 0) :]):
                expected[token] *= 1 / 8 if expected[token] > 0 else 8
            chosen = SamplingOptions(temperature=0.0, repeat_penalty=8.0, repeat_window=window)
            if sample_token(logits, text, chosen).token != int(expected.argmax()):
                return False
    return True


@pytest.mark.capability("W2")
def test_the_penalty_is_that_of_the_last_tokens() -> None:
    assert penalty_of_window_is_right(sample)
    negative = sampling.penalise_repeats(np.array([2.0, -2.0, 5.0]), [0, 1, 1], 2.0)
    assert negative.tolist() == [1.0, -4.0, 5.0]


@pytest.mark.parametrize("wrong", [lambda text, n: text[:n], lambda text, n: text[-n - 1 :]])
def test_a_penalty_over_the_wrong_window_is_found(wrong: Callable[[list[int], int], list[int]]) -> None:
    def twin(logits: Any, text: list[int], chosen: SamplingOptions) -> Any:
        penalised = sampling.penalise_repeats(
            logits.astype(np.float64), wrong(text, chosen.repeat_window), chosen.repeat_penalty
        )
        return sample(penalised.astype(np.float32), text, SamplingOptions(temperature=0.0))

    assert not penalty_of_window_is_right(twin)


def test_logprobs_are_those_of_the_model() -> None:
    logits = random_logits(3)
    expected = torch.from_numpy(logits).double().log_softmax(-1)
    got = sample(logits, [2, 5], SamplingOptions(temperature=1.9, repeat_penalty=1.4, logprobs=3))
    values, tokens = expected.topk(3)
    assert got.logprob == pytest.approx(float(expected[got.token]))
    assert [token for token, _ in got.top_logprobs] == tokens.tolist()
    assert [p for _, p in got.top_logprobs] == pytest.approx(values.tolist())
    assert sample(logits, [2], options()).logprob is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 1e-300},
        {"temperature": True},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": float("inf")},
        {"repeat_penalty": 0.0},
        {"repeat_window": -3},
        {"seed": 2**80},
        {"seed": -1},
        {"seed": 1.5},
        {"logprobs": 21},
    ],
    ids=str,
)
def test_values_out_of_range_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        SamplingOptions(**wrong)
    assert error.value.parameter == next(iter(wrong)) and error.value.parameter in error.value.what


def test_logits_that_are_not_finite_are_refused() -> None:
    for value in (float("nan"), float("inf")):
        logits = random_logits(0)
        logits[4] = value
        with pytest.raises(RequestError, match="logits"):
            sample(logits, [1], SamplingOptions())
