"""Choosing files, holding some out, and windows over tokens."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data.loader import SampleLoader
from paceline.data.sample_order import KeyedOrder
from paceline.data.text_corpus import TextWindows, corpus_files, open_corpus, split_files
from paceline.data.token_file import TextFile
from paceline.data.tokenizer import ByteTokenizer
from paceline.data.work import LockstepWork
from paceline.errors import DataError
from paceline.recipe import LoaderRecipe

BYTES = ByteTokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    hidden = (".hidden", ".git/config", "__pycache__/x.pyc")
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.md", *hidden):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the text of {name}\n" * 5)
    return root


def names(files: list[Path], root: Path) -> list[str]:
    return [file.relative_to(root).as_posix() for file in files]


def test_files_folders_and_patterns(folder: Path) -> None:
    assert names(corpus_files(str(folder)), folder) == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.md"]
    assert names(corpus_files(str(folder / "b.txt")), folder) == ["b.txt"]
    assert names(corpus_files(str(folder / "**/*.txt")), folder) == ["a.txt", "b.txt", "sub/c.txt"]
    assert names(corpus_files("sub/*.txt", folder), folder) == ["sub/c.txt"]


def test_several_specs_keep_their_order_and_name_a_file_once(folder: Path) -> None:
    assert names(corpus_files(["sub", "b.txt", "*.txt"], folder), folder) == [
        "sub/c.txt",
        "sub/deep/d.md",
        "b.txt",
        "a.txt",
    ]


@pytest.mark.parametrize("spec", ["nowhere", "*.none", "empty", "s3://bucket/text"])
def test_what_is_not_there_is_an_error_with_a_next_step(folder: Path, spec: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match="no text files found") as caught:
        corpus_files(["a.txt", spec], folder)
    assert spec in caught.value.what
    assert "stdlib" in caught.value.next_step
    with pytest.raises(DataError, match="no text was named"):
        corpus_files([])


def test_the_standard_library_is_python_text_without_tests() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    files = corpus_files("stdlib")
    assert files == corpus_files("stdlib")
    found = names(files, root)
    assert {"argparse.py", "json/decoder.py"} <= set(found)
    assert len(found) == len(set(found))
    assert all(name.endswith(".py") for name in found)
    assert not {"test", "tests", "site-packages", "encodings"} & {
        part for name in found for part in name.split("/")
    }
    assert not [name for name in found if name.startswith(("_sysconfigdata", "sitecustomize"))]
    assert sum(file.stat().st_size for file in files) > 4_000_000


def text_files(*contents: str) -> list[TextFile]:
    return [TextFile(Path(f"{i}.txt"), len(content), content) for i, content in enumerate(contents)]


@pytest.mark.capability("M1")
def test_held_out_files_are_disjoint_complete_and_about_the_fraction() -> None:
    files = text_files(*(f"{i}" * (50 + i) for i in range(400)))
    total_bytes = sum(file.num_bytes for file in files)
    chosen = set()
    for seed in range(5):
        train, held_out = split_files(files, 0.1, seed)
        assert sorted(train + held_out, key=files.index) == files
        assert not set(train) & set(held_out)
        assert 0.09 < sum(file.num_bytes for file in held_out) / total_bytes <= 0.1
        assert (train, held_out) == split_files(files, 0.1, seed)
        chosen.add(tuple(held_out))
    assert len(chosen) == 5


def test_the_split_depends_on_content_not_on_names_or_order() -> None:
    files = text_files(*(f"text {i}" for i in range(50)))
    moved = [
        TextFile(Path("/elsewhere") / file.path, file.num_bytes, file.digest) for file in reversed(files)
    ]
    _, held_out = split_files(files, 0.2)
    _, moved_out = split_files(moved, 0.2)
    assert {file.digest for file in held_out} == {file.digest for file in moved_out}


def test_copies_of_a_file_are_on_one_side_and_all_count() -> None:
    files = text_files(
        *["the licence, in every folder"] * 80, *(f"the text of file number {i:03}" for i in range(20))
    )
    for seed in range(30):
        train, held_out = split_files(files, 0.1, seed)
        assert not {file.digest for file in train} & {file.digest for file in held_out}
        assert len(held_out) in (9, 10)


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_no_part_is_empty(fraction: float) -> None:
    for files in (text_files("a", "bb"), text_files("a" * 999, "b" * 998, "c")):
        train, held_out = split_files(files, fraction)
        assert train
        assert held_out


def test_one_file_cannot_be_held_out_by_file() -> None:
    with pytest.raises(DataError, match="nothing can be held out"):
        split_files(text_files("a", "a"), 0.5)


def test_a_corpus_holds_whole_files_out(folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(folder), BYTES, tmp_path / "cache", held_out=0.3)
    train, held_out = (part.tobytes().split(b"\0")[:-1] for part in (corpus.train, corpus.held_out))
    assert sorted(train + held_out) == sorted(path.read_bytes() for path in corpus_files(str(folder)))
    assert (len(train), len(held_out)) == (3, 1)
    assert corpus.split == "1 of 4 files held out"


def test_a_corpus_is_the_same_elsewhere(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "far" / "away")
    here = open_corpus(str(folder), BYTES, tmp_path / "cache")
    there = open_corpus(str(copy), BYTES, tmp_path / "other")
    assert here.digest == there.digest
    assert np.array_equal(here.train, there.train)
    (copy / "a.txt").write_text("another text")
    assert open_corpus(str(copy), BYTES, tmp_path / "other").digest != here.digest
    assert open_corpus(str(folder), BYTES, tmp_path / "cache", held_out=0.6).digest != here.digest


def test_one_file_holds_its_end_out(folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(folder / "a.txt"), BYTES, tmp_path, held_out=0.25)
    content = (folder / "a.txt").read_bytes() + b"\0"
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == content
    assert len(corpus.held_out) == len(content) // 4
    assert "last 22 of 91 tokens held out" in corpus.split


def test_nothing_held_out_if_so_asked(folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(folder), BYTES, tmp_path, held_out=0)
    assert len(corpus.held_out) == 0
    assert corpus.train.tobytes().count(b"\0") == 4


def test_an_empty_corpus_and_a_wrong_fraction_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="the text is empty: 1 file, 0 bytes") as caught:
        open_corpus(str(tmp_path / "empty.txt"), BYTES, tmp_path)
    assert caught.value.next_step
    for fraction in (-0.1, 1.0):
        with pytest.raises(DataError, match="fraction of"):
            open_corpus(str(tmp_path), BYTES, tmp_path, held_out=fraction)


@pytest.mark.parametrize("num_tokens", [5, 8, 9, 10, 13, 100])
def test_every_token_but_the_first_is_a_target_once(num_tokens: int) -> None:
    windows = TextWindows(np.arange(num_tokens, dtype=np.uint8), 4)
    samples = [windows[i] for i in range(len(windows))]
    assert all(sample.dtype == torch.int64 and sample.shape == (5,) for sample in samples)
    targets = torch.cat([sample[1:] for sample in samples]).tolist()
    assert targets == list(range(1, 1 + windows.num_targets))
    assert num_tokens - 1 - windows.num_targets < 4
    assert all(torch.equal(sample[1:] - 1, sample[:-1]) for sample in samples)


def test_windows_end_and_a_short_text_is_an_error() -> None:
    windows = TextWindows(np.arange(9, dtype=np.uint16), 4)
    assert len(list(windows)) == 2  # type: ignore[call-overload]  # the sequence protocol: IndexError ends it
    for index in (-1, 2):
        with pytest.raises(IndexError):
            windows[index]
    with pytest.raises(DataError, match="4 tokens, and one window needs 5"):
        TextWindows(np.zeros(4, np.uint8), 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_windows_of_a_mapped_corpus_pass_through_the_loader(
    folder: Path, tmp_path: Path, workers: int
) -> None:
    corpus = open_corpus(str(folder), BYTES, tmp_path / "cache")
    windows = TextWindows(corpus.train, 16)
    assert np.shares_memory(windows.tokens, corpus.train)
    assert isinstance(corpus.train.base, np.memmap)
    micro_batches = LockstepWork(KeyedOrder(len(windows), 8, 1), 2, 1).micro_batches(0)
    loader = SampleLoader(windows, None, LoaderRecipe(workers=workers), torch.device("cpu"))
    with loader.open(micro_batches) as stream:
        for loaded in stream:
            expected = torch.stack([windows[int(i)] for i in loaded.micro_batch.indices])
            assert torch.equal(loaded.batch, expected)
            assert loaded.batch.shape == (4, 17)
