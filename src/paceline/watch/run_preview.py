"""A preview of a run: its beginning, its end and evenly spaced records between them.

A run of ten million steps has gigabytes of records, which take minutes to read. Steps are in the file in
ascending order, so lines at evenly spaced positions are a sample of the whole curve, in milliseconds.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from paceline.observe.sinks import METRICS, rotated_files
from paceline.report.run_reader import parse_record

_END_BYTES = 2**15
_MAX_LINE_BYTES = 2**20


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
