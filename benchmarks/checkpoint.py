"""What a checkpoint costs: how long training waits for one, what it loses, and how fast it is written.

One process, all cores, a state of 512 MiB (parameters and two moments, fp32). A block is the time between
two saves: a save is begun, then steps are made, and at the end what is not yet written is waited for.
*Blocked* is the time that training cannot go on: in the call itself, where the optimizer waits for a copy,
and at the end. *Lost* is how much longer the whole block took than the block without a save in the same
round, so it has all that the writing beside the steps has cost. The steps keep every core busy; in the second
table each of them waits a little, as for data or for other ranks.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.checkpoint_ways import (
    BLOCK_BYTES,
    Job,
    Size,
    Turn,
    Way,
    dcp_way,
    our_saver,
    timed,
    write_plainly,
)
from benchmarks.report import Options, Report, Table, present
from paceline.checkpoint.saver import CheckpointSaver

_MIB = 2**20
_PAUSE_SECONDS = 3.0
"""A virtual machine gives free pages back to its host after a while; then each new one costs again."""
FULL, QUICK = Size(2112, 10, 128, 16, 4), Size(64, 2, 8, 3, 2)
_REST_SECONDS = 0.02


def take_turns(job: Job, ways: Sequence[Way], size: Size, turn: Turn) -> None:
    """Blocks of all ways in alternating order, after one block of each to warm up."""
    for way in ways:
        way.block(job, 2)
        for found in (way.blocked, way.totals, way.written):
            found.clear()
    for i in range(size.repeats):
        for way in ways if i % 2 == 0 else reversed(ways):
            turn()
            way.block(job, size.steps)


def stall_table(ways: Sequence[Way], size: Size, job: Job) -> Table:
    """Blocked and lost, and both as a share of a save that blocks."""
    base = statistics.median(ways[0].totals)
    blocking = next(way for way in ways if way.name.endswith("blocking"))
    whole = statistics.median(blocking.blocked)
    rows = []
    for way in ways[1:]:
        blocked = statistics.median(way.blocked)
        losses = [total - plain for total, plain in zip(way.totals, ways[0].totals, strict=True)]
        lost = statistics.median(losses)
        rows.append(
            (
                way.name,
                f"{blocked * 1e3:.0f}",
                f"{blocked / whole:.1%}",
                f"{lost * 1e3:.0f}",
                f"{min(losses) * 1e3:.0f} .. {max(losses) * 1e3:.0f}",
                f"{lost / whole:.0%}",
                f"{statistics.median(way.written):.1f}",
            )
        )
    spread = f"{min(ways[0].totals):.2f} .. {max(ways[0].totals):.2f}"
    title = (
        f"One save of {job.num_bytes() / _MIB:.0f} MiB in {size.steps} steps"
        f" of {base / size.steps * 1e3:.0f} ms ({job.rest_seconds * 1e3:.0f} ms of them at rest),"
        f" {size.repeats} blocks of each; those without a save took {spread} s"
    )
    of = "of a blocking save"
    columns = ("side", "blocked ms", of, "lost ms", "min .. max", of, "written after s")
    return Table(title, columns, rows)


def our_ways(blocking: CheckpointSaver, beside: CheckpointSaver) -> list[Way]:
    """No save, and ours."""
    return [
        Way("no save", lambda: None),
        Way("Paceline, blocking", blocking.save),
        Way(
            "Paceline, background",
            beside.save,
            finish=beside.finish,
            waited=lambda: beside.blocked_seconds,
            busy=lambda: beside.busy,
        ),
    ]


def raw(ways: Sequence[Way]) -> dict[str, dict[str, list[float]]]:
    """Seconds by way and block."""
    return {way.name: {"blocked": way.blocked, "block": way.totals, "written": way.written} for way in ways}


def speed_table(
    job: Job, folder: Path, saver: CheckpointSaver, repeats: int, before: Callable[[], object], title: str
) -> Table:
    """Write speed against one sequential writer, in turns. What a side wrote is removed after its turn."""
    data = torch.zeros(job.num_bytes(), dtype=torch.uint8).random_().numpy().data
    blocks = [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
    plain, theirs, ours = folder / "plain", folder / "dcp-save", folder / "speed"
    sides: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "one sequential writer with fsync": (lambda: write_plainly(plain, blocks), plain.unlink),
        "Paceline, blocking (hashed, manifest, fsync)": (
            saver.save,
            lambda: [shutil.rmtree(path) for path in ours.glob("step-*")],
        ),
        "DCP save": (lambda: save_by_dcp(job, theirs), lambda: shutil.rmtree(theirs)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(repeats + 1):
        for name, (call, remove) in sides.items():
            before()
            spent = timed(call)
            remove()
            job.state.step += 1
            seconds[name] += [spent] if i else []  # the first one warms up
    base = statistics.median(seconds["one sequential writer with fsync"])
    rows = [
        (
            name,
            f"{job.num_bytes() / _MIB / statistics.median(found):.0f}",
            f"{min(found) * 1e3:.0f} .. {max(found) * 1e3:.0f}",
            f"{base / statistics.median(found):.2f}",
        )
        for name, found in seconds.items()
    ]
    return Table(
        f"Write speed, {title}", ("side", "MiB/s", "min .. max ms", "of the sequential writer"), rows
    )


def save_by_dcp(job: Job, folder: Path) -> None:
    """`torch.distributed.checkpoint.save`, of one process."""
    dcp.save(job.state.tensors(), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def measure(options: Options) -> Report:
    """Both tables."""
    size = QUICK if options.quick else FULL
    job = Job(size)
    job.step()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint-")))
        turn = Turn(root, job.num_bytes())
        blocking = stack.enter_context(our_saver(job, root / "blocking", background=False))
        beside = stack.enter_context(our_saver(job, root / "background", background=True))
        busy, resting = our_ways(blocking, beside), our_ways(blocking, beside)
        busy.append(dcp_way(job, root / "dcp"))
        take_turns(job, busy, size, turn)
        tables = [stall_table(busy, size, job)]
        job.rest_seconds = _REST_SECONDS
        take_turns(job, resting, size, turn)
        tables.append(stall_table(resting, size, job))
        job.rest_seconds = 0.0
        kept = stack.enter_context(our_saver(job, root / "speed", background=False, keep=10**6))
        title = "after a file of that size was removed: its pages are free, and cheap"
        tables.append(speed_table(job, root, kept, size.repeats, turn, title))
        pause = partial(time.sleep, _PAUSE_SECONDS)
        title = f"after {_PAUSE_SECONDS:g} s of rest, as in a run that saves now and then"
        tables.append(speed_table(job, root, kept, size.repeats, pause, title))
    data = {"busy": raw(busy), "resting": raw(resting)}
    return Report("What a checkpoint of 512 MiB costs training, one process.", tables, data)


if __name__ == "__main__":
    present(measure, __doc__ or "")
