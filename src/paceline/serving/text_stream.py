"""The text of a stream of tokens: whole characters only, and nothing of a stop string.

Invariant: the chunks of a stream, joined, are the full decode of its tokens up to the first stop string. A
chunk is never taken back: bytes that may still belong to a character are held back, and so is text that may
be the beginning of a stop string. Of several stop strings the one that is complete first counts, so that the
answer does not depend on how the text is divided into tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Protocol, Self

from paceline.data.tokenizer import BYTE_VOCABULARY, ByteTokenizer
from paceline.errors import DataError

if TYPE_CHECKING:
    import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # of SentencePiece: a byte of a character without a piece
_REPLACEMENT = "\ufffd"
_NUM_CONTEXT_TOKENS = 8
_REWRITING = ("WordPiece", "CTC")
"""Decoders that change text when more tokens follow, so that no chunk is final."""


class Detokenizer(Protocol):
    """A decoder of one stream of tokens."""

    def push(self, token: int) -> str:
        """Return the text that has become final with a token; often empty."""
        ...

    def finish(self) -> str:
        """Return the rest at the end of the stream; incomplete characters are U+FFFD."""
        ...


@dataclass(frozen=True)
class ServingTokenizer:
    """A tokenizer that encodes prompts and decodes streams.

    Args:
        library: of the `tokenizers` library; None: a token is a byte.
        vocab_size: one more than the largest id.
        vocabulary: hash of the ids of pieces, see `paceline.data.tokenizer`.
        end_tokens: tokens that end a text.
        adds_markers: whether prompts get the markers of the post-processor, such as the begin of a text.
    """

    library: tokenizers.Tokenizer | None
    vocab_size: int
    vocabulary: str
    end_tokens: frozenset[int]
    adds_markers: bool = True

    @classmethod
    def of_bytes(cls) -> Self:
        """Return the tokenizer whose tokens are bytes; byte 0 ends a text."""
        return cls(None, ByteTokenizer.vocab_size, BYTE_VOCABULARY, frozenset([ByteTokenizer.separator]))

    def with_end_tokens(self, end_tokens: frozenset[int]) -> Self:
        """Return the same tokenizer with other end tokens."""
        return replace(self, end_tokens=end_tokens)

    def encode(self, text: str, *, add_markers: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
            add_markers: False: a chat template has added them.
        """
        if self.library is None:
            return list(text.encode())
        return list(self.library.encode(text, add_special_tokens=add_markers and self.adds_markers).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        if self.library is None:
            return bytes(tokens).decode(errors="replace")
        return str(self.library.decode(list(tokens), skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for, special ones included."""
        if self.library is None:
            return bytes([token])
        piece = self.library.id_to_token(token) or ""
        if self._decoder == "ByteLevel":
            return _bytes_of_piece(piece)
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """Return the decoder of a stream.

        Args:
            context: the tokens before the stream, such as the prompt. They decide whether a piece at its
                beginning has its space.
        """
        if self.library is None or self._decoder == "ByteLevel":
            return _ByteDetokenizer(self)
        return _PieceDetokenizer(self, context)

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """The tokens that are no text."""
        if self.library is None:
            return frozenset()
        added = self.library.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @cached_property
    def _decoder(self) -> str:
        """The kind of the decoder; empty if there is none."""
        assert self.library is not None
        decoder = json.loads(self.library.to_str()).get("decoder") or {}
        return str(decoder.get("type", ""))

    def require_streamable(self, where: str) -> None:
        """Refuse a tokenizer whose text is final only at the end.

        Raises:
            DataError: its decoder rewrites text.
        """
        if self.library is not None and self._decoder in _REWRITING:
            raise DataError(
                f"the decoder of this tokenizer, {self._decoder}, changes text when more tokens follow",
                where=where,
                next_step="use a model with a byte-level or SentencePiece tokenizer",
            )

    def is_byte_piece(self, token: int) -> bool:
        """Return whether a token is one byte of a character that has no piece of its own."""
        return self.library is not None and bool(_BYTE_PIECE.fullmatch(self.library.id_to_token(token) or ""))


@cache
def _byte_characters() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary.

    Source: Radford et al. 2019, GPT-2: printable bytes stand for themselves, others for characters from 256.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _bytes_of_piece(piece: str) -> bytes:
    known = _byte_characters()
    # An added token can have characters that stand for no byte; it is then taken as it is written.
    return bytes(known[c] for c in piece) if all(c in known for c in piece) else piece.encode()


class _ByteDetokenizer:
    """The decoder of tokens that are bytes, in constant time per token."""

    def __init__(self, tokenizer: ServingTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        if token in self._tokenizer.special_tokens:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceDetokenizer:
    """The decoder of SentencePiece-style tokens, by the library, over a window of the last ones.

    A run of byte pieces is decoded as a whole: if it is not valid UTF-8, each byte of it becomes U+FFFD,
    those of complete characters included. So a run is held back until another piece follows.
    """

    def __init__(self, tokenizer: ServingTokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        plain = [token for token in context if token not in tokenizer.special_tokens]
        window = plain[-_NUM_CONTEXT_TOKENS:]
        # A context that ends within a character would change with the tokens that follow.
        self._window = window if window and self._is_closed(window) else []
        self._shown = self._decode(self._window)
        self._num_known = len(self._window)

    def push(self, token: int) -> str:
        if token in self._tokenizer.special_tokens:
            return ""
        self._window.append(token)
        if not self._is_closed(self._window):
            return ""
        text = self._decode(self._window)
        new, fresh = text[len(self._shown) :], self._window[self._num_known :]
        alone = self._decode(fresh)
        # Tokens without text cannot be the context of others: the next one would lose its space.
        if alone:
            self._window, self._shown = fresh, alone
        else:
            self._shown = text
        self._num_known = len(self._window)
        return new

    def finish(self) -> str:
        return self._decode(self._window)[len(self._shown) :]

    def _is_closed(self, window: Sequence[int]) -> bool:
        return not self._tokenizer.is_byte_piece(window[-1]) and not self._decode(window).endswith(
            _REPLACEMENT
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens) if tokens else ""


class TextStream:
    """The text of one answer.

    Args:
        detokenizer: new, of this stream.
        stop: strings that end the text and are not part of it.

    Attributes:
        stopped: whether a stop string was found; then the text is complete.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer, self._stop = detokenizer, tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that has become final with a token."""
        return "" if self.stopped else self._release(self._detokenizer.push(token), final=False)

    def finish(self) -> str:
        """Return the rest at the end of the tokens."""
        return "" if self.stopped else self._release(self._detokenizer.finish(), final=True)

    def _release(self, new: str, *, final: bool) -> str:
        text, self._held = self._held + new, ""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)[1]]
        if final:
            return text
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text with which a stop string begins, but does not end."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
