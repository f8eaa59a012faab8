"""The loader: order, laziness, randomness, failures, caches; inline and with worker processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Subset, TensorDataset

from paceline.data import loader as loader_room
from paceline.data.loader import LoaderStream, SampleLoader, _RequestSampler, to_device
from paceline.data.sample_order import KeyedOrder
from paceline.data.sample_reader import ReadReply
from paceline.data.work import LockstepWork, MicroBatch
from paceline.errors import DataError
from paceline.recipe import LoaderRecipe

CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def loader_workers() -> list[Any]:
    """Return the living loader workers; idle ranks of other tests are no daemons."""
    return [child for child in multiprocessing.active_children() if child.daemon]


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    assert loader_workers() == []


class Numbers:
    """Sample i is i; a sample may misbehave on the way."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def recipe(workers: int = 0, prefetch: int = 2, cache_bytes: int = 0) -> LoaderRecipe:
    return LoaderRecipe(workers=workers, prefetch=prefetch, cache_bytes=cache_bytes)


def micro_batches(num_steps: int, num_samples: int = 100, size: int = 8, shards: int = 2) -> list[MicroBatch]:
    work = LockstepWork(KeyedOrder(num_samples, size, 1), shards, 1)
    return [micro_batch for step in range(num_steps) for micro_batch in work.micro_batches(step)]


def read(source: Any, workers: int, wanted: list[MicroBatch], **settings: int) -> list[list[Any]]:
    with SampleLoader(source, list, recipe(workers, **settings), CPU).open(iter(wanted)) as stream:
        return [loaded.batch for loaded in stream]


@pytest.mark.capability("A5", "M2")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_order_does_not_depend_on_workers(workers: int) -> None:
    class Uneven(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.01 if index % 7 == 0 else 0)
            return index

    wanted = micro_batches(15)
    with SampleLoader(Uneven(), list, recipe(workers), CPU).open(wanted) as stream:
        loaded = list(stream)
    assert [item.micro_batch for item in loaded] == wanted
    assert [item.batch for item in loaded] == [micro_batch.indices.tolist() for micro_batch in wanted]


@pytest.mark.capability("M2")
def test_workers_read_at_the_same_time() -> None:
    """Each sample waits until two processes are inside the source: one reader alone would never get out."""
    meeting = FORK.Barrier(2)

    class Meeting(Numbers):
        def __getitem__(self, index: int) -> int:
            meeting.wait(timeout=80)
            return os.getpid()

    readers = read(Meeting(), 2, micro_batches(2, size=2))
    assert len({pid for batch in readers for pid in batch}) == 2
    lonely = threading.Timer(0.2, meeting.abort)
    lonely.start()
    with pytest.raises(DataError, match="BrokenBarrierError"):
        read(Meeting(), 1, micro_batches(1, size=2))
    lonely.join()


@pytest.mark.capability("M3")
@pytest.mark.parametrize(("workers", "prefetch"), [(1, 2), (2, 1), (2, 3)])
def test_reading_overlaps_with_computing_and_is_bounded(workers: int, prefetch: int) -> None:
    """While the consumer asks for nothing, the read-ahead fills up to its bound, and no further."""
    num_read = FORK.Value("i", 0)

    class Counting(Numbers):
        def __getitem__(self, index: int) -> int:
            with num_read.get_lock():
                num_read.value += 1
            return index

    endless, pulled = itertools.cycle(micro_batches(12, size=2)), itertools.count(1)
    latest = 0

    def feed() -> Iterator[MicroBatch]:
        nonlocal latest
        for micro_batch in endless:
            latest = next(pulled)
            yield micro_batch

    with SampleLoader(Counting(), list, recipe(workers, prefetch), CPU).open(feed()) as stream:
        for num_taken in range(1, 6):
            next(stream)
            deadline = time.monotonic() + 80
            while num_read.value < num_taken + workers * prefetch and time.monotonic() < deadline:
                time.sleep(0.01)  # "computing"
            assert num_read.value == num_taken + workers * prefetch
            assert latest == num_taken + workers * prefetch


def test_inline_reading_pulls_one_micro_batch_at_a_time() -> None:
    pulled: list[MicroBatch] = []

    def feed() -> Iterator[MicroBatch]:
        for micro_batch in itertools.cycle(micro_batches(3)):
            pulled.append(micro_batch)
            yield micro_batch

    stream = SampleLoader(Numbers(), list, recipe(), CPU).open(feed())
    for number in range(1, 10):
        next(stream)
        assert len(pulled) == number
    stream.close()


class Noisy(Numbers):
    """Draws from all three global generators, as augmentations do."""

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.normal()), float(torch.rand(()))


@pytest.mark.capability("M2")
def test_random_augmentation_does_not_depend_on_workers() -> None:
    alone = read(Noisy(), 0, micro_batches(6))
    assert read(Noisy(), 1, micro_batches(6)) == alone
    assert read(Noisy(), 2, micro_batches(6)) == alone
    assert len({sample for batch in alone for sample in batch}) == 48  # and it does vary


class SometimesNoisy(Noisy):
    """Only some samples draw, and they are read together."""

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return super().__getitem__(index) if index % 5 == 0 else (float(index), 0.0, 0.0)


class NoisyTogether(Noisy):
    def __getitems__(self, indices: list[int]) -> list[tuple[float, float, float]]:
        return [self[index] for index in indices]


@pytest.mark.capability("M2")
@pytest.mark.parametrize("source", [Noisy(40), SometimesNoisy(40), NoisyTogether(40)])
@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentation_does_not_depend_on_how_a_batch_is_divided(source: Any, workers: int) -> None:
    """A sample of a step has its numbers whichever shard it is in; in the next epoch it has others."""

    def samples(shards: int) -> list[Any]:
        work = LockstepWork(KeyedOrder(len(source), 10, seed=3), shards, seed=3)
        wanted = [part for step in range(8) for part in work.micro_batches(step)]
        indices = [int(index) for part in wanted for index in part.indices]
        read_samples = [sample for batch in read(source, workers, wanted) for sample in batch]
        return [*zip(indices, read_samples, strict=True)]

    whole = samples(1)
    for shards in (2, 3, 7):
        assert samples(shards) == whole
    drawn = [sample for index, sample in whole if index % 5 == 0]
    assert len(set(drawn)) == len(drawn) == 16, "no number comes twice, also not in another epoch"


@WORKERS
def test_reading_leaves_the_global_generators_alone(workers: int) -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), np.random.random(), torch.rand(2).tolist()

    def seed() -> None:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)

    seed()
    expected = [draw() for _ in range(3)]
    seed()
    seen = [draw()]
    with SampleLoader(Noisy(), list, recipe(workers), CPU).open(micro_batches(3)) as stream:
        seen.append(draw())
        next(stream)
        seen.append(draw())
    assert seen == expected


@WORKERS
def test_default_collate_makes_tensors(workers: int) -> None:
    source = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))
    wanted = micro_batches(2, num_samples=20)
    with SampleLoader(source, None, recipe(workers), CPU).open(wanted) as stream:
        for loaded in stream:
            x, y = loaded.batch
            assert torch.equal(y, torch.from_numpy(loaded.micro_batch.indices.copy()))
            assert torch.equal(x[:, 0], 2.0 * y)


@WORKERS
def test_batched_reading_is_used_where_the_source_has_it(workers: int) -> None:
    """The protocol of Hugging Face datasets and of torch subsets: plain integers in, a list out."""

    class Table(Numbers):
        def __getitem__(self, index: int) -> int:
            raise AssertionError("read one by one")

        def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
            assert all(type(index) is int for index in indices)
            return [{"row": index} for index in indices]

    wanted = micro_batches(3)
    assert read(Table(), workers, wanted) == [[{"row": i} for i in w.indices.tolist()] for w in wanted]
    assert read(Subset(Numbers(), list(range(500, 600))), workers, wanted) == [
        [500 + i for i in micro_batch.indices.tolist()] for micro_batch in wanted
    ]


class Rotten(Numbers):
    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise ValueError("mouldy")
        return index


class RottenTable(Rotten):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@WORKERS
@pytest.mark.parametrize("kind", [Rotten, RottenTable])
def test_a_bad_sample_is_named_when_its_turn_comes(kind: type[Rotten], workers: int) -> None:
    wanted = micro_batches(6)
    bad = int(wanted[7].indices[2])
    stream = SampleLoader(kind(bad), list, recipe(workers), CPU).open(wanted)
    assert [next(stream).micro_batch for _ in range(7)] == wanted[:7]
    with pytest.raises(DataError, match=f"sample {bad} cannot be read: ValueError: mouldy") as caught:
        next(stream)
    assert "test_loader.py" in caught.value.where
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert "raise ValueError" in notes if workers else isinstance(caught.value.__cause__, ValueError)
    assert loader_workers() == []
    with pytest.raises(StopIteration):
        next(stream)


@WORKERS
def test_samples_that_do_not_collate_are_named(workers: int) -> None:
    class Ragged(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(index + 1)

    wanted = micro_batches(1)
    with (
        SampleLoader(Ragged(), None, recipe(workers), CPU).open(wanted) as stream,
        pytest.raises(
            DataError, match=r"cannot be collated: sample \d+ is .*, and sample \d+ is .*: RuntimeError"
        ) as caught,
    ):
        next(stream)
    assert str(wanted[0].indices.tolist()) in caught.value.what


def test_a_source_that_returns_too_few_samples_is_refused() -> None:
    class Short(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices[1:]

    with pytest.raises(DataError, match="returned 3 samples for 4 indices"):
        read(Short(), 0, micro_batches(1))


def test_a_worker_that_dies_is_an_error_not_a_hang() -> None:
    doom = FORK.Event()

    class Deadly(Numbers):
        def __getitem__(self, index: int) -> int:
            if doom.wait(timeout=80):
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    timer = threading.Timer(0.3, doom.set)  # by then the test waits in `next`
    with SampleLoader(Deadly(), list, recipe(1), CPU).open(micro_batches(4)) as stream:
        timer.start()
        with pytest.raises(
            DataError, match=r"the loader failed: DataLoader worker .* by signal: Killed"
        ) as caught:
            next(stream)
    timer.join()
    assert "step 0" in caught.value.where
    assert "loader.workers = 0" in caught.value.next_step


@pytest.mark.capability("N5", clause="a killed or stopped worker is seen in three intervals")
def test_a_worker_that_is_stopped_is_named_at_once_and_in_the_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loader = SampleLoader(Numbers(), list, recipe(2), CPU, deadline_seconds=3.0)
    with loader.open(micro_batches(100)) as stream:
        next(stream)
        pids = [worker.pid for worker in loader_workers()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DataError, match=r"no batch in 3 s: loader .* stopped by a signal") as caught:
            for _ in stream:
                pass
        assert any(f"(process {pid})" in caught.value.what for pid in pids)
        assert "stopped by a signal (SIGSTOP?); the loader waits 3 s at most" in capsys.readouterr().err


def test_close_in_the_middle_ends_the_workers_and_may_be_repeated() -> None:
    stream = SampleLoader(Numbers(), list, recipe(2), CPU).open(itertools.cycle(micro_batches(5)))
    next(stream)
    assert len(loader_workers()) == 2
    stream.close()
    assert loader_workers() == []
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)


def test_workers_of_a_killed_parent_leave_even_when_stuck() -> None:
    program = """
        import os, sys, time, torch
        from paceline.data.loader import SampleLoader
        from paceline.data.work import LockstepWork
        from paceline.data.sample_order import KeyedOrder
        from paceline.recipe import LoaderRecipe

        class Stuck:
            def __len__(self):
                return 10
            def __getitem__(self, index):
                print(os.getpid(), flush=True)
                time.sleep(600)

        micro_batches = LockstepWork(KeyedOrder(10, 2, 1), 1, 1).micro_batches(0)
        next(SampleLoader(Stuck(), None, LoaderRecipe(workers=1), torch.device("cpu")).open(micro_batches))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
        try:
            parent.communicate(timeout=200)  # the pipe closes when the last process that holds it is gone
        except subprocess.TimeoutExpired:
            os.kill(worker, signal.SIGKILL)
            raise


@pytest.mark.capability("M3")
@WORKERS
def test_the_cache_is_hit_in_the_second_epoch(workers: int) -> None:
    """With room for all samples of one worker, the second epoch is read from memory."""
    num_read = FORK.Value("i", 0)

    class Counting(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            with num_read.get_lock():
                num_read.value += 1
            return torch.full((10,), index)

    loader = SampleLoader(Counting(), None, recipe(min(workers, 1), cache_bytes=1 << 20), CPU)
    wanted = micro_batches(20, num_samples=40)  # four epochs of five steps
    with loader.open(wanted) as stream:
        for loaded in stream:
            assert loaded.batch[:, 0].tolist() == loaded.micro_batch.indices.tolist()
    assert num_read.value == 40
    assert (loader.cache_hits, loader.cache_lookups) == (120, 160)


def test_cache_bytes_are_divided_among_the_workers() -> None:
    class Wide(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(1000, dtype=torch.uint8)

    wanted = [first for _ in range(4) for first in micro_batches(2, num_samples=2, size=2, shards=1)[:1]]
    hits = {}
    for capacity_bytes in (2_000, 20_000):
        loader = SampleLoader(Wide(), None, recipe(2, cache_bytes=capacity_bytes), CPU)
        with loader.open(wanted) as stream:
            list(stream)
        hits[capacity_bytes] = loader.cache_hits
    assert hits == {2_000: 0, 20_000: 4}  # 1,000 bytes each hold no sample; two workers each read it once


@pytest.mark.gpu
@pytest.mark.capability("M3")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@WORKERS
def test_batches_reach_the_gpu(workers: int) -> None:
    source = TensorDataset(torch.arange(100))
    with SampleLoader(source, None, recipe(workers), torch.device("cuda")).open(micro_batches(3)) as stream:
        for loaded in stream:
            (y,) = loaded.batch
            assert y.device.type == "cuda"
            assert y.tolist() == loaded.micro_batch.indices.tolist()


META = torch.device("meta")  # a device that is on every machine and is not the CPU


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Named(UserDict):
    title = "kept"


def test_every_tensor_moves_and_containers_keep_their_type() -> None:
    x = torch.ones(2)
    batch: dict[str, Any] = {
        "list": [x, 1],
        "tuple": (x, "text"),
        "pair": Pair(x, x),
        "ordered": OrderedDict(a=x),
        "none": None,
    }
    moved: Any = to_device(batch, META)
    assert moved["list"][0].device == moved["tuple"][0].device == moved["pair"].y.device == META
    assert moved["ordered"]["a"].device == META
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["ordered"], OrderedDict)
    assert (moved["list"][1], moved["tuple"][1], moved["none"]) == (1, "text", None)
    assert batch["list"][0] is x, "the batch that came in is not modified"
    assert x.device.type == "cpu"


def test_mappings_of_other_kinds() -> None:
    named = Named(a=torch.ones(2))
    named.title = "mine"
    moved = to_device(named, META)
    assert (moved["a"].device, moved.title, named["a"].device.type) == (META, "mine", "cpu")
    assert to_device(MappingProxyType({"a": torch.ones(1)}), META)["a"].device == META


def test_an_own_to_is_used() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert to_device(packed, META).data.device == META


def test_what_is_there_already_is_not_copied() -> None:
    x = torch.ones(2)
    assert to_device(x, torch.device("cpu")) is x


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
