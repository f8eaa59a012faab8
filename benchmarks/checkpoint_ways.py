"""The sides of the benchmark of checkpoints: a training loop, and ways to save its state.

Every way is a `Way`: how a save begins, what training has to wait for, and when all is written.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.disk.writer_process import WriterProcess
from paceline.checkpoint.manifest import CheckpointOrigin
from paceline.checkpoint.publish import FullDiskPatience, RetentionCounts
from paceline.checkpoint.saver import CheckpointSaver, SaveSettings
from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.writers import PartWriter, ProcessWriter, ThreadWriter
from paceline.parallel.sharded_model import unsharded_model
from paceline.state.train_state import TrainState

BLOCK_BYTES = 8 * 2**20
_ORIGIN = {"recipe": "", "strategy": "replicas=1", "world_size": 1, "versions": {}}


@dataclass(frozen=True)
class Size:
    """How much is measured: layers of width x width, samples a step, steps a block, blocks."""

    width: int
    layers: int
    batch: int
    steps: int
    repeats: int


class Job:
    """A training loop that is nothing but its steps.

    Attributes:
        rest_seconds: for how long every step waits, as for data or for other ranks.
    """

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(size.width, size.width) for _ in range(size.layers)]
        self.model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.state = TrainState(unsharded_model(self.model), optimizer)
        self._batch = torch.rand(size.batch, size.width)
        self.rest_seconds = 0.0

    def step(self) -> None:
        """Forward, backward, update."""
        if self.rest_seconds:
            time.sleep(self.rest_seconds)
        self.state.optimizer.zero_grad(set_to_none=True)
        self.model(self._batch).square().mean().backward()
        self.state.optimizer.step()
        self.state.step += 1

    def num_bytes(self) -> int:
        """Of the state."""
        return sum(t.numel() * t.element_size() for t in self.state.tensors().values())


class Turn:
    """What comes before every turn, unmeasured: a file of the state's size is written and removed.

    The pages that it leaves are those that the next writer gets. Without this, whoever writes after a save
    that kept its file pays for new pages, which may cost more than the disk.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._path, self._blocks = folder / "turn", [bytes(BLOCK_BYTES)] * (num_bytes // BLOCK_BYTES)

    def __call__(self) -> None:
        write_plainly(self._path, self._blocks)
        self._path.unlink()


def write_plainly(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    """One sequential writer with fsync."""
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def timed(call: Callable[[], Any]) -> float:
    """Its seconds."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@dataclass
class Way:
    """One way to save.

    Args:
        name: in the table.
        begin: begins a save.
        settle: waits until the state may change; called before the next update.
        finish: waits until all is written.
        clean: removes what need not stay; outside of the measured time.
        waited: seconds that it made training wait so far, if it counts them itself.
        busy: whether a save is being written.
        blocked, totals, written: seconds by block; `written`: from the call to the end of the writing, with
            the precision of a step.
    """

    name: str
    begin: Callable[[], Any]
    settle: Callable[[], Any] = lambda: None
    finish: Callable[[], Any] = lambda: None
    clean: Callable[[], Any] = lambda: None
    waited: Callable[[], float] = lambda: 0.0
    busy: Callable[[], bool] = lambda: False
    blocked: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)

    def block(self, job: Job, steps: int) -> None:
        """A save, some steps, and what is left of the writing then."""
        waits: list[float] = []

        def wait(*_: object) -> None:
            waits.append(timed(self.settle))

        hook = job.state.optimizer.register_step_pre_hook(wait)
        before, began = self.waited(), time.perf_counter()
        waits.append(timed(self.begin))
        done = None if self.busy() else time.perf_counter()
        for _ in range(steps):
            job.step()
            done = time.perf_counter() if done is None and not self.busy() else done
        waits.append(timed(self.finish))
        end = time.perf_counter()
        self.totals.append(end - began)
        self.written.append((done or end) - began)
        self.blocked.append(self.waited() - before or sum(waits))
        hook.remove()
        self.clean()


@contextmanager
def our_saver(job: Job, folder: Path, background: bool, keep: int = 1) -> Iterator[CheckpointSaver]:
    """Paceline's, for one rank; the job's updates wait for it, as a session's do."""
    shelf = CheckpointCatalog.read(StorageFolder(str(folder))).claim()
    writer: PartWriter = ThreadWriter(torch.get_num_threads())  # as `build_saver` chooses
    if background:
        writer = ProcessWriter(WriterProcess(dict(os.environ)), 60.0, print)
    saving = SaveSettings(
        0, background, True, True, RetentionCounts(keep, 0), 600.0, FullDiskPatience(0.0, print), writer
    )
    saver = CheckpointSaver(
        job.state, shelf, CheckpointOrigin(run=shelf.run, **_ORIGIN), saving, lambda make_text: [make_text()]
    )
    hook = job.state.optimizer.register_step_pre_hook(lambda *_: saver.settle())
    try:
        yield saver
    finally:
        hook.remove()
        saver.finish()
        saver.close()


def dcp_way(job: Job, folder: Path) -> Way:
    """DCP's `async_save`, copying beside the steps; its default, to copy before it returns, is slower."""
    shared = {"use_pinned_memory": False, "use_shared_memory": True, "use_non_blocking_copy": False}
    stager = DefaultStager(StagingOptions(use_async_staging=True, **shared))
    under_way: list[Any] = []

    def begin() -> None:
        writer = dcp.FileSystemWriter(folder / f"step-{job.state.step}")
        options = {"storage_writer": writer, "async_stager": stager, "no_dist": True}
        under_way[:] = [dcp.async_save(job.state.tensors(), **options)]

    def settle() -> None:
        if under_way:
            under_way[0].staging_completion.result()

    def finish() -> None:
        under_way[0].upload_completion.result()

    def clean() -> None:
        for old in folder.glob("step-*"):
            shutil.rmtree(old)

    name = "DCP async_save, staged beside the steps"
    return Way(name, begin, settle, finish, clean, busy=lambda: not under_way[0].upload_completion.done())
