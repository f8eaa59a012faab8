"""How each parser is called with an input, and which errors it may raise.

A check raises what must not be raised. A parser that listens to a socket hears one that says the input and
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

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.manifest import decode_part
from paceline.checkpoint.pretrained import load_weights
from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.strict_json import seal as _seal
from paceline.comm.channel.socket_channel import SocketPeer
from paceline.errors import CheckpointError, CommunicationError, DataError, RecipeError
from paceline.job.handshake import AuthenticatingListener
from paceline.launch import fork_protocol
from paceline.launch.fork_server import ForkRequest
from paceline.launch.outcome import failure_from_report
from paceline.launch.worker_guard import ErrorReport
from paceline.recipe import load_recipe
from paceline.report import collect_facts, read_run, render_page, summarize_run
from tests.hostile import formats
from tests.hostile.formats import tensor_file

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
    CheckpointCatalog.read(StorageFolder(str(folder.parent)))


@refuses(CheckpointError)
def read_small_files(texts: tuple[bytes, bytes, bytes]) -> None:
    """`run.json`, `losses.json` and the manifest, byte by byte."""
    folder = Path(_FOLDER.name) / "small"
    (folder / "step-00000003").mkdir(parents=True, exist_ok=True)
    for name, text in zip(("run.json", "losses.json", "step-00000003/manifest.json"), texts, strict=True):
        (folder / name).write_bytes(text)
    CheckpointCatalog.read(StorageFolder(str(folder)))


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
    collect_facts(run)
    summarize_run(run)
    if len(lines) % 10 == 0:  # a page takes twenty milliseconds
        render_page([run])


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
    from paceline.data.tokenizer import load_tokenizer

    load_tokenizer(written("tokenizer.json", data))


def read_report(data: bytes) -> None:
    report = ErrorReport.load(written("rank-0.json", data))
    if report is not None:
        failure_from_report(0, report)


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
        peer = SocketPeer(1, line)
        while True:
            peer.read()


def read_messages(data: bytes) -> None:
    with said(data) as line:
        while (message := fork_protocol.receive_message(line)) is not None:
            ForkRequest.read(*message)


def read_hub(data: bytes) -> None:
    """A caller that sends this is rejected, and no rank was taken for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        callers = AuthenticatingListener(listener, "key", [1, 2], log=print)
        with socket.create_connection(listener.getsockname()) as caller:
            caller.sendall(data)
            caller.shutdown(socket.SHUT_WR)
            while not callers.num_rejected:
                callers.receive(1.0)
        callers.close()
        assert not callers.accepted
