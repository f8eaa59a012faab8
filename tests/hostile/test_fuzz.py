"""Every parser of what others may have written, on inputs that nobody has thought of: a named error.

In the suite a thousand inputs for each, the same ones in every run: Hypothesis draws every fifth, and
`havoc` makes the others of these. In the soak a hundred thousand, of which every tenth is drawn. An input
may take two seconds of the processor and `ROOM_BYTES` of memory; one that waits for ever ends with the
test. What was found once stands in `test_fuzz_findings.py`, by name.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.hostile.mutations import havoc
from tests.hostile.parser_checks import Check
from tests.hostile.parsers import CHANGES, PARSERS

pytestmark = [pytest.mark.capability("N13"), pytest.mark.timeout(240)]
FEW, LIKE_FEW = 60, 240
BATCH, BATCHES, LIKE_THEM = 1000, 10, 9000
MOST_SECONDS = 2.0
ROOM_BYTES = 2**29


@contextmanager
def little_room() -> Iterator[None]:
    """Who reserves more memory than this has an error that nobody allows."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Named:
    """Names the input in an error that it has led to."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(f"the input: {self._value!r:.4000}")


def try_one(check: Check, value: object) -> None:
    begun = time.thread_time()
    with Named(value):
        check(value)
        assert time.thread_time() - begun < MOST_SECONDS


def try_batch(name: str, number: int, count: int) -> list[Any]:
    """That many inputs of a parser; its check raises what must not be raised. Returns them."""
    inputs, check = PARSERS[name]
    tried: list[Any] = []

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # inputs are small, and to shrink one that hangs takes minutes
        suppress_health_check=[*HealthCheck],
    )
    @seed(number)
    @given(inputs())
    def run(value: object) -> None:
        tried.append(value)
        try_one(check, value)

    with little_room():
        run()
    return tried


def try_like(name: str, pool: list[Any], number: int, count: int) -> None:
    """Inputs that are made of those of a pool."""
    chance, check = random.Random(number), PARSERS[name][1]
    with little_room():
        for _ in range(count):
            try_one(check, havoc(chance, pool, CHANGES.get(name)))


@pytest.mark.parametrize("parser", PARSERS)
def test_no_input_is_more_than_a_named_error(parser: str) -> None:
    try_like(parser, try_batch(parser, 0, FEW), 0, LIKE_FEW)


@pytest.mark.soak
@pytest.mark.timeout(10_800)
@pytest.mark.parametrize("parser", PARSERS)
def test_no_input_of_a_hundred_thousand_is_more_than_a_named_error(parser: str) -> None:
    for number in range(BATCHES):
        try_like(parser, try_batch(parser, number, BATCH), number, LIKE_THEM)


def test_what_is_made_of_inputs_is_of_their_kind_and_is_hardly_ever_one_of_them() -> None:
    pool = [(b"abc", {"a": [1, "x"]}), (b"", {"b": None}), (bytes(90), {})]
    chance = random.Random(1)
    made = [havoc(chance, pool) for _ in range(2000)]
    assert all(type(one) is tuple and [type(part) for part in one] == [bytes, dict] for one in made)
    assert len({repr(one) for one in made} - {repr(one) for one in pool}) > 1000
    assert {one[0] for one in (havoc(chance, pool, 1) for _ in range(99))} <= {one[0] for one in pool}


def too_much(value: object) -> None:
    bytearray(2 * ROOM_BYTES)  # what was given back since the limit was set is room too


def too_long(value: object) -> None:
    expires = time.thread_time() + 1.1 * MOST_SECONDS
    while time.thread_time() < expires:
        pass


def uncaught(value: object) -> None:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("fault", "error"), [(too_much, MemoryError), (too_long, AssertionError), (uncaught, KeyError)]
)
def test_a_parser_that_does_otherwise_is_found(
    fault: Check, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARSERS, "hello", (PARSERS["hello"][0], fault))
    monkeypatch.setattr("tests.hostile.test_fuzz.MOST_SECONDS", 0.05 if fault is too_long else MOST_SECONDS)
    with pytest.raises(error):
        try_batch("hello", 0, 1)
    with pytest.raises(error) as found:
        try_like("hello", [b"x"], 0, count=1)
    assert "the input: b" in found.value.__notes__[0]
