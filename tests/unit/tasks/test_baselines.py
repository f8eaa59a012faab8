"""Unigram, trigram and lzma against definitions that are written out byte by byte."""

import lzma
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from paceline.tasks.byte_gpt import measure_baselines, trigram_probabilities

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
