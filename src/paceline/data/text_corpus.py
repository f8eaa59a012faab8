"""Text as training data: its files, the split into training and held-out files, and windows of tokens.

Invariant: the choice of files, their order and the split depend on content and relative names, not on the
location of a folder, so every node gets the same. No file's content is in both parts of the split.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.token_file import TextFile, hash_text_file, map_tokens, tokens_digest
from paceline.data.tokenizer import Tokenizer
from paceline.errors import DataError, format_count
from paceline.state.keys import key

STDLIB = "stdlib"
# Third-party code, tests, and what programs wrote: not prose, or not the same everywhere.
_NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)
_NOT_STDLIB_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


def corpus_files(spec: str | Sequence[str], base_dir: Path | None = None) -> list[Path]:
    """Find the files of a corpus, each once: specs in the order given, within each by relative path.

    Args:
        spec: a file; a folder (all files below it but hidden ones); a pattern (`texts/**/*.txt`); `"stdlib"`,
            the sources of the running interpreter's standard library, without tests; or several of these.
        base_dir: folder of relative specs; None: the working directory.
    Raises:
        DataError: a spec matches no file.
    """
    specs = [spec] if isinstance(spec, str) else spec
    paths = [path for text in specs for path in _find_files(text, base_dir or Path())]
    if not paths:
        raise DataError("no text was named", next_step='name files, folders, patterns or "stdlib"')
    return list(dict.fromkeys(paths))


def _find_files(spec: str, base_dir: Path) -> list[Path]:
    if spec == STDLIB:
        return _stdlib_files()
    path = base_dir / Path(spec).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        paths = list(_walk(path, frozenset({"__pycache__"})))
    else:
        anchor = Path(path.anchor)
        pattern = path.relative_to(anchor).as_posix()
        paths = sorted(match for match in anchor.glob(pattern) if match.is_file())
    if not paths:
        raise DataError(
            f"no text files found for {spec!r}",
            where=str(path),
            next_step='name a file, a folder with files, a pattern such as "texts/**/*.txt", or "stdlib"',
        )
    return paths


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in _walk(root, _NOT_STDLIB)
        if path.suffix == ".py" and not path.name.startswith(_NOT_STDLIB_FILES)
    ]
    if not paths:
        raise DataError(
            "this Python has no sources of its standard library",
            where=str(root),
            next_step="name your own text files or folder instead",
        )
    return paths


def _walk(root: Path, skip: frozenset[str]) -> Iterator[Path]:
    """Yield the files below `root` in a fixed order, without hidden ones or links to folders."""
    for folder, subfolders, names in os.walk(root):
        # In place, because `os.walk` descends into the folders that are left in this list.
        subfolders[:] = sorted(name for name in subfolders if name not in skip and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and (path := Path(folder, name)).is_file():
                yield path


def split_files(
    files: Sequence[TextFile], fraction: float, seed: int = 0
) -> tuple[list[TextFile], list[TextFile]]:
    """Divide files into training and held-out ones, both in the order given; equal content stays together.

    Files are ranked by a hash of (seed, content) and held out while they fit in `fraction` of all bytes; the
    smallest goes if none fits. Neither part is empty.

    Raises:
        DataError: all files have the same content, so nothing can be held out by file.
    """
    num_bytes: dict[str, int] = {}
    for file in files:
        num_bytes[file.digest] = num_bytes.get(file.digest, 0) + file.num_bytes
    if len(num_bytes) < 2:
        raise DataError(
            "nothing can be held out by file: there is only one, or copies of one",
            where=str(files[0].path) if files else "",
            next_step="add files, or name the held-out files yourself",
        )
    budget_bytes = fraction * sum(num_bytes.values())
    held_out: set[str] = set()
    # By a hash of the content, so that the split does not depend on names or on the order of files.
    for digest in sorted(num_bytes, key=lambda digest: key(seed, "held-out", digest)):
        if num_bytes[digest] <= budget_bytes and len(held_out) + 1 < len(num_bytes):
            held_out.add(digest)
            budget_bytes -= num_bytes[digest]
    held_out = held_out or {min(num_bytes, key=lambda digest: (num_bytes[digest], digest))}
    return (
        [file for file in files if file.digest not in held_out],
        [file for file in files if file.digest in held_out],
    )


@dataclass(frozen=True, eq=False)
class TextCorpus:
    """The tokens for training and for evaluation, both mapped read-only.

    Args:
        train: uint8, uint16 or uint32 [N].
        held_out: of the same dtype [M]; empty if nothing was to be held out.
        digest: hash of content, tokenizer and split; equal on every node that sees the same data.
        split: a line about the split, such as "37 of 712 files held out".
    """

    train: NDArray[Any]
    held_out: NDArray[Any]
    digest: str
    split: str


def open_corpus(
    spec: str | Sequence[str],
    tokenizer: Tokenizer,
    cache_dir: Path,
    *,
    held_out: float = 0.05,
    seed: int = 0,
    base_dir: Path | None = None,
) -> TextCorpus:
    """Find, split and tokenise a corpus; tokens are kept in `cache_dir` and reused.

    All files are read through once to hash them. A corpus of one file is divided at a position instead, its
    last part held out.

    Args:
        spec, base_dir: as for `corpus_files`.
        held_out: fraction of the bytes that is never trained on, 0 <= held_out < 1.
        seed: of the split; keep it fixed to compare runs.
    Raises:
        DataError: no files, no text in them, or a file that cannot be read or encoded.
    """
    if not 0 <= held_out < 1:
        raise DataError(
            f"a held-out fraction of {held_out:g} is impossible", next_step="choose 0 <= fraction < 1"
        )
    files = [hash_text_file(path) for path in corpus_files(spec, base_dir)]
    if not any(file.num_bytes for file in files):
        raise DataError(
            f"the text is empty: {format_count(len(files), 'file')}, 0 bytes",
            where=str(spec),
            next_step="name others",
        )
    digest = tokens_digest(files, tokenizer)
    if held_out == 0 or len({file.digest for file in files}) == 1:
        tokens = map_tokens(files, tokenizer, cache_dir)
        cut = len(tokens) - int(held_out * len(tokens))
        split = f"last {len(tokens) - cut} of {len(tokens)} tokens held out"
        return TextCorpus(tokens[:cut], tokens[cut:], f"{digest}-{cut}", split)
    train_files, held_out_files = split_files(files, held_out, seed)
    tokens, held_out_tokens = (
        map_tokens(subset, tokenizer, cache_dir) for subset in (train_files, held_out_files)
    )
    digest = f"{digest}-{tokens_digest(held_out_files, tokenizer)}"
    return TextCorpus(
        tokens, held_out_tokens, digest, f"{len(held_out_files)} of {len(files)} files held out"
    )


class TextWindows:
    """A map-style dataset of windows: sample i has tokens i * context to (i + 1) * context, inclusive.

    A sample is int64 [context + 1]: inputs are `sample[:-1]`, targets `sample[1:]`. Neighbours share a token,
    so every token but the first is a target exactly once; up to context - 1 tokens at the end are left over.

    Args:
        tokens: any integer dtype [N]; not copied.
        context: number of targets in a window.
    Raises:
        DataError: there are fewer than context + 1 tokens.
    """

    def __init__(self, tokens: NDArray[Any], context: int) -> None:
        if len(tokens) < context + 1:
            raise DataError(
                f"the text is too short: {format_count(len(tokens), 'token')}, and one window needs"
                f" {context + 1}",
                next_step="add text, or lower the context length",
            )
        self.tokens = tokens
        self.context = context

    @property
    def num_targets(self) -> int:
        """Return the number of tokens that are predicted in one pass over all windows."""
        return len(self) * self.context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        return torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))

    def batch(self, indices: Sequence[int]) -> Tensor:
        """Return the windows at these indices, int64 [len(indices), context + 1].

        Raises:
            IndexError: a window does not exist.
        """
        positions = np.asarray(indices, dtype=np.int64)
        if positions.min() < 0 or positions.max() >= len(self):
            raise IndexError(f"windows {positions.min()} to {positions.max()} of {len(self)}")
        (stride,) = self.tokens.strides
        shape, strides = (len(self), self.context + 1), (self.context * stride, stride)
        # A view, because neighbouring windows share a token; only the chosen windows are copied.
        windows = as_strided(self.tokens, shape, strides, writeable=False)
        return torch.from_numpy(windows[positions].astype(np.int64))
