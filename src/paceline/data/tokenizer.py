"""Tokenizers: bytes, or a byte-level BPE from a `tokenizer.json`, and the hash of a vocabulary.

A model folder has a `tokenizer.json`, and beside it a `tokenizer_config.json` that names the end-of-text
token; both can be local or behind a URL. Files that would make the reader reserve memory without limit are
refused.

Invariant: every tokenizer restores text exactly, `decode(encode(text)) == text`; one that does not is refused
when it is loaded, because bits per byte would be wrong. Files are encoded in constant memory. Two files
with the same vocabulary have the same hash; how text is split before the look-up is not part of it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from fsspec.core import url_to_fs
from numpy.typing import NDArray

from paceline.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    import tokenizers

BYTE_VOCABULARY = "bytes"  # of a tokenizer whose tokens are bytes


def vocabulary_of(text: str) -> str:
    """Return the hash of the vocabulary of a `tokenizer.json`, 32 hexadecimal digits.

    Raises:
        ValueError: the text is no tokenizer.json.
    """
    try:
        content = json.loads(text)
        model = content["model"]
        added = sorted([entry["id"], entry["content"]] for entry in content.get("added_tokens") or [])
        pieces = _pieces(model["vocab"])
        merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or []]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"this is no tokenizer.json: {error!r}"[:200]) from None
    known = {piece for piece in pieces if isinstance(piece, str)}
    others = [[number, piece] for number, piece in added if piece not in known]
    values = json.dumps([pieces, others, merges], sort_keys=True).encode()
    return hashlib.sha256(values).hexdigest()[:32]


def _pieces(vocab: Any) -> Any:
    """Return the ids by piece; of a vocabulary with scores the list of pieces, in the order of ids."""
    return dict(vocab) if isinstance(vocab, dict) else [list(entry) for entry in vocab]


TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_MAX_FILE_BYTES = 2**28
_MAX_TOKENS = 2**24


def tokenizer_paths(source: str) -> tuple[str, str | None]:
    """Return the paths of tokenizer.json and tokenizer_config.json (None if `source` is a file)."""
    is_folder = (
        Path(source).is_dir() if "://" not in source else not source.partition("?")[0].endswith(".json")
    )
    if not is_folder:
        return source, None
    folder = source.rstrip("/")
    return f"{folder}/{TOKENIZER_FILE}", f"{folder}/{_CONFIG_FILE}"


def read_end_of_text(config: str | None) -> str | None:
    """Return the end-of-text token that a tokenizer_config.json names; None: it names none.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no valid file.
    """
    try:
        content = json.loads(_read_file(config)) if config else {}
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ValueError(f"{_CONFIG_FILE} is nested too deeply") from None
    token = _get("eos_token", content)
    token = _get("content", token) or token
    return token if type(token) is str else None


def _get(key: str, value: Any) -> Any:
    return value.get(key) if type(value) is dict else None


def read_tokenizer_json(source: str) -> str:
    """Read a tokenizer.json.

    Args:
        source: a path or a URL.
    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON text, or has impossible token ids.
    """
    text = _read_file(source)
    try:
        _check_ids(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return text


def _read_file(source: str) -> str:
    if "://" in source:
        filesystem, path = url_to_fs(source)
        with filesystem.open(path, "rb") as stream:
            data = bytes(stream.read(_MAX_FILE_BYTES + 1))
    else:
        if Path(source).exists() and not Path(source).is_file():
            raise OSError("not a regular file")
        with Path(source).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
    return data.decode()


def _check_ids(value: Any) -> None:
    """Check that every integer is a valid token id: in the vocabulary, `added_tokens` and post-processors."""
    # Level by level and not by recursion, because a file can be nested to any depth.
    level = [value]
    while level:
        inside: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inside += item.values()
            elif isinstance(item, list):
                inside += item
            elif type(item) is int and not 0 <= item < _MAX_TOKENS:
                raise ValueError(f"it has the number {str(item)[:20]}, which is no token's")
        level = inside


END_OF_TEXT = "<|endoftext|>"
_SEPARATORS = (END_OF_TEXT, "</s>")
_PROBE = ' Two  spaces,\ttab\r\n\n"Zürich" — 東京 🚲 \x00x=[1.5,-2]\n'


class Tokenizer(Protocol):
    """An encoder and decoder of text.

    Attributes:
        vocab_size: one more than the largest id.
        separator: the token at the end of every file.
        fingerprint: hash of everything that turns text into tokens.
        vocabulary: hash of the ids of pieces.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def separator(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def vocabulary(self) -> str: ...
    def encode(self, text: str) -> NDArray[Any]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...
    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[NDArray[Any]]: ...


class ByteTokenizer:
    """A tokenizer with one token per byte; any file is valid, and byte 0 is the separator."""

    vocab_size = 256
    separator = 0
    fingerprint = vocabulary = BYTE_VOCABULARY

    def encode(self, text: str) -> NDArray[np.uint8]:
        """Return token ids, uint8 [bytes of the text in UTF-8]."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return text; invalid UTF-8 becomes U+FFFD, since generated text may stop within a character."""
        return bytes(map(int, tokens)).decode(errors="replace")

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[NDArray[np.uint8]]:
        """Yield the ids of a file that is read in chunks of any size."""
        return (np.frombuffer(chunk, dtype=np.uint8) for chunk in chunks)


class BpeTokenizer:
    """A byte-level BPE of the `tokenizers` library; made by `load_tokenizer` and `train_bpe`.

    Args:
        tokenizer: of the library.
        where: its place, for messages.
        end: the token at the end of a file; None: one of the usual ones.

    Attributes:
        library: the tokenizer of the library.
    Raises:
        DataError: it does not restore text exactly, or has no separator.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, where: str, end: str | None = None) -> None:
        self.library = tokenizer
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())  # ids may have holes
        text = tokenizer.to_str()
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self.vocabulary = vocabulary_of(text)
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise DataError(
                "this tokenizer does not restore text exactly: it normalises or drops characters",
                where=where,
                next_step="use a byte-level tokenizer, for example one trained with `train_bpe`, or bytes",
            )
        self.separator = self._find_separator(where, (end, *_SEPARATORS) if end else _SEPARATORS)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return token ids, uint32 [N], without the markers that a post-processor adds."""
        return np.array(self.library.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return text with special tokens."""
        return str(self.library.decode(list(map(int, tokens)), skip_special_tokens=False))

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[NDArray[np.uint32]]:
        """Yield the ids of a UTF-8 file that is read in chunks, encoded in pieces that end at a line break.

        No token spans two pieces, so equal chunks give equal tokens, and the text is restored exactly.

        Raises:
            UnicodeDecodeError: the file is not UTF-8.
        """
        # Incremental, because a chunk can end within a character.
        decoder = codecs.getincrementaldecoder("utf-8")()
        pending = ""
        for chunk in chunks:
            text = pending + decoder.decode(chunk)
            cut = text.rfind("\n") + 1 or len(text)  # no line break in a whole chunk: cut where it ends
            pending = text[cut:]
            yield self.encode(text[:cut])
        yield self.encode(pending + decoder.decode(b"", final=True))

    def _find_separator(self, where: str, names: Sequence[str]) -> int:
        for name in names:
            token = self.library.token_to_id(name)
            if token is not None:
                return int(token)
        zero = self.encode("\0")
        if len(zero) == 1:
            return int(zero[0])
        raise DataError(
            f"this tokenizer has no end-of-text token: neither {', '.join(names)} nor byte 0",
            where=where,
            next_step=f"add {END_OF_TEXT} to its special tokens",
        )


def load_tokenizer(path: str | Path) -> BpeTokenizer:
    """Load a `tokenizer.json` (the format of the `tokenizers` library and of model hubs).

    Args:
        path: the file, or the folder of a model with the file in it: a path or a URL. Of a folder, the token
            that ends a text is the one that its `tokenizer_config.json` names.
    Raises:
        DataError: the file is missing or invalid, or the tokenizer does not restore text exactly.
        MissingExtraError: `tokenizers` is not installed.
    """
    library = import_tokenizers()
    try:
        source, config = tokenizer_paths(str(path))
        text, end = read_tokenizer_json(source), read_end_of_text(config)
    except (OSError, ImportError) as error:
        raise DataError(f"cannot read the tokenizer: {error}", next_step="check the path") from error
    except ValueError as error:
        raise _not_a_tokenizer(error, path) from error
    with tokenizer_errors(path):
        return BpeTokenizer(library.Tokenizer.from_str(text), str(path), end)


@contextmanager
def tokenizer_errors(path: str | Path) -> Iterator[None]:
    """Turn what the library raises for an invalid file into a DataError."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:  # the library raises plain Exception and PanicException
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise _not_a_tokenizer(error, path) from error
        raise


def _not_a_tokenizer(error: BaseException, path: str | Path) -> DataError:
    what = f"this is not a tokenizer.json: {str(error)[:200]}"
    return DataError(what, where=str(path), next_step="export it again")


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> BpeTokenizer:
    """Train a byte-level BPE on local text and save it as a `tokenizer.json`.

    Args:
        texts: pieces of text, in any order.
        vocab_size: the largest number of tokens: 256 bytes, `<|endoftext|>` and the merges; at least 257.
        path: of the new file, which is replaced atomically.
    Raises:
        DataError: `vocab_size` is too small.
        MissingExtraError: `tokenizers` is not installed.
    Source: Sennrich et al. 2016, arXiv:1508.07909; on bytes, Radford et al. 2019 (GPT-2).
    """
    if vocab_size < 257:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small: 256 bytes and {END_OF_TEXT} need 257",
            next_step="ask for 257 tokens or more, or use the byte tokenizer",
        )
    library = import_tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # In the same folder, where a rename is atomic; the process id keeps two writers apart.
    partial = Path(f"{path}.{os.getpid()}.tmp")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    partial.replace(path)
    return BpeTokenizer(tokenizer, str(path))


def import_tokenizers() -> Any:
    """Return the library `tokenizers`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError(
            "reading a tokenizer.json needs the `tokenizers` library, which is not installed",
            next_step='pip install "paceline[text]"',
        ) from error
    return tokenizers
