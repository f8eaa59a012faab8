"""Files are written in full, and do not fill the memory that the system keeps files in."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from paceline.checkpoint.disk import direct_write
from paceline.checkpoint.storage import StorageFolder

pytestmark = pytest.mark.capability("N4")
WINDOW = 2**20
SIZES = [0, 1, WINDOW - 1, WINDOW, 3 * WINDOW + 5, 24 * WINDOW]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_write, "_WINDOW_BYTES", WINDOW)


def written(folder: Path, num_bytes: int, block: int) -> tuple[Path, bytes]:
    data = os.urandom(num_bytes)
    view = memoryview(data)
    StorageFolder(str(folder)).write("a/b", [view[i : i + block] for i in range(0, num_bytes, block)])
    return folder / "a" / "b", data


@pytest.mark.parametrize("block", [WINDOW // 2 + 1, 2 * WINDOW])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_file_holds_what_was_written(num_bytes: int, block: int, tmp_path: Path) -> None:
    path, data = written(tmp_path, num_bytes, block)
    assert path.read_bytes() == data


def kept_in_memory(path: Path) -> float:
    """The share of a file's pages that the system has in memory; reads none of them."""
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), size) as view:
        start = ctypes.c_char.from_buffer(view)
        assert ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(size), pages) == 0
        del start
    return sum(page & 1 for page in pages) / len(pages)


def test_memory_is_not_filled_with_what_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: without asking the system to forget, all of it stays."""
    path, _ = written(tmp_path, 24 * WINDOW, WINDOW)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fadvise", lambda *_: None)
        twin, _ = written(tmp_path / "twin", 24 * WINDOW, WINDOW)
    if kept_in_memory(twin) < 0.9:
        pytest.skip("this system forgets files by itself")
    if os.statvfs(tmp_path).f_fsid == 0:
        pytest.skip("the folder is in memory")
    assert kept_in_memory(path) <= 2 / 24


def test_where_the_system_cannot_be_asked_files_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_write, "_sync_file_range", None)
    monkeypatch.delattr(os, "posix_fadvise")
    path, data = written(tmp_path, 5 * WINDOW + 7, WINDOW)
    assert path.read_bytes() == data


def test_a_disk_that_fails_at_the_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        written(tmp_path, 3 * WINDOW, WINDOW)
