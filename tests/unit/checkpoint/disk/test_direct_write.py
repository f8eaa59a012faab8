"""Files that go past the system's memory hold the same bytes as others."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from paceline.checkpoint.disk import direct_write
from paceline.checkpoint.disk.checksum import CHECKSUM_KIND, recompute_checksum
from paceline.checkpoint.disk.direct_write import PAGE_BYTES, HashedFileWrite

pytestmark = pytest.mark.capability("N4")
BLOCK = 4 * PAGE_BYTES


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_write, "BLOCK_BYTES", BLOCK)


def written(path: Path, content: memoryview) -> str:
    found = HashedFileWrite(str(path), content)
    while not found.done:
        found.step()
    return found.checksum()


@pytest.mark.parametrize("begin", [0, PAGE_BYTES, 8])
@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES, BLOCK - 1, BLOCK, 2 * BLOCK + PAGE_BYTES + 3])
def test_a_file_holds_what_was_written(size: int, begin: int, tmp_path: Path) -> None:
    with mmap.mmap(-1, max(1, begin + size)) as memory:
        memory[:] = os.urandom(len(memory))
        (tmp_path / "x").write_bytes(b"older and longer" * BLOCK)
        right = memory[begin : begin + size]
        with memoryview(memory)[begin : begin + size] as content:
            assert written(tmp_path / "x", content) == recompute_checksum(right, CHECKSUM_KIND)
        assert (tmp_path / "x").read_bytes() == right


@pytest.mark.parametrize("refused", ["open", "write"])
def test_where_files_cannot_go_directly_they_go_as_usual(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems refuse the word, or accept it and refuse the writing."""
    calls: list[str] = []
    call = getattr(os, refused)

    def refuse(*given: int) -> int:
        direct = given[1] & os.O_DIRECT if refused == "open" else found_direct(given[0])
        calls.append("direct" if direct else "usual")
        if direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(call(*given))

    monkeypatch.setattr(os, refused, refuse)
    data = os.urandom(2 * BLOCK + 5)
    assert written(tmp_path / "x", memoryview(data)) == recompute_checksum(data, CHECKSUM_KIND)
    assert (tmp_path / "x").read_bytes() == data
    assert calls[:2] == ["direct", "usual"] and "direct" not in calls[1:]


def found_direct(file: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{file}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def test_a_full_disk_is_its_own_error_and_the_file_is_closed() -> None:
    found = HashedFileWrite("/dev/full", memoryview(bytes(BLOCK)))
    with pytest.raises(OSError) as caught:
        found.step()
    assert caught.value.errno == errno.ENOSPC and found.done
