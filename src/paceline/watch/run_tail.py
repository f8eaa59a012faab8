"""Reading of `metrics.jsonl` and other files of records from another process, while a job appends to them.

`RunTail` reads all that is new. `preview_records` reads the beginning, the end and evenly spaced records
between them: a run of ten million steps has gigabytes of records, which take minutes to read.
`last_recorded_step` reads the end. Steps are in
the file in ascending order, so lines at evenly spaced positions are a sample of the whole curve.

Invariant: reading never fails because of what is in the file, and never waits. Lines that are no valid
records are counted; a last line without its end is read once it has one.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from paceline.observe.sinks import METRICS, rotated_files
from paceline.report.run_reader import parse_record

_MAX_LINE_BYTES = 2**24


def record_files(path: Path) -> Iterator[tuple[Path, tuple[int, int], int]]:
    """Yield path, device and inode, and size of each file of records, full ones first, oldest first."""
    for file in (*rotated_files(path), path):
        with suppress(OSError):
            status = file.stat()
            if stat.S_ISREG(status.st_mode):  # a pipe would wait for a writer
                yield file, (status.st_dev, status.st_ino), status.st_size


def records_size(folder: Path) -> int:
    """Return the number of bytes of all records of a run so far."""
    return sum(size for _, _, size in record_files(folder / METRICS))


class RunTail:
    """A position in the records of a run, which moves forward with every call.

    Args:
        folder: the run folder; the file need not be there yet.
        name: of the file.
        start_bytes: how much of the records, which `records_size` returned, is left out.

    Attributes:
        num_damaged: lines that were no valid records.
        num_restarts: times that the file was replaced or cut, so that reading began again from the start.
        num_bytes_read, num_bytes: how far reading has come, and how much there is.
    """

    def __init__(self, folder: Path, name: str = METRICS, start_bytes: int = 0) -> None:
        self._path, self._start_bytes = folder / name, start_bytes
        self._file: tuple[int, int] | None = None  # device and inode of the file that is being read
        self._offset = 0
        self._bytes_before = 0  # of the files before it
        self.num_damaged = self.num_restarts = self.num_bytes = 0

    @property
    def num_bytes_read(self) -> int:
        """Bytes that were read, of all files."""
        return self._bytes_before + self._offset

    def read(self, max_bytes: int = 2**23) -> list[Mapping[str, Any]]:
        """Return the records since the last call, at most about `max_bytes` of them; empty if there are none.

        A file that was replaced or cut is read again from the start; `num_restarts` rises then.
        """
        files = list(record_files(self._path))
        self.num_bytes = sum(size for _, _, size in files)
        numbers = [number for _, number, _ in files]
        position = numbers.index(self._file) if self._file in numbers else 0
        if self._file is not None and (self._file not in numbers or files[position][2] < self._offset):
            self._file, self._offset, self._bytes_before, position = None, 0, 0, 0
            self.num_restarts += 1
        elif self._file is None and self._start_bytes:
            position = self._skip(files)
        records: list[Mapping[str, Any]] = []
        for path, number, size in files[position:]:
            if number != self._file:
                self._bytes_before += self._offset
                self._file, self._offset = number, 0
            if size > self._offset:
                records += self._read_lines(path, number, max_bytes)
            if self._offset < size:  # the rest is for the next call, and so are later files
                break
        return records

    def _skip(self, files: Sequence[tuple[Path, tuple[int, int], int]]) -> int:
        """Go to the position at which reading starts; return the index of its file."""
        left, self._start_bytes = self._start_bytes, 0
        for position, (_, number, size) in enumerate(files):
            if left <= size:
                self._file, self._offset = number, left
                return position
            left -= size
            self._bytes_before += size
        self._bytes_before = 0  # there is less than that, so it is another file
        return 0

    def _read_lines(self, path: Path, number: tuple[int, int], max_bytes: int) -> list[Mapping[str, Any]]:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != number:
                    return []  # it was renamed in between; the next call sees that
                file.seek(self._offset)
                block = file.read(max_bytes)
                if b"\n" not in block and len(block) == max_bytes:
                    block += file.readline(_MAX_LINE_BYTES)
        except OSError:
            return []
        end = block.rfind(b"\n") + 1
        if end == 0 and len(block) < _MAX_LINE_BYTES:
            return []
        self._offset += end or len(block)
        records = []
        for line in filter(None, block[: end or len(block)].split(b"\n")):
            record = parse_record(line.decode("utf-8", "replace"))
            if record is None:
                self.num_damaged += 1
            else:
                records.append(record)
        return records


_END_BYTES = 2**13
_WHOLE_BYTES, _WHOLE_PART_BYTES = 2**16, 2**19  # up to which a run, or a part of it, is read whole
_SEARCH_BYTES = 2**14  # in which there is a step, unless something is wrong with the file


def preview_records(
    folder: Path, num_samples: int = 300, first: int = 0, end: int | None = None
) -> list[Mapping[str, Any]]:
    """Return records of a run, in the order in which they were written, about `num_samples` of its middle.

    Little is read whole; of more than 64 KiB, or 512 KiB of a part, all records at both ends and single ones
    between them. Lines that are no valid records are left out.

    Args:
        first, end: only the part of the files that has these steps.
    """
    with _JoinedFiles(folder) as files:
        start = files.find_step(first) if first > 0 else 0
        # A part is looked at closely, so all of it is read if that takes no longer than some samples do.
        whole_bytes = _WHOLE_BYTES if first == 0 and end is None else _WHOLE_PART_BYTES
        stop = files.num_bytes
        if end is not None:
            stop = min(stop, files.find_step(end) + 2 * _SEARCH_BYTES)
        lines = _sample_lines(files, start, stop, num_samples, whole_bytes)
        records = (parse_record(line.decode("utf-8", "replace")) for line in lines)
        return [record for record in records if record is not None]


class _JoinedFiles:
    """The files of a run as one text, which is read at any position; what was removed is empty."""

    def __init__(self, folder: Path) -> None:
        self._files: list[tuple[IO[bytes], int, int]] = []
        self.num_bytes = 0
        for path in (*rotated_files(folder / METRICS), folder / METRICS):
            with suppress(OSError):
                if not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for a writer
                    continue
                file = path.open("rb")
                size = os.fstat(file.fileno()).st_size
                self._files.append((file, self.num_bytes, size))
                self.num_bytes += size

    def __enter__(self) -> _JoinedFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        for file, _, _ in self._files:
            file.close()

    def read(self, position: int, num_bytes: int) -> bytes:
        """Return up to `num_bytes` from a position on; they may be in several files."""
        parts = []
        for file, begin, size in self._files:
            offset = max(0, position - begin)
            if offset < size and position + num_bytes > begin:
                with suppress(OSError):
                    wanted = position + num_bytes - max(begin, position)
                    parts.append(os.pread(file.fileno(), min(wanted, size - offset), offset))
        return b"".join(parts)

    def read_line(self, position: int, end: int) -> tuple[bytes, int]:
        """Return the first whole line that begins after `position`, and where it ends.

        Returns:
            An empty line if there is none before `end`.
        """
        num_bytes = 2**12
        while True:
            block = self.read(position, num_bytes)
            begin = block.find(b"\n") + 1
            stop = block.find(b"\n", begin) + 1
            if begin and stop:
                return (block[begin:stop], position + stop) if position + stop <= end else (b"", end)
            if len(block) < num_bytes or num_bytes > _MAX_LINE_BYTES:
                return b"", end
            num_bytes *= 4

    def find_step(self, step: int) -> int:
        """Return a position at most 16 KiB before the first record of a step, or of a later one.

        Steps are taken to ascend; where a run was resumed at an earlier one, the position may be elsewhere.
        """
        low, high = 0, self.num_bytes
        while high - low > _SEARCH_BYTES:
            middle = (low + high) // 2
            found = self._step_after(middle, high)
            if found is None or found >= step:
                high = middle
            else:
                low = middle
        return low

    def _step_after(self, position: int, end: int) -> int | None:
        while position < end:
            line, position = self.read_line(position, end)
            record = parse_record(line.decode("utf-8", "replace"))
            if record is not None and record["event"] == "step":
                return int(record["step"])
        return None


_TAIL_BYTES = (2**16, 2**22)  # the last record of a step is in the first, unless others follow it


def last_recorded_step(folder: Path) -> int:
    """Return the step of the last record that counts, from the end of the files; -1 if there is none.

    Records that a resume or a roll-back has undone do not count. A last line that was cut is no record, but
    one that only lacks its end is.
    """
    with _JoinedFiles(folder) as files:
        for num_bytes in _TAIL_BYTES:
            lines = files.read(max(0, files.num_bytes - num_bytes), num_bytes).split(b"\n")
            step = _last_step(parse_record(line.decode("utf-8", "replace")) for line in reversed(lines))
            if step is not None or num_bytes >= files.num_bytes:
                return -1 if step is None else step
    return -1


def _last_step(records: Iterable[Mapping[str, Any] | None]) -> int | None:
    """Return the step of the first record that counts, of records from the last one on; None without one."""
    first_undone = math.inf
    for record in records:
        match record:
            case {"event": "step", "step": int(step)} if step < first_undone:
                return step
            case {"event": "run", "step": int(step)}:
                first_undone = min(first_undone, step)
            case {"event": "roll-back"}:
                return -1  # the steps before it may be undone, and none has followed
    return None


def _sample_lines(
    files: _JoinedFiles, start: int, stop: int, num_samples: int, whole_bytes: int
) -> Iterator[bytes]:
    """Yield whole lines at evenly spaced positions, each once, and all lines at both ends."""
    if stop - start <= whole_bytes:
        # Of a part that begins within a line, that line is no valid record.
        yield from files.read(start, stop - start).split(b"\n")
        return
    first, last = start + _END_BYTES, stop - _END_BYTES
    yield from files.read(start, _END_BYTES).split(b"\n")[:-1]
    position = first
    for i in range(num_samples):
        position = max(position, first + (last - first) * i // num_samples)
        line, position = files.read_line(position, last)
        if position >= last:
            break
        yield line
    yield from files.read(last, _END_BYTES).split(b"\n")[1:]
