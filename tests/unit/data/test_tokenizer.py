"""Tokenizers give text back exactly, however it is cut; what cannot is refused."""

from __future__ import annotations

import inspect
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from paceline.data.tokenizer import END_OF_TEXT, BpeTokenizer, ByteTokenizer, load_tokenizer, train_bpe
from paceline.errors import DataError, MissingExtraError
from tests.web import serving

TEXT = inspect.getsource(json.decoder) + inspect.getsource(random)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> BpeTokenizer:
    return train_bpe([TEXT], 500, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


def strange_texts() -> list[str]:
    rng = random.Random(1)
    alphabet = "ab \t\r\n\0\"'\\é東🚲\u200d\u0301\ufeff" + END_OF_TEXT
    return ["", " ", "\n\n  \n", *("".join(rng.choices(alphabet, k=rng.randrange(80))) for _ in range(100))]


@pytest.mark.capability("M6")
def test_bytes_round_trip_exactly() -> None:
    tokenizer = ByteTokenizer()
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in [TEXT, *strange_texts()])
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    every = bytes(range(256))
    assert np.concatenate(list(tokenizer.encode_chunks([every[:100], every[100:]]))).tobytes() == every
    assert tokenizer.decode([0xC3]) == "\ufffd"


@pytest.mark.capability("M6")
def test_bpe_round_trips_exactly_and_compresses(bpe: BpeTokenizer) -> None:
    assert all(bpe.decode(bpe.encode(text)) == text for text in [TEXT, *strange_texts()])
    assert bpe.vocab_size == 500
    tokens = bpe.encode(TEXT)
    assert tokens.max() < 500
    assert len(tokens) < 0.6 * len(TEXT)


@pytest.mark.capability("M6")
def test_a_saved_tokenizer_loads_as_the_same(bpe: BpeTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tokenizer.json"
    trained = train_bpe([TEXT], 500, path)
    loaded = load_tokenizer(path)
    assert trained.fingerprint == loaded.fingerprint == bpe.fingerprint  # training is deterministic
    assert np.array_equal(loaded.encode(TEXT), bpe.encode(TEXT))
    assert tokenizers.Tokenizer.from_file(str(path)).encode(TEXT).ids == bpe.encode(TEXT).tolist()
    assert [entry.name for entry in path.parent.iterdir()] == ["tokenizer.json"]
    assert train_bpe([TEXT], 400, path).fingerprint != bpe.fingerprint


@pytest.mark.capability("M6")
@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 10**6])
def test_pieces_of_a_file_give_the_text_back(bpe: BpeTokenizer, chunk_bytes: int) -> None:
    for text in [TEXT[:3000], "no line break at all: 東京🚲", *strange_texts()]:
        content = text.encode()
        chunks = [content[i : i + chunk_bytes] for i in range(0, len(content), chunk_bytes)]
        assert bpe.decode(np.concatenate(list(bpe.encode_chunks(chunks)))) == text


def test_text_without_line_breaks_is_not_heaped_up(bpe: BpeTokenizer) -> None:
    pieces = list(bpe.encode_chunks([b"wood " * 20] * 10))
    assert [bpe.decode(piece) for piece in pieces] == ["wood " * 20] * 10 + [""]


def test_the_separator_is_a_token_of_its_own(bpe: BpeTokenizer) -> None:
    assert bpe.decode([bpe.separator]) == END_OF_TEXT
    assert bpe.separator not in bpe.encode(TEXT)
    assert ByteTokenizer.separator == 0


def byte_level(**settings: object) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False, **settings)
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def test_a_foreign_tokenizer_ends_files_with_its_own_token_or_byte_0(tmp_path: Path) -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    byte_level(initial_alphabet=alphabet, special_tokens=["</s>"]).save(str(tmp_path / "end.json"))
    byte_level(initial_alphabet=alphabet).save(str(tmp_path / "zero.json"))
    end, zero = load_tokenizer(tmp_path / "end.json"), load_tokenizer(tmp_path / "zero.json")
    assert (end.decode([end.separator]), zero.decode([zero.separator])) == ("</s>", "\0")


@pytest.mark.capability("W6")
@pytest.mark.parametrize("remote", [False, True])
def test_the_tokenizer_of_a_folder_of_hugging_face_ends_texts_as_the_folder_says(
    remote: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made = byte_level(initial_alphabet=alphabet, special_tokens=["</s>", "<stop>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<stop>").save_pretrained(tmp_path)
    with serving(tmp_path) as web:
        place = web.url if remote else tmp_path
        found = load_tokenizer(place)
        assert found.decode([found.separator]) == "<stop>"
        assert found.decode(found.encode(TEXT)) == TEXT
        file = load_tokenizer(f"{place}/tokenizer.json")  # alone it does not say
        assert file.decode([file.separator]) == "</s>" and file.fingerprint == found.fingerprint
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
        again = load_tokenizer(place)
        assert again.decode([again.separator]) == "</s>"


def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    lossy = byte_level(initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    lossy.normalizer = tokenizers.normalizers.Lowercase()
    lossy.save(str(path))
    with pytest.raises(DataError, match="does not restore text exactly") as caught:
        load_tokenizer(path)
    assert caught.value.where == str(path)


def test_files_that_are_no_tokenizers_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text('{"version": 1}')
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path / "broken.json")


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="256 is too small"):
        train_bpe([TEXT], 256, tmp_path / "tokenizer.json")


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for attempt in (lambda: load_tokenizer("any"), lambda: train_bpe([], 300, tmp_path / "any")):
        with pytest.raises(MissingExtraError) as caught:
            attempt()
        assert caught.value.next_step == 'pip install "paceline[text]"'
