"""Loader workers that are lost, that are slow, or that end while they hand something over."""

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from paceline.data import loader as loader_room
from paceline.data.loader import LoaderStream, SampleLoader, _RequestSampler
from paceline.data.sample_reader import ReadReply
from paceline.errors import DataError
from paceline.recipe.recipe import LoaderRecipe
from tests.unit.data.test_loader import CPU, Numbers, micro_batches, read, recipe


def loader_workers() -> list[multiprocessing.process.BaseProcess]:
    """Return the living loader workers; idle ranks of other tests are no daemons."""
    return [child for child in multiprocessing.active_children() if child.daemon]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives a worker that is stuck 5 s to leave before it is terminated; here a moment."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


@pytest.mark.capability("M3")
@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_worker_that_is_lost_in_mid_sentence_is_named_as_such(error: Exception) -> None:
    """So it ends where the kernel kills a worker that shows a tensor's memory."""

    def broken() -> Iterator[ReadReply]:
        raise error
        yield

    loader = SampleLoader([], list, LoaderRecipe(workers=1), torch.device("cpu"))
    with pytest.raises(DataError, match=r"the loader failed: .*(reset|EOFError)"):
        next(LoaderStream(loader, _RequestSampler(()), broken()))


def test_a_slow_sample_may_take_many_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_room, "_WORKER_CHECK_SECONDS", 0.05)

    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.3)
            return index

    assert read(Slow(), 1, micro_batches(2)) == read(Numbers(), 0, micro_batches(2))


@pytest.mark.capability("N10", clause="a lost loader worker leaves nothing")
def test_the_death_of_a_worker_is_no_signal_to_the_training() -> None:
    """PyTorch's handler would raise at any line of it: in a save, in a step, or between two system calls."""
    before = signal.getsignal(signal.SIGCHLD)
    with SampleLoader(Numbers(), list, recipe(1), CPU).open(itertools.cycle(micro_batches(5))) as stream:
        next(stream)
        assert signal.getsignal(signal.SIGCHLD) is before
        os.kill(loader_workers()[0].pid, signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(DataError, match="is killed by signal: Killed"):
            while True:
                next(stream)


def test_a_worker_that_is_stuck_meets_the_deadline(impatient: None) -> None:
    class Stuck(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(600)
            return index

    loader = SampleLoader(Stuck(), list, recipe(2), CPU, deadline_seconds=0.5)
    with pytest.raises(DataError, match=r"no batch in 0\.5 s") as caught:
        next(loader.open(micro_batches(4)))
    assert "runtime.deadline_seconds" in caught.value.next_step
