"""Sample a token from logits: penalty, temperature, filters, and draws that are keyed instead of streamed.

The order is that of transformers' `generate` (`_get_logits_processor`): repeat penalty, temperature, top-k,
top-p, min-p. Invariant: a draw is a function of (seed, sample index, position), so a text does not depend on
which other texts are sampled, or in which order. All arithmetic is float64 on one row, never on a batch.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError
from paceline.state.keys import key

FloatRow = NDArray[np.float64]
LogitRow = NDArray[np.float32]

MAX_LOGPROBS = 20
_DRAW_SCALE = 2.0**-63  # `key` has 63 bits


@dataclass(frozen=True)
class SamplingOptions:
    """Options of how tokens are chosen.

    Args:
        temperature: divides the logits; 0 always takes the largest logit, of equal ones the first.
        top_k: keep this many largest logits, and those equal to the last of them; 0 keeps all.
        top_p: keep the likeliest tokens that together have this probability.
        min_p: keep tokens with at least this fraction of the largest probability.
        repeat_penalty: logits of recent tokens are divided by it if positive, else multiplied with it; 1
            changes nothing.
        repeat_window: how many of the last tokens are recent, of the prompt and of the text together.
        seed: of the draws, in [0, 2**64).
        logprobs: number of likeliest tokens whose log-probabilities are returned with that of the chosen one;
            None returns none. They are those of the model: before penalty, temperature and filters.
    Raises:
        RequestError: a value is out of range.
    Source: Holtzman et al. 2020, arXiv:1904.09751 (top-p); Nguyen et al. 2024, arXiv:2407.01082 (min-p);
        Keskar et al. 2019, CTRL, arXiv:1909.05858, section 4.1 (penalty).
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.9
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_window: int = 64
    seed: int = 299792458
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(self, "temperature", "0, or from 1e-3 to 1e3", lambda t: t == 0 or 1e-3 <= t <= 1e3)
        _require(self, "top_p", "above 0 and at most 1", lambda p: 0 < p <= 1)
        _require(self, "min_p", "from 0 to 1", lambda p: 0 <= p <= 1)
        _require(self, "repeat_penalty", "from 0.01 to 100", lambda p: 0.01 <= p <= 100)
        _require_int(self, "top_k", 0, 2**31 - 1)
        _require_int(self, "repeat_window", 0, 2**31 - 1)
        _require_int(self, "seed", 0, 2**64 - 1)
        if self.logprobs is not None:
            _require_int(self, "logprobs", 0, MAX_LOGPROBS)


def _require(options: SamplingOptions, name: str, words: str, allowed: Any) -> None:
    value = getattr(options, name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and allowed(value)):
        raise RequestError(f"{name} is {value!r:.40}", parameter=name, next_step=f"give a number {words}")


def _require_int(options: SamplingOptions, name: str, least: int, most: int) -> None:
    value = getattr(options, name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(
            f"{name} is {value!r:.40}", parameter=name, next_step=f"give an integer from {least} to {most}"
        )


class SampledToken(NamedTuple):
    """A chosen token.

    Args:
        token: its number.
        logprob: natural logarithm of its probability under the model; None if it was not requested.
        top_logprobs: the likeliest tokens with theirs, likeliest first.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def sample(
    logits_V: LogitRow, text: Sequence[int], options: SamplingOptions, sample_index: int = 0
) -> SampledToken:
    """Choose the token that follows a text.

    Args:
        logits_V: of the model, float32 [V]; not modified.
        text: all tokens before the new one, of the prompt and generated.
        sample_index: which of several texts of one prompt and seed this is.
    Raises:
        RequestError: a logit is NaN or +inf, or all are -inf.
    """
    largest = logits_V.max()
    if not math.isfinite(largest):
        raise RequestError(
            f"the model's logits at position {len(text)} have the largest value {largest}",
            next_step="check the weights for NaN: paceline generate names the tensor when it loads them",
        )
    token = _choose(logits_V, text, options, sample_index)
    if options.logprobs is None:
        return SampledToken(token)
    shifted_V = logits_V.astype(np.float64) - largest
    logprobs_V = shifted_V - math.log(np.exp(shifted_V).sum())
    # Stable, so that of equal ones the smaller index is first, as at temperature 0.
    likeliest = np.argsort(-logprobs_V, kind="stable")[: options.logprobs]
    return SampledToken(
        token, float(logprobs_V[token]), tuple((int(i), float(logprobs_V[i])) for i in likeliest)
    )


def _choose(logits_V: LogitRow, text: Sequence[int], options: SamplingOptions, sample_index: int) -> int:
    penalised_V: NDArray[Any] = logits_V
    if options.repeat_penalty != 1.0:
        start = max(len(text) - options.repeat_window, 0)
        penalised_V = penalise_repeats(logits_V.astype(np.float64), text[start:], options.repeat_penalty)
    if options.temperature == 0:
        return int(penalised_V.argmax())  # numpy returns the first of equal values
    chances_V = token_chances(penalised_V, options)
    return draw_token(chances_V, draw_uniform(options.seed, sample_index, len(text)))


def penalise_repeats(logits_V: FloatRow, recent: Sequence[int], penalty: float) -> FloatRow:
    """Make tokens that occur in `recent` less likely, in place; once, however often they occur."""
    tokens = np.unique(np.asarray(recent, dtype=np.int64))
    values = logits_V[tokens]
    logits_V[tokens] = np.where(values > 0, values / penalty, values * penalty)
    return logits_V


def token_chances(logits_V: NDArray[Any], options: SamplingOptions) -> FloatRow:
    """Return what each token weighs in the draw, after temperature, top-k, top-p and min-p.

    Returns:
        Probabilities up to a common factor, float64 [V]; 0 for tokens that a filter removes.
    """
    scaled_V = (logits_V.astype(np.float64) - logits_V.max()) / options.temperature
    num_tokens = len(scaled_V)
    if 0 < options.top_k < num_tokens:
        least = np.partition(scaled_V, num_tokens - options.top_k)[num_tokens - options.top_k]
        scaled_V[scaled_V < least] = -np.inf
    chances_V: FloatRow = np.exp(scaled_V)
    if options.top_p < 1.0:
        _keep_top_p(chances_V, options.top_p)
    if options.min_p > 0.0:
        chances_V[chances_V < options.min_p * chances_V.max()] = 0.0
    return chances_V


def _keep_top_p(chances_V: FloatRow, top_p: float) -> None:
    """Set the chances to 0 of all tokens but the likeliest that together have a share `top_p`."""
    wanted = top_p * chances_V.sum()
    # Tokens below a share of (1 - top_p) / V cannot be among them: together they have less than 1 - top_p.
    least = (1.0 - top_p) * chances_V.sum() / len(chances_V) * 0.5
    candidates = np.flatnonzero(chances_V > least)
    order = candidates[np.argsort(-chances_V[candidates], kind="stable")]
    before = np.cumsum(chances_V[order]) - chances_V[order]
    kept = order[before < wanted]
    values = chances_V[kept]
    chances_V[:] = 0.0
    chances_V[kept] = values


def draw_uniform(seed: int, sample_index: int, position: int) -> float:
    """Return the number in [0, 1) that chooses the token at a position of a text."""
    return key(seed, "sample", sample_index, position) * _DRAW_SCALE


def draw_token(chances_V: FloatRow, uniform: float) -> int:
    """Return the token at a quantile of the distribution, with tokens in the order of their numbers."""
    sums_V = np.cumsum(chances_V)
    # "right": a token of chance 0 has an empty interval and is never returned.
    token = int(np.searchsorted(sums_V, uniform * sums_V[-1], side="right"))
    # Rounding may put the quantile at the sum itself, which is after the last token.
    return token if token < len(sums_V) else int(np.flatnonzero(chances_V)[-1])
