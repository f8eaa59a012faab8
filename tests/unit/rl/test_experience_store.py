"""Experience stores: no row is lost, duplicated or torn, and rows are drawn in proportion to priorities."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DeadlineError, PacelineError
from paceline.rl import ExperienceFifo, ExperienceStore, SumTree

# Large enough that a copy of a row takes several stores.
ROW = np.dtype([("writer", np.int64), ("index", np.int64), ("body", np.int64, (64,))])


def row(writer: int, index: int) -> Any:
    return (writer, index, np.full(64, 1000 * writer + index))


def is_torn(value: Any) -> bool:
    return bool((value["body"] != 1000 * value["writer"] + value["index"]).any())


@pytest.mark.capability("T3")
@settings(max_examples=15, deadline=None)
@given(
    writers=st.integers(1, 4),
    rows=st.integers(1, 40),
    laps=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_a_fifo_loses_duplicates_and_tears_no_row(writers: int, rows: int, laps: int, seed: int) -> None:
    """Writers and the reader wait at random; the order of reading does not depend on that."""
    fifo = ExperienceFifo(ROW, laps * writers, writers)

    def write(writer: int) -> None:
        delays = random.Random(seed + writer)
        for index in range(rows):
            if delays.random() < 0.1:
                time.sleep(delays.random() * 1e-3)
            fifo.put(writer, row(writer, index), 20.0)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    delays, taken = random.Random(seed), []
    for _ in range(writers * rows):
        if delays.random() < 0.1:
            time.sleep(delays.random() * 1e-3)
        taken.append(fifo.take(20.0))
    for thread in threads:
        thread.join()
    assert [(int(x["writer"]), int(x["index"])) for x in taken] == [
        (writer, index) for index in range(rows) for writer in range(writers)
    ]
    assert not any(map(is_torn, taken))


def fill(name: str, writer: int, writers: int, rows: int) -> None:
    """A writer in a process of its own."""
    memory = SharedMemory(name)
    fifo = ExperienceFifo(ROW, 2 * writers, writers, np.frombuffer(memory.buf, dtype=np.uint8))
    for index in range(rows):
        fifo.put(writer, row(writer, index), 30.0)
    del fifo


@pytest.mark.capability("T3")
def test_a_fifo_in_shared_memory_takes_rows_of_several_processes() -> None:
    writers, rows = 2, 300
    memory = SharedMemory(create=True, size=ExperienceFifo.num_bytes(ROW, 2 * writers))
    try:
        buffer = np.frombuffer(memory.buf, dtype=np.uint8)
        buffer[:] = 0
        fifo = ExperienceFifo(ROW, 2 * writers, writers, buffer)
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=fill, args=(memory.name, writer, writers, rows))
            for writer in range(writers)
        ]
        for process in processes:
            process.start()
        taken = [fifo.take(30.0) for _ in range(writers * rows)]
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
        found = [(int(x["index"]), int(x["writer"])) for x in taken]
        assert found == [(index, writer) for index in range(rows) for writer in range(writers)]
        assert not any(map(is_torn, taken))
        del fifo, buffer
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.capability("T3")
def test_a_reader_of_a_ring_sees_whole_rows_only_and_its_twin_sees_torn_ones() -> None:
    """A reader that ignores the numbers would get a row of which another lap has written a part."""
    ring = ExperienceStore(ROW, 4)
    ring.write(np.arange(4), np.array([row(0, i) for i in range(4)], dtype=ROW))
    # A writer stops in the middle of row 5, which replaces row 1.
    ring._front[1] = 6
    ring._rows["body"][1, :32] = 5
    rows, whole = ring.read(np.arange(6))
    assert whole.tolist() == [True, False, True, True, False, False]
    assert is_torn(rows[1]) and not any(map(is_torn, rows[whole]))
    with pytest.raises(PacelineError, match=r"row 1 of the experience store .* sequence numbers 5 and 1"):
        ring.require(np.array([0, 1]))


def test_a_fifo_whose_writer_or_reader_is_gone_ends_with_a_deadline() -> None:
    fifo = ExperienceFifo(ROW, 2, 2)
    with pytest.raises(DeadlineError, match="row 0 waits for writer 0"):
        fifo.take(0.01)
    fifo.put(0, row(0, 0), 1.0)
    with pytest.raises(DeadlineError, match="row 2 of writer 0 waits for the reader"):
        fifo.put(0, row(0, 1), 0.01)


@pytest.mark.capability("T3")
def test_rows_are_drawn_in_proportion_to_their_priorities() -> None:
    """Chi-squared with 63 degrees of freedom: 103.4 is exceeded by chance once in a thousand times."""
    draws = np.random.default_rng(3)
    tree, priorities = SumTree(100), np.zeros(100)
    priorities[:64] = draws.uniform(0.1, 5.0, 64)
    for _ in range(5):  # by updates of parts, with others between them
        part = draws.permutation(64)[:40]
        tree.update(part, draws.uniform(0.1, 5.0, 40))
    tree.update(np.arange(64), priorities[:64])
    num_draws = 200_000

    def chi_squared(expected: np.ndarray) -> float:
        found = np.bincount(tree.find(draws.random(num_draws)), minlength=100)
        assert not found[64:].any()  # places without a priority
        wanted = num_draws * expected[:64] / expected[:64].sum()
        return float(((found[:64] - wanted) ** 2 / wanted).sum())

    assert chi_squared(priorities) < 103.4 < chi_squared(np.ones(100))
    again = SumTree(100)
    again.update(np.arange(100), priorities)
    assert np.array_equal(again._nodes, tree._nodes)  # the bits do not depend on the history
    assert tree.total == pytest.approx(priorities.sum())
