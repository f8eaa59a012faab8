"""The current operation of a rank, which other processes can read, and the spans of steps that are traced.

Everything that is timed in a step reports here: the phases of `PhaseTimer`, waits for collectives, and the
sums of buckets of gradients. The current operation is in a file of the run folder that is mapped into memory,
so reporting it is no system call, and a rank that hangs has said where. Spans are only recorded while
`recorder` is set; see `step_trace`.

Invariant: nothing here waits or raises in a step. A file that cannot be made is left out.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.observe.file_writing import create_draft, read_regular_file
from paceline.observe.process_info import process_start_ticks

FOLDER = "activity"
BETWEEN_STEPS = "between steps"
LEFT_LOOP = "after its loop"
LEFT_INSIDE_STEP = "after its loop, left inside of a step"

_MAGIC = b"paceact2"
_HEADER = struct.Struct("<8sqqqqqd40s64s")
"""Magic, rank, ranks, steps of the run, process and its start in ticks; wall time minus `perf_counter`; boot
of the host; its name."""
_RECORD = struct.Struct("<qqd96s48sqqq")
"""Number of the record, step, since when in `perf_counter`, operation; of a call that the rank waits for its
group, its number in the group and its bytes; and the number of the record again."""
_RECORD_AT = 256
_CALL = struct.Struct("<48s24sqq")
"""The latest call of a group: the group, the operation, the number of calls so far, and its bytes."""
_CALLS_AT = 512
_STACK = struct.Struct("<240s")
"""The file to which the process writes its stack on request."""
_STACK_AT = 3856
_MAX_GROUPS = (_STACK_AT - _CALLS_AT) // _CALL.size
_FILE_BYTES = 4096

_Span = tuple[str, str, float, float, int, Mapping[str, Any] | None]
"""Track, name, begin and end in seconds of `perf_counter`, step, further values."""


def boot_id() -> str:
    """Return the id of the present boot of this host: clocks of one boot agree; empty if it is not known."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


class SpanRecorder:
    """The spans of one rank in a window of steps.

    Args:
        limit: the most spans that are kept; `num_dropped` counts those beyond it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spans: list[_Span] = []
        self.num_dropped = 0
        self._lock = threading.Lock()

    def add(
        self,
        track: str,
        name: str,
        began: float,
        ended: float,
        step: int,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a span; also from a thread of the backend."""
        with self._lock:
            if len(self.spans) < self.limit:
                self.spans.append((track, name, began, ended, step, values))
            else:
                self.num_dropped += 1


class TracedCall:
    """A collective from its launch to its completion, or the sum of a bucket, which can take several.

    Args:
        label: "bucket 3", or the operation and its group.
        num_bytes: that this rank passes in.
        recorder: gets the span as soon as the call is complete; None: `RankActivity.end_bucket` adds it.
    """

    __slots__ = ("_recorder", "_step", "_values", "began", "ended", "label", "num_bytes")

    def __init__(
        self,
        label: str,
        num_bytes: int,
        recorder: SpanRecorder | None = None,
        step: int = 0,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self.label, self.num_bytes = label, num_bytes
        self._recorder, self._step, self._values = recorder, step, values
        self.began = time.perf_counter() if recorder is not None else 0.0
        self.ended = 0.0

    def complete(self) -> None:
        """Record that the call has ended; of several calls of a bucket the last counts."""
        self.ended = time.perf_counter()
        if self._recorder is not None:
            values = {"bytes": self.num_bytes, **(self._values or {})}
            self._recorder.add("collectives", self.label, self.began, self.ended, self._step, values)


@dataclass
class _GroupCalls:
    """The calls of one group: its place in the file, its name, and the number of calls so far."""

    index: int
    name: bytes
    number: int = 0


class _EncodedTexts(dict[str, bytes]):
    """The bytes of operations, each encoded once."""

    def __missing__(self, operation: str) -> bytes:
        encoded = self[operation] = operation.encode()[:96]
        return encoded


class RankActivity:
    """The current operation of one rank, and the spans that it has recorded in traced steps.

    Only the thread of the training loop calls it, except for `launch`, and `TracedCall.complete`.

    Attributes:
        step: index of the present step.
        is_active: `enter` has an effect: there is a file, or a recorder.
    """

    def __init__(self) -> None:
        self.step = 0
        self.is_active = False
        self._recorder: SpanRecorder | None = None
        self._bucket: TracedCall | None = None
        self._thread = threading.get_ident()
        self._map: mmap.mmap | None = None
        self._path: Path | None = None
        self._number = 0
        self._enclosing = ""
        self._operation, self._since, self._step = BETWEEN_STEPS, time.perf_counter(), 0
        self._texts: dict[tuple[str, str], str] = {}
        self._encoded = _EncodedTexts()
        self._calls: dict[str, _GroupCalls] = {}

    def open(
        self, run_dir: Path, rank: int, num_ranks: int, num_steps: int, stack: Path | None = None
    ) -> None:
        """Write the current operation to a file of the run folder from now on.

        All ranks call it at the same place of the run: from here on they count the calls of each group.

        Args:
            stack: file to which this process writes its stack when its launcher requests it.
        Raises:
            OSError: the file cannot be made.
        """
        self._calls = {}
        path = run_dir / FOLDER / f"rank-{rank}"
        path.parent.mkdir(exist_ok=True)
        draft = path.with_name(f"{path.name}.writing")
        pid = os.getpid()
        header = _HEADER.pack(
            _MAGIC,
            rank,
            num_ranks,
            num_steps,
            pid,
            process_start_ticks(pid),
            time.time() - time.perf_counter(),
            boot_id().encode(),
            socket.gethostname().encode()[:64],
        )
        with create_draft(draft) as file:
            # Written in full: on a full disk, a later write to a hole of a mapped file would end the process.
            name = b"" if stack is None else os.fsencode(stack)
            name = name if len(name) <= _STACK.size else b""
            file.write(header.ljust(_STACK_AT, b"\0") + name.ljust(_FILE_BYTES - _STACK_AT, b"\0"))
        with draft.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FILE_BYTES)
        self._path, self.is_active = path, True
        self._write(self._operation, self._since)
        draft.rename(path)

    def close(self) -> None:
        """Remove the file: a rank that has left does nothing."""
        mapped, self._map = self._map, None
        if mapped is not None:
            mapped.close()
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
                self._path.parent.rmdir()  # the last rank of a host removes the folder
        self._path, self.is_active = None, self._recorder is not None

    @property
    def recorder(self) -> SpanRecorder | None:
        """Recorder that gets the spans while steps are traced."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: SpanRecorder | None) -> None:
        self._recorder, self.is_active = recorder, recorder is not None or self._map is not None

    def enter(self, operation: str, now: float) -> None:
        """Begin an operation of the training loop, which ends the one before.

        Args:
            now: of `perf_counter`.
        """
        if self._enclosing or operation == self._operation == BETWEEN_STEPS:
            return
        if self._recorder is not None and self._operation != BETWEEN_STEPS:
            self._recorder.add("steps", self._operation, self._since, now, self._step)
        self._operation, self._since, self._step = operation, now, self.step
        if self._map is not None:  # as in `_write`; a call takes as long as the rest
            self._number = number = self._number + 1
            text = self._encoded[operation]
            _RECORD.pack_into(self._map, _RECORD_AT, number, self._step, now, text, b"", 0, 0, number)

    def leave_loop(self, *, inside_step: bool) -> None:
        """Show from now on that the user's own loop was left before the end of the run.

        Args:
            inside_step: before `step` was called for the present batch.
        """
        self.enter(LEFT_INSIDE_STEP if inside_step else LEFT_LOOP, time.perf_counter())
        self._enclosing = LEFT_INSIDE_STEP if inside_step else LEFT_LOOP

    def count_call(self, op: str, group: str, num_bytes: int) -> None:
        """Count a collective that this rank launches; every member of the group launches the same calls.

        Args:
            num_bytes: that this rank passes in.
        """
        if self._map is None:
            return
        calls = self._calls.get(group)
        if calls is None:
            calls = self._calls[group] = _GroupCalls(len(self._calls), group.encode()[:48])
        calls.number = number = calls.number + 1
        if calls.index < _MAX_GROUPS:
            at = _CALLS_AT + calls.index * _CALL.size
            _CALL.pack_into(self._map, at, calls.name, self._encoded[op], number, num_bytes)

    def latest_call(self, group: str) -> int:
        """Return the number of the latest call of a group since `open`, from 1; 0: none was counted."""
        calls = self._calls.get(group)
        return 0 if calls is None else calls.number

    @contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """Return a context manager around an operation between steps, whose phases do not count."""
        if self._enclosing:
            yield
            return
        self.enter(operation, time.perf_counter())
        self._enclosing = operation
        try:
            yield
        finally:
            self._enclosing = ""
            self.enter(BETWEEN_STEPS, time.perf_counter())

    def begin_wait(self, op: str, place: str, group: str = "", call: int = 0, num_bytes: int = 0) -> str:
        """Begin to wait for a collective; return its text for `end_wait`.

        Args:
            place: the bucket or the group.
            group, call: the group, and the number of the call in it as of `latest_call`.
            num_bytes: that this rank has passed in.
        """
        text = self._texts.get((op, place))
        if text is None:
            text = self._texts[op, place] = f"{op}, {place}"
        shown = f"{self._enclosing}: {text}" if self._enclosing else text
        self._write(shown, time.perf_counter(), group or place, call, num_bytes)
        return text

    def end_wait(self, text: str, began: float, now: float) -> None:
        """End a wait: the rank continues with what it did before."""
        if self._recorder is not None:
            self._recorder.add("steps", f"wait: {text}", began, now, self.step)
        self._write(self._operation, self._since)

    def launch(self, op: str, place: str, num_bytes: int, num_ranks: int) -> TracedCall | None:
        """Return the bucket that a collective belongs to, or a call of its own; None outside of traces.

        The caller calls `complete` on it.

        Args:
            place: the group.
            num_ranks: of the group.
        """
        bucket = self.bucket
        if bucket is not None:
            bucket.ended = 0.0
            return bucket
        if self._recorder is None:
            return None
        values = {"group": place, "ranks": num_ranks}
        return TracedCall(f"{op}, {place}", num_bytes, self._recorder, self.step, values)

    @property
    def bucket(self) -> TracedCall | None:
        """The bucket whose sum this thread is launching or waiting for."""
        bucket = self._bucket
        # A thread that runs collectives in the background has its own order of buckets.
        return bucket if bucket is None or self._thread == threading.get_ident() else None

    @bucket.setter
    def bucket(self, bucket: TracedCall | None) -> None:
        self._bucket = bucket

    def place_of(self, group_name: str) -> str:
        """Return what the collective that is launched now is for: a bucket, or a group."""
        bucket = self.bucket
        return group_name if bucket is None else bucket.label

    def begin_bucket(self, bucket: TracedCall) -> None:
        """Begin the sum of a bucket; its collectives are launched now."""
        self._bucket, self._thread = bucket, threading.get_ident()
        # Zero outside of traces: its end adds no span, even if a trace has begun meanwhile.
        bucket.began = time.perf_counter() if self._recorder is not None else 0.0
        bucket.ended = 0.0

    def end_bucket(self, bucket: TracedCall) -> None:
        """Record the span of a bucket whose sum was waited for."""
        if self._recorder is not None and bucket.began:
            ended = bucket.ended or time.perf_counter()
            self._recorder.add(
                "buckets", bucket.label, bucket.began, ended, self.step, {"bytes": bucket.num_bytes}
            )

    def _write(
        self, operation: str, since: float, group: str = "", call: int = 0, num_bytes: int = 0
    ) -> None:
        if self._map is None:
            return
        self._number = number = self._number + 1
        text, name = self._encoded[operation], self._encoded[group][:48]
        _RECORD.pack_into(
            self._map, _RECORD_AT, number, self.step, since, text, name, call, num_bytes, number
        )


@dataclass(frozen=True)
class GroupCall:
    """The latest call of a group that a rank has launched.

    Args:
        op: its operation, as in "all_reduce".
        number: of calls of this group so far, this one included.
        num_bytes: that the rank has passed in.
    """

    op: str
    number: int
    num_bytes: int


@dataclass(frozen=True)
class RankOperation:
    """The current operation of a rank, as its file says.

    Args:
        rank: global rank.
        num_ranks, num_steps: of the run.
        operation: a phase, a collective that the rank waits for with its bucket or group, or the work between
            two steps.
        step: index of the step.
        since: when it began, in seconds since the epoch by the clock of the reader; of a rank of another
            host, as exact as the wall clocks agree.
        host, pid: its process.
        alive: False if the process has ended; None if it is on another host.
        group, call, num_bytes: of the call that the rank waits for: its group, its number in the group (0: it
            is not counted, as of a message) and its bytes; empty and 0 while it waits for none.
        calls: latest call of each group that the rank has launched calls of.
        number: of the record, which grows with every change.
        stack: file to which the process writes its stack on request; None: it writes none.
    """

    rank: int
    num_ranks: int
    num_steps: int
    operation: str
    step: int
    since: float
    host: str
    pid: int
    alive: bool | None
    group: str = ""
    call: int = 0
    num_bytes: int = 0
    calls: Mapping[str, GroupCall] = field(default_factory=dict)
    number: int = 0
    stack: Path | None = None

    @property
    def text(self) -> str:
        """The operation and its step in words, as in "all_reduce, bucket 3 of step 12"."""
        if self.alive is False:
            return f"ended in {self.operation} of step {self.step}"
        if self.operation == BETWEEN_STEPS:
            return f"after step {self.step}"
        return f"{self.operation} of step {self.step}"

    def record(self) -> dict[str, Any]:
        """Return the fields and the text as plain values, for JSON."""
        calls = {group: vars(call) for group, call in self.calls.items()}
        stack = None if self.stack is None else str(self.stack)
        return {**vars(self), "calls": calls, "stack": stack, "text": self.text}


def leave_request(run_dir: Path, host: str, pid: int) -> Path:
    """Return the file by which a process of a running job is asked to leave it."""
    return run_dir / FOLDER / f"leave-{pid}-{host}"


def read_operations(run_dir: Path) -> list[RankOperation]:
    """Return the current operation of each rank that has a file in a run folder, by rank.

    Files that are no such files, and those of ranks that the present job does not have, are left out.
    """
    found = [operation for path in (run_dir / FOLDER).glob("rank-*") if (operation := _read_file(path))]
    # An earlier job that was killed may have had more ranks.
    present = [one for one in found if one.alive is not False]
    num_ranks = min(present, key=lambda one: one.rank).num_ranks if present else math.inf
    return sorted((one for one in found if one.rank < num_ranks), key=lambda one: one.rank)


def _read_file(path: Path) -> RankOperation | None:
    if path.suffix:
        return None
    with suppress(OSError):
        for _ in range(100):  # until it was read between two writes
            data, again = (read_regular_file(path, _FILE_BYTES) for _ in range(2))
            if len(data) < _FILE_BYTES or not data.startswith(_MAGIC):
                return None
            number, *_, last_number = _RECORD.unpack_from(data, _RECORD_AT)
            if data == again and number == last_number:
                return _parse(data)
    return None


def _parse(data: bytes) -> RankOperation | None:
    _, rank, num_ranks, num_steps, pid, start, offset, boot, host = _HEADER.unpack_from(data)
    number, step, since, operation, group, call, num_bytes, _ = _RECORD.unpack_from(data, _RECORD_AT)
    (stack,) = _STACK.unpack_from(data, _STACK_AT)
    is_same_boot = bool(boot_id()) and _text(boot) == boot_id()
    if is_same_boot:
        offset = time.time() - time.perf_counter()
    if not math.isfinite(since + offset):
        return None
    # A container has the boot of its host, but a name and process ids of its own.
    is_here = is_same_boot and _text(host) == socket.gethostname()
    return RankOperation(
        rank=rank,
        num_ranks=num_ranks,
        num_steps=num_steps,
        operation=_text(operation),
        step=step,
        since=min(time.time(), since + offset),
        host=_text(host),
        pid=pid,
        alive=process_start_ticks(pid) == start if is_here else None,
        group=_text(group),
        call=call,
        num_bytes=num_bytes,
        calls=_parse_calls(data),
        number=number,
        stack=Path(os.fsdecode(stack.rstrip(b"\0"))) if stack.strip(b"\0") else None,
    )


def _parse_calls(data: bytes) -> dict[str, GroupCall]:
    rows = _CALL.iter_unpack(data[_CALLS_AT : _CALLS_AT + _MAX_GROUPS * _CALL.size])
    return {_text(group): GroupCall(_text(op), number, size) for group, op, number, size in rows if number}


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")
