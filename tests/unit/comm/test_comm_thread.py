"""The line: hops in the order of their launch, rounds by turns, and nothing behind an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.comm import Handle
from paceline.comm.comm_thread import CommRounds, CommThread, run_rounds
from paceline.errors import CommunicationError

LIMIT = 100.0


class Wire:
    """Notes what happens on the line; a round of it ends when it is let go."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def gate(self, name: str) -> threading.Event:
        """What a round waits for."""
        return self._gates.setdefault(name, threading.Event())

    def open(self, *names: str) -> None:
        """Let rounds end."""
        for name in names:
            self.gate(name).set()

    def round(self, name: str) -> Handle:
        """Launch it."""
        self.events.append(f"launch {name}")

        def resolve(deadline_seconds: float | None, exposed: bool) -> str:
            assert self.gate(name).wait(LIMIT) and not exposed
            self.events.append(f"end {name}")
            return name

        return Handle(resolve)

    def rounds(self, name: str, count: int, places: list[int] | None = None) -> Callable[[int], CommRounds]:
        """So many rounds, one after another."""

        def run(place: int) -> CommRounds:
            if places is not None:
                places.append(place)
            found = []
            for number in range(count):
                found.append((yield self.round(f"{name}{number}")))
            return found

        return run


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def line() -> Iterator[CommThread]:
    line = CommThread("tested", lambda op, seconds: None)
    yield line
    line.close()


def held(line: CommThread) -> threading.Event:
    """Keep the line from beginning until this is set: so what is submitted meanwhile waits together."""
    free = threading.Event()
    line.submit("sum", lambda: free.wait(LIMIT))
    return free


@pytest.mark.capability("G10")
def test_while_a_round_of_one_buffer_is_under_way_the_next_buffer_begins(
    line: CommThread, wire: Wire
) -> None:
    places: list[int] = []
    free = held(line)
    handles = [line.submit_rounds("sum", wire.rounds(name, 2, places)) for name in "abc"]
    wire.open(*(name + number for name in "abc" for number in "01"))
    free.set()
    assert [handle.wait() for handle in handles] == [[name + "0", name + "1"] for name in "abc"]
    assert places == [0, 1, 0]
    assert wire.events[:3] == ["launch a0", "launch b0", "end a0"]
    assert wire.events.index("launch b0") < wire.events.index("end a0")
    assert wire.events.index("launch c0") > wire.events.index("end a1")  # it has the place of the first


def test_a_buffer_with_one_round_does_not_give_its_neighbours_place_away(
    line: CommThread, wire: Wire
) -> None:
    """a has two rounds and b one, so b ends first; c has the place of a and waits for it."""
    free = held(line)
    handles = [line.submit_rounds("sum", wire.rounds(name, n)) for name, n in (("a", 2), ("b", 1), ("c", 1))]
    wire.open("a0", "a1", "b0", "c0")
    free.set()
    for handle in handles:
        handle.wait()
    assert wire.events.index("end b0") < wire.events.index("end a1") < wire.events.index("launch c0")


def test_hops_have_nothing_beside_them(line: CommThread, wire: Wire) -> None:
    free = held(line)
    first = line.submit_rounds("sum", wire.rounds("a", 2))
    alone = line.submit("gather", lambda: wire.events.append("alone"))
    last = line.submit_rounds("sum", wire.rounds("b", 1))
    wire.open("a0", "a1", "b0")
    free.set()
    for handle in (first, alone, last):
        handle.wait()
    assert wire.events == ["launch a0", "end a0", "launch a1", "end a1", "alone", "launch b0", "end b0"]


@pytest.mark.capability("N5")
def test_after_an_error_nothing_goes_on_until_the_line_is_mended(line: CommThread, wire: Wire) -> None:
    def breaks(place: int) -> CommRounds:
        yield wire.round("x0")
        raise CommunicationError("a peer is gone")

    free = held(line)
    handles = [line.submit_rounds("sum", rounds) for rounds in (wire.rounds("a", 2), breaks)]
    handles.append(line.submit("sum", lambda: wire.events.append("never")))
    wire.open("a0", "x0")
    wire.open("a1")
    free.set()
    for handle in handles[1:]:
        with pytest.raises(CommunicationError, match="a peer is gone"):
            handle.wait()
    assert "never" not in wire.events
    line.clear_error()
    assert line.submit_rounds("sum", wire.rounds("a", 1)).wait() == ["a0"]


class Peers:
    """Rounds of several lines, as ranks have them: one ends once every rank has launched it."""

    def __init__(self, size: int) -> None:
        self._missing: dict[str, int] = {}
        self._size, self._changed = size, threading.Condition()

    def round(self, name: str) -> Handle:
        """Launch it on one rank."""
        with self._changed:
            self._missing[name] = self._missing.get(name, self._size) - 1
            self._changed.notify_all()

        def resolve(deadline_seconds: float | None, exposed: bool) -> str:
            with self._changed:
                assert self._changed.wait_for(lambda: not self._missing[name], LIMIT), f"nobody joins {name}"
            return name

        return Handle(resolve)

    def rounds(self, name: str, count: int) -> Callable[[int], CommRounds]:
        """So many rounds, one after another."""

        def run(place: int) -> CommRounds:
            for number in range(count):
                yield self.round(f"{name}{number}")
            return name

        return run


@pytest.fixture
def two_lines() -> Iterator[tuple[CommThread, CommThread]]:
    lines = CommThread("first", lambda op, seconds: None), CommThread("second", lambda op, seconds: None)
    yield lines
    for line in lines:
        line.close()


@pytest.mark.capability("G10")
def test_a_rank_with_one_buffer_and_one_with_two_under_way_do_not_wait_in_a_circle(
    two_lines: tuple[CommThread, CommThread],
) -> None:
    """The second rank begins b beside a; the first begins it only when a has ended."""
    (first, second), peers = two_lines, Peers(2)
    free = held(second)
    theirs = [second.submit_rounds("sum", peers.rounds(name, 2)) for name in "ab"]
    mine = first.submit_rounds("sum", peers.rounds("a", 2))
    free.set()
    assert mine.wait() == "a"
    assert first.submit_rounds("sum", peers.rounds("b", 2)).wait() == "b"
    assert [handle.wait() for handle in theirs] == ["a", "b"]


@pytest.mark.capability("G10")
def test_a_buffer_that_would_wait_three_times_is_refused_since_ranks_could_hang(line: CommThread) -> None:
    handle = line.submit_rounds("sum", Peers(1).rounds("a", 3))
    with pytest.raises(CommunicationError, match="wait more than 2 times"):
        handle.wait()


def test_rounds_run_alone_are_the_same_rounds(wire: Wire) -> None:
    wire.open("a0", "a1")
    found: Any = run_rounds(wire.rounds("a", 2)(0))
    assert found == ["a0", "a1"]
    assert wire.events == ["launch a0", "end a0", "launch a1", "end a1"]
