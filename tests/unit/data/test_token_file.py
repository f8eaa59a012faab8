"""Token files: whole or absent, written once by whoever is first, in constant memory."""

from __future__ import annotations

import fcntl
import multiprocessing
import random
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.token_file import TextFile, hash_text_file, map_tokens, token_type, tokens_digest
from paceline.data.tokenizer import ByteTokenizer, train_bpe
from paceline.data.work import split_evenly
from paceline.errors import DataError

BYTES = ByteTokenizer()


@pytest.fixture
def files(tmp_path: Path) -> list[TextFile]:
    rng = random.Random(1)
    paths = [tmp_path / f"{i}.bin" for i in range(7)]
    for path in paths:
        path.write_bytes(rng.randbytes(rng.randrange(1000)))
    return [hash_text_file(path) for path in paths]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def test_tokens_are_the_files_each_with_its_end(files: list[TextFile], cache: Path) -> None:
    tokens = map_tokens(files, BYTES, cache)
    assert tokens.dtype == np.uint8
    assert tokens.tobytes() == b"".join(file.path.read_bytes() + b"\0" for file in files)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.capability("M1")
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 9])
def test_file_shards_are_disjoint_and_complete(files: list[TextFile], cache: Path, parts: int) -> None:
    """Files dealt to any number of nodes: their tokens, one after another, are the tokens of the whole."""
    shards = [[files[i] for i in split_evenly(len(files), parts, part)] for part in range(parts)]
    tokens = [map_tokens(shard, BYTES, cache) for shard in shards]
    assert np.array_equal(np.concatenate(tokens), map_tokens(files, BYTES, cache))


def test_the_type_is_the_smallest_that_holds_every_token() -> None:
    sizes = [256, 257, 65_536, 65_537]
    assert [token_type(size) for size in sizes] == [np.uint8, np.uint16, np.uint16, np.uint32]


def test_the_name_depends_on_content_order_and_tokenizer_only(files: list[TextFile]) -> None:
    class Other(ByteTokenizer):
        fingerprint = "other"

    moved = [TextFile(Path("elsewhere"), file.num_bytes, file.digest) for file in files]
    assert tokens_digest(moved, BYTES) == tokens_digest(files, BYTES)
    different = [files[::-1], files[1:]]
    assert len({tokens_digest(some, BYTES) for some in [files, *different]}) == 3
    assert tokens_digest(files, Other()) != tokens_digest(files, BYTES)


class Logging(ByteTokenizer):
    """Writes a line for each file that it encodes, and may fail half way."""

    def __init__(self, log: Path, fail: bool = False) -> None:
        self.log = log
        self.fail = fail

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[Any]:
        with self.log.open("a") as log:
            log.write("file\n")
        yield from super().encode_chunks(chunks)
        if self.fail:
            raise KeyboardInterrupt


def test_tokens_are_written_once_and_found_again(files: list[TextFile], cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for _ in range(3):
        map_tokens(files, Logging(log), cache)
    assert log.read_text().count("file") == len(files)


def _map(files: list[TextFile], cache: Path, log: Path, barrier: Any, results: Any) -> None:
    barrier.wait(timeout=120)
    results.put(map_tokens(files, Logging(log), cache).tobytes())


def test_many_processes_at_once_write_once(files: list[TextFile], cache: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results, log = context.Barrier(4), context.Queue(), tmp_path / "log"
    processes = [context.Process(target=_map, args=(files, cache, log, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    contents = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(100)
    assert contents == {map_tokens(files, BYTES, cache).tobytes()}
    assert log.read_text().count("file") == len(files)


def test_an_interrupted_write_leaves_nothing_and_is_done_again(
    files: list[TextFile], cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        map_tokens(files, Logging(tmp_path / "log", fail=True), cache)
    assert [path.name for path in cache.iterdir()] == ["lock"]
    assert len(map_tokens(files, Logging(tmp_path / "log"), cache)) == 7 + sum(f.num_bytes for f in files)


def test_the_remains_of_a_killed_writer_do_no_harm(files: list[TextFile], cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / f"{tokens_digest(files, BYTES)}.tmp").write_bytes(b"x" * 100_000)
    assert len(map_tokens(files, BYTES, cache)) == 7 + sum(file.num_bytes for file in files)
    assert not list(cache.glob("*.tmp"))


def test_waiting_for_another_writer_has_a_deadline(files: list[TextFile], cache: Path) -> None:
    cache.mkdir(parents=True)
    with (cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"more than 0\.1 s") as caught:
            map_tokens(files, BYTES, cache, deadline_seconds=0.1)
        assert caught.value.where.endswith("lock")
    assert len(map_tokens(files, BYTES, cache, deadline_seconds=0.1))


def test_writing_takes_constant_memory(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"0123456789abcdef" * (1 << 20))
    tracemalloc.start()
    tokens = map_tokens([hash_text_file(path)], BYTES, cache)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(tokens) == (16 << 20) + 1
    assert peak_bytes < 4 << 20


def test_no_files_give_no_tokens(cache: Path) -> None:
    assert map_tokens([], BYTES, cache).shape == (0,)


def test_a_file_that_changed_is_an_error(files: list[TextFile], cache: Path) -> None:
    files[3].path.write_bytes(b"changed")
    with pytest.raises(DataError, match="changed") as caught:
        map_tokens(files, BYTES, cache)
    assert caught.value.where == str(files[3].path)
    assert not list(cache.glob("*.uint8"))


def test_a_file_that_is_gone_is_an_error(files: list[TextFile], cache: Path) -> None:
    files[3].path.unlink()
    with pytest.raises(DataError, match="cannot read a text file"):
        map_tokens(files, BYTES, cache)


def test_a_cache_that_cannot_be_written_is_an_error(files: list[TextFile]) -> None:
    with pytest.raises(DataError, match="cannot write to the token cache"):
        map_tokens(files, BYTES, files[0].path / "below-a-file")


@pytest.mark.capability("M6")
def test_bpe_tokens_of_files_give_the_text_back(tmp_path: Path, cache: Path) -> None:
    text = "def ring(x):\r\n\treturn x + 'Ω≈ç√'\n\n" * 5_000
    path = tmp_path / "a.py"
    path.write_text(text, newline="", encoding="utf-8")
    tokenizer = train_bpe([text], 300, tmp_path / "tokenizer.json")
    tokens = map_tokens([hash_text_file(path)], tokenizer, cache)
    assert tokens.dtype == np.uint16
    assert tokens[-1] == tokenizer.separator
    assert tokenizer.decode(tokens[:-1]) == text
    assert len(tokens) < 0.6 * len(text)


def test_bpe_refuses_a_file_that_is_not_text(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad").write_bytes(b"good\nbad \xff\n")
    tokenizer = train_bpe(["good bad"], 260, tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="not UTF-8") as caught:
        map_tokens([hash_text_file(tmp_path / "bad")], tokenizer, cache)
    assert caught.value.where.endswith("bad")
    assert "byte tokenizer" in caught.value.next_step


DAMAGES = {
    "a bit": lambda data: data[:40] + bytes([data[40] ^ 4]) + data[41:],
    "cut short": lambda data: data[:-7],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"more",
    "nothing but zeros": lambda data: bytes(len(data)),
}


@pytest.mark.capability("N13", "M1")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("what", ["tokens", "seal"])
def test_a_token_file_that_is_damaged_is_made_anew(
    what: str, damage: str, files: list[TextFile], cache: Path
) -> None:
    written = map_tokens(files, BYTES, cache).tobytes()
    (place,) = (path for path in cache.iterdir() if path.suffix == ".uint8")
    harmed = place if what == "tokens" else place.with_name(f"{place.name}.seal")
    harmed.write_bytes(DAMAGES[damage](harmed.read_bytes()))
    assert map_tokens(files, BYTES, cache).tobytes() == written
    assert place.read_bytes() == written


@pytest.mark.capability("N13")
def test_tokens_without_a_seal_are_not_believed(files: list[TextFile], cache: Path) -> None:
    """As an older version has left them, or a power cut between two writes."""
    written = map_tokens(files, BYTES, cache).tobytes()
    (place,) = (path for path in cache.iterdir() if path.suffix == ".uint8")
    place.with_name(f"{place.name}.seal").unlink()
    place.write_bytes(bytes(len(written)))
    assert map_tokens(files, BYTES, cache).tobytes() == written


def test_what_is_in_use_is_not_changed_when_it_is_made_anew(files: list[TextFile], cache: Path) -> None:
    tokens = map_tokens(files, BYTES, cache)
    written = tokens.tobytes()
    (place,) = (path for path in cache.iterdir() if path.suffix == ".uint8")
    place.with_name(f"{place.name}.seal").unlink()
    map_tokens(files, BYTES, cache)
    assert tokens.tobytes() == written
