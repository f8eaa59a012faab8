"""Random numbers by their place: those of the paper's generator, in any order, and even."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.codecs.int8_int4_int2 import philox_uniform
from paceline.comm.workspace import Workspace

CPU = torch.device("cpu")
KEY = 0x1234_5678_9ABC_DEF0


def written_out(counter: tuple[int, int, int, int], key: int, rounds: int = 10) -> tuple[int, ...]:
    """Philox4x32, word by word."""
    a, b, c, d = counter
    low, high = key % 2**32, key >> 32
    for _ in range(rounds):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            (second >> 32) ^ b ^ low,
            second % 2**32,
            (first >> 32) ^ d ^ high,
            first % 2**32,
        )
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return a, b, c, d


@pytest.mark.capability("H1")
def test_numbers_are_those_of_philox() -> None:
    assert written_out((0, 0, 0, 0), 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)  # Random123's kat
    found = philox_uniform(
        KEY, 3, range(70_000_000, 70_000_002), CPU, Workspace()
    )  # counters wrap in 32 bits
    for block in range(2):
        for lane in (0, 1, 63):
            counter = ((70_000_000 + block) * 64 + lane) % 2**32, 3, 0, 0
            words = [word // 2**8 / 2**24 for word in written_out(counter, KEY)]
            assert found[block, lane::64].tolist() == words


def test_they_do_not_depend_on_what_was_drawn_before_and_are_even() -> None:
    whole, part = (
        philox_uniform(7, 0, range(400), CPU, Workspace()),
        philox_uniform(7, 0, range(100, 101), CPU, Workspace()),
    )
    assert torch.equal(whole[100], part[0])
    assert not torch.equal(whole, philox_uniform(7, 1, range(400), CPU, Workspace()))
    counts = torch.histc(whole, 64, 0.0, 1.0)
    assert float(whole.min()) >= 0.0 and float(whole.max()) < 1.0
    assert float(((counts - 1600) ** 2 / 1600).sum()) < 130  # chi-square of 63 degrees: 1e-6 lie above
