"""Every parser of what others may have written: what it is given, and what it may do with it.

A check raises what must not be raised. A parser that talks over a socket talks to one that says the input and
hangs up.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from paceline.checkpoint import Files, Shelf, load_weights
from paceline.checkpoint.manifest import _seal, decode_part
from paceline.checkpoint.tensor_file import decode
from paceline.comm.channel import FRAME_LENGTHS, Message
from paceline.comm.channel.channel import Peer
from paceline.comm.channel.guests import Guests
from paceline.errors import CheckpointError, CommunicationError, DataError, RecipeError
from paceline.handshake import decode_hello, encode_hello
from paceline.introduction import is_introduced
from paceline.launch import messages
from paceline.launch.fork_server import Order
from paceline.launch.judge import raised
from paceline.launch.worker import ErrorReport
from paceline.phase import read_phase
from paceline.recipe import load_recipe
from paceline.recipe.toml_text import parse_toml
from paceline.report import facts, read_run, render, summary
from paceline.roster import read_roster
from tests.hostile import formats
from tests.hostile.formats import changed, damaged, tensor_file, values
from tests.hostile.notice import read_notice, urls

Check = Callable[[Any], object]
_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-")


def refuses(*errors: type[Exception]) -> Callable[[Check], Check]:
    """A check that allows these errors."""

    def wrap(read: Check) -> Check:
        def check(value: Any) -> None:
            try:
                read(value)
            except errors:
                return

        return check

    return wrap


def written(name: str, data: bytes) -> Path:
    path = Path(_FOLDER.name) / name
    path.write_bytes(data)
    return path


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def record_of(right: Any) -> st.SearchStrategy[bytes]:
    """The text of a record: with other values, with other bytes, or of something else."""
    return st.one_of(changed(right).map(encoded), damaged(encoded(right)), values.map(encoded))


@refuses(RecipeError)
def read_recipe(data: bytes) -> None:
    load_recipe(written("recipe.toml", data))


@refuses(RecipeError)
def read_override(text: str) -> None:
    load_recipe(written("plain.toml", formats.RECIPE), [text])


@refuses(CheckpointError)
def read_shelf(record: Any) -> None:
    """A manifest with a right seal, whatever it says; and the folder of it as a whole."""
    folder = Path(_FOLDER.name) / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True, exist_ok=True)
    sealed = {**record, "manifest_sha256": _seal(record)} if isinstance(record, dict) else record
    (folder / "manifest.json").write_text(json.dumps(sealed))
    (folder / "rank-00000.safetensors").write_bytes(bytes(400))
    Shelf.look(Files(str(folder.parent)))


@refuses(CheckpointError)
def read_small_files(texts: tuple[bytes, bytes, bytes]) -> None:
    """`run.json`, `losses.json` and the manifest, byte by byte."""
    folder = Path(_FOLDER.name) / "small"
    (folder / "step-00000003").mkdir(parents=True, exist_ok=True)
    for name, text in zip(("run.json", "losses.json", "step-00000003/manifest.json"), texts, strict=True):
        (folder / name).write_bytes(text)
    Shelf.look(Files(str(folder)))


@refuses(ValueError)
def read_part(record: Any) -> None:
    sealed = {**record, "manifest_sha256": _seal(record)} if isinstance(record, dict) else record
    decode_part(json.dumps(sealed).encode())


def read_metrics(found: tuple[bytes, bytes]) -> None:
    """Reading never fails, whatever stands there."""
    lines, certificate = found
    written("recipe.toml", formats.RECIPE)
    written("certificate.json", certificate)
    run = read_run(written("metrics.jsonl", lines).parent)
    facts(run)
    summary(run)
    if len(lines) % 10 == 0:  # a page takes twenty milliseconds
        render([run])


def lines_of(records: Any) -> bytes:
    return b"\n".join(map(encoded, records)) if isinstance(records, list) else encoded(records)


@refuses(CheckpointError)
def read_weights(data: bytes) -> None:
    load_weights(torch.nn.Linear(3, 4, bias=False), written("w.safetensors", data))


@refuses(CheckpointError)
def read_index(data: bytes) -> None:
    folder = Path(_FOLDER.name) / "in-parts"
    folder.mkdir(exist_ok=True)
    (folder / "a.safetensors").write_bytes(tensor_file(formats.WEIGHTS))
    (folder / "model.safetensors.index.json").write_bytes(data)
    load_weights(torch.nn.Linear(3, 4, bias=False), folder)


@refuses(DataError)
def read_tokenizer(data: bytes) -> None:
    pytest.importorskip("tokenizers")
    from paceline.data.tokens import load_tokenizer

    load_tokenizer(written("tokenizer.json", data))


def read_report(data: bytes) -> None:
    report = ErrorReport.load(written("rank-0.json", data))
    if report is not None:
        raised(0, report)


@contextmanager
def said(data: bytes) -> Iterator[socket.socket]:
    """The near end of a line on which somebody says this and hangs up."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(data)
        yield ours


@refuses(CommunicationError)
def read_stream(data: bytes) -> None:
    """Frames as they come over a channel; at its end the peer is gone."""
    with said(data) as line:
        peer = Peer(1, line)
        while True:
            peer.read()


def read_messages(data: bytes) -> None:
    with said(data) as line:
        while (message := messages.receive(line)) is not None:
            Order.read(*message)


def read_hub(data: bytes) -> None:
    """A caller that says this is turned away, and no rank was taken for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        guests = Guests(listener, "key", [1, 2])
        with socket.create_connection(listener.getsockname()) as caller:
            caller.sendall(data)
            caller.shutdown(socket.SHUT_WR)
            while not guests.strangers:
                guests.hear(1.0)
        guests.close()
        assert not guests.found


FRAME = b"".join(
    map(bytes, (lambda head, bodies: (head, *bodies))(*Message("x", {"a": 1}, [torch.ones(3)]).encode()))
)
LENGTHS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)).map(
    lambda two: FRAME_LENGTHS.pack(*two)
)
LETTER = len(encoded(formats.ORDER)).to_bytes(8, "big") + encoded(formats.ORDER)
HELLO = encode_hello(1, bytes(range(32))) + bytes(32)

PARSERS: dict[str, tuple[Callable[[], st.SearchStrategy[Any]], Check]] = {
    "recipe": (lambda: st.one_of(damaged(formats.RECIPE), st.binary(max_size=200)), read_recipe),
    "override": (
        lambda: st.one_of(
            st.text(max_size=40),
            st.tuples(st.sampled_from(["steps=", "options.x=", "batch.size="]), st.text(max_size=30)).map(
                "".join
            ),
        ),
        read_override,
    ),
    "toml": (lambda: st.text(max_size=200), refuses(ValueError)(parse_toml)),
    "manifest": (lambda: st.one_of(changed(formats.MANIFEST), values), read_shelf),
    "small files of a run": (
        lambda: st.tuples(record_of(formats.IDENTITY), record_of({"3": 0.5}), record_of(formats.MANIFEST)),
        read_small_files,
    ),
    "report of a rank": (
        lambda: st.one_of(changed({"files": [formats.FILE], "scalars": formats.SCALARS}), values),
        read_part,
    ),
    "tensor file": (
        lambda: st.one_of(
            changed(formats.TENSORS).map(tensor_file),
            damaged(tensor_file(formats.TENSORS)),
            st.binary(max_size=80),
        ),
        refuses(ValueError)(lambda data: decode(bytearray(data))),
    ),
    "weights": (
        lambda: st.one_of(changed(formats.WEIGHTS).map(tensor_file), damaged(tensor_file(formats.WEIGHTS))),
        read_weights,
    ),
    "weights in parts": (lambda: record_of(formats.INDEX), read_index),
    "frame": (
        lambda: st.tuples(record_of(formats.HEADER), st.sampled_from([0, 3, 16, 19]).map(bytearray)),
        refuses(ValueError)(lambda found: Message.decode(*found, 1)),
    ),
    "frames on a channel": (
        lambda: st.one_of(
            damaged(FRAME), damaged(2 * FRAME), st.tuples(LENGTHS, st.binary(max_size=60)).map(b"".join)
        ),
        read_stream,
    ),
    "hello": (lambda: st.binary(max_size=80), refuses(ValueError)(decode_hello)),
    "callers of a hub": (lambda: st.one_of(damaged(HELLO), st.binary(max_size=90)), read_hub),
    "introduction": (lambda: st.text(max_size=200), lambda said: is_introduced(said, "key")),
    "order of a worker": (
        lambda: st.tuples(st.one_of(changed(formats.ORDER), values), st.lists(st.integers(3, 9), max_size=6)),
        lambda found: Order.read(*found),
    ),
    "messages of a fork server": (
        lambda: st.one_of(damaged(LETTER), damaged(2 * LETTER), st.binary(max_size=60)),
        read_messages,
    ),
    "error of a worker": (lambda: record_of(formats.ERROR), read_report),
    "phase": (
        lambda: record_of({"what": "training", "until": 3.0}),
        lambda data: read_phase(written("rank-0.phase", data).parent, 0),
    ),
    "roster": (
        lambda: record_of([{"rank": 1, "host": "h", "address": "10.0.0.1", "port": 5}]),
        lambda data: read_roster(written("roster.json", data).parent),
    ),
    "metrics": (
        lambda: st.tuples(
            st.one_of(
                st.one_of(changed(formats.METRICS), values).map(lines_of), damaged(lines_of(formats.METRICS))
            ),
            record_of(formats.CERTIFICATE),
        ),
        read_metrics,
    ),
    "tokenizer": (lambda: record_of(formats.right_tokenizer()), read_tokenizer),
    "notice": (urls, read_notice),
}
