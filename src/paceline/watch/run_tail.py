"""Reading of `metrics.jsonl` and other files of records from another process, while a job appends to them.

`RunTail` reads all that is new. `preview_records` reads the beginning, the end and evenly spaced records
between them: a run of ten million steps has gigabytes of records, which take minutes to read. Steps are in
the file in ascending order, so lines at evenly spaced positions are a sample of the whole curve.

Invariant: reading never fails because of what is in the file, and never waits. Lines that are no valid
records are counted; a last line without its end is read once it has one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from paceline.observe.sinks import METRICS, rotated_files
from paceline.report.run_reader import parse_record

_MAX_LINE_BYTES = 2**24


class RunTail:
    """A position in the records of a run, which moves forward with every call.

    Args:
        folder: the run folder; the file need not be there yet.
        name: of the file.

    Attributes:
        num_damaged: lines that were no valid records.
        num_restarts: times that the file was replaced or cut, so that reading began again from the start.
        num_bytes_read, num_bytes: how far reading has come, and how much there is.
    """

    def __init__(self, folder: Path, name: str = METRICS) -> None:
        self._path = folder / name
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
        files = list(self._files())
        self.num_bytes = sum(size for _, _, size in files)
        numbers = [number for _, number, _ in files]
        position = numbers.index(self._file) if self._file in numbers else 0
        if self._file is not None and (self._file not in numbers or files[position][2] < self._offset):
            self._file, self._offset, self._bytes_before, position = None, 0, 0, 0
            self.num_restarts += 1
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

    def _files(self) -> Iterator[tuple[Path, tuple[int, int], int]]:
        """Yield path, device and inode, and size of each file, oldest first."""
        for path in (*rotated_files(self._path), self._path):
            with suppress(OSError):
                status = path.stat()
                if stat.S_ISREG(status.st_mode):  # a pipe would wait for a writer
                    yield path, (status.st_dev, status.st_ino), status.st_size

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


_END_BYTES = 2**15


def preview_records(folder: Path, num_samples: int = 300) -> list[Mapping[str, Any]]:
    """Return records of a run, in the order in which they were written, about `num_samples` of its middle.

    Files of up to 64 KiB are read whole. Lines that are no valid records are left out.
    """
    files = [
        (path, size) for path in (*rotated_files(folder / METRICS), folder / METRICS) if (size := _size(path))
    ]
    total = sum(size for _, size in files)
    records: list[Mapping[str, Any]] = []
    for number, (path, size) in enumerate(files):
        with suppress(OSError), path.open("rb") as file:
            share = max(1, num_samples * size // total)
            is_end = number in (0, len(files) - 1)
            lines = _sample_lines(file, size, share, is_end or size <= 2 * _END_BYTES)
            for line in lines:
                record = parse_record(line.decode("utf-8", "replace"))
                if record is not None:
                    records.append(record)
    return records


def _sample_lines(file: IO[bytes], size: int, num_samples: int, with_ends: bool) -> Iterator[bytes]:
    """Yield whole lines at evenly spaced positions, each once, and all lines at both ends."""
    if size <= 2 * _END_BYTES:
        yield from file.read(size).split(b"\n")[:-1]
        return
    first, last = (_END_BYTES, size - _END_BYTES) if with_ends else (0, size)
    if with_ends:
        yield from file.read(first).split(b"\n")[:-1]
    position = first
    for i in range(num_samples):
        position = max(position, first + (last - first) * i // num_samples)
        file.seek(position)
        file.readline(_MAX_LINE_BYTES)  # the rest of a line
        if file.tell() >= last:
            break
        yield file.readline(_MAX_LINE_BYTES)
        position = file.tell()
    if with_ends:
        file.seek(last)
        file.readline(_MAX_LINE_BYTES)
        yield from file.read(size - file.tell()).split(b"\n")[:-1]


def _size(path: Path) -> int:
    with suppress(OSError):
        status = path.stat()
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0
