"""Chunks of a stream, joined, are the full decode, with real tokenizers of three kinds."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="needs paceline[text]")
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.data.tokenizer import train_bpe
from paceline.errors import DataError
from paceline.serving.load_model import read_tokenizer
from paceline.serving.text_stream import ServingTokenizer, TextStream

WORDS = "the cat — der Käse, 東京 🚲 two  spaces\nand a line. " * 3
KINDS = ("bytes", "byte-level", "sentencepiece", "metaspace")
UNIVERSAL = "".join(chr(c) for c in range(0x20, 0x7F))


@functools.cache
def tokenizer_of(kind: str) -> ServingTokenizer:
    """Return a tokenizer that was built here: no hub."""
    if kind == "bytes":
        return ServingTokenizer.of_bytes()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.json")
        if kind == "byte-level":
            train_bpe([WORDS], 300, file)
            library = Tokenizer.from_file(str(file))
            # One that has characters which stand for no byte, and one that is not special.
            library.add_tokens([AddedToken("<té st>"), AddedToken("<tool>", special=False)])
        else:
            library = _sentencepiece() if kind == "sentencepiece" else _metaspace()
        library.save(str(file))
        return read_tokenizer(str(file))


def _sentencepiece() -> Tokenizer:
    """Return one like Llama's: pieces with a space in front, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehikst.,é"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("c", "a"), ("ca", "t")]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    library = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def _metaspace() -> Tokenizer:
    pieces = [("</s>", 0.0), ("▁", -2.0), *((c, -3.0) for c in UNIVERSAL), ("▁the", -1.0), ("▁cat", -1.0)]
    library = Tokenizer(models.Unigram(pieces, unk_id=0))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    library.add_special_tokens(["</s>"])
    return library


def joined(tokenizer: ServingTokenizer, context: Sequence[int], tokens: Sequence[int]) -> str:
    stream = TextStream(tokenizer.detokenizer(context))
    return "".join([*map(stream.push, tokens), stream.finish()])


@pytest.mark.capability("W3", clause="concatenation equals full decode, UTF-8 safe")
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_chunks_joined_are_the_full_decode(kind: str, data: st.DataObject) -> None:
    """Of any tokens: valid text, halves of characters, special tokens, in any order."""
    tokenizer = tokenizer_of(kind)
    any_token = st.integers(0, tokenizer.vocab_size - 1)
    text = st.text(max_size=12).map(lambda value: tokenizer.encode(value, add_markers=False))
    tokens = data.draw(st.one_of(st.lists(any_token, max_size=24), text))
    assert joined(tokenizer, (), tokens) == tokenizer.decode(tokens)
    # After a prompt of whole characters it is what the prompt's text lacks.
    prompt = tokenizer.encode("the cat")
    assert tokenizer.decode(prompt) + joined(tokenizer, prompt, tokens) == tokenizer.decode(
        [*prompt, *tokens]
    )


@pytest.mark.parametrize("kind", ("bytes", "byte-level"))
@given(text=st.text(max_size=16))
def test_at_most_three_bytes_are_held_back(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    stream, tokens, sent = TextStream(tokenizer.detokenizer()), tokenizer.encode(text), ""
    for count, token in enumerate(tokens, 1):
        chunk = stream.push(token)
        assert "\ufffd" not in chunk or "\ufffd" in text
        sent += chunk
        num_bytes = sum(len(tokenizer.token_bytes(token)) for token in tokens[:count])
        assert num_bytes - 3 <= len(sent.encode()) <= num_bytes
    assert sent == text


def test_tokens_that_are_decoded_alone_are_not_the_text() -> None:
    """The twin: what the streams avoid does differ, for all but text in ASCII."""
    for kind, text in (("bytes", "é"), ("byte-level", "ö"), ("sentencepiece", "the cat 東")):
        tokenizer = tokenizer_of(kind)
        tokens = tokenizer.encode(text)
        assert "".join(tokenizer.decode([token]) for token in tokens) != tokenizer.decode(tokens)
        assert joined(tokenizer, (), tokens) == tokenizer.decode(tokens)


def first_complete(text: str, stop: Sequence[str]) -> str:
    """Return the text up to the stop string that is complete first, by a search that is easy to believe."""
    for end in range(len(text) + 1):
        ended = [s for s in stop if text[:end].endswith(s)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


@pytest.mark.capability("W3", clause="stop strings across chunks")
@given(
    text=st.text(alphabet="abé", max_size=20),
    stop=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_string_ends_the_text_wherever_tokens_divide_it(text: str, stop: list[str]) -> None:
    for kind in ("bytes", "byte-level"):
        tokenizer = tokenizer_of(kind)
        stream, sent = TextStream(tokenizer.detokenizer(), stop), ""
        expected = first_complete(text, stop)
        for token in tokenizer.encode(text):
            sent += stream.push(token)
            assert expected.startswith(sent)
        assert sent + stream.finish() == expected
        assert stream.stopped == (expected != text)


def test_a_tokenizer_that_rewrites_text_is_refused() -> None:
    library = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    with pytest.raises(DataError, match="WordPiece, changes text when more tokens follow"):
        ServingTokenizer(library, 2, "", frozenset()).require_streamable("here")


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    """Invalid UTF-8, no JSON, and JSON that is no tokenizer."""
    file = tmp_path / "tokenizer.json"
    for data in (b'{"model": "\xff"}', b"{", b"{}", b'{"model": {"vocab": {"a": 99999999999}}}'):
        file.write_bytes(data)
        with pytest.raises(DataError, match=r"not a tokenizer\.json"):
            read_tokenizer(str(file))
