"""Inputs that were found once, by name, and frames that lie: each is an error, and takes no time or room."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint.catalog import find_losses
from paceline.checkpoint.model_weights import export_weights, find_checkpoint
from paceline.checkpoint.pretrained import load_weights
from paceline.checkpoint.storage import StorageFolder
from paceline.comm.channel import FRAME_LENGTHS, ChannelMessage, SocketChannel
from paceline.comm.ledger import ByteLedger
from paceline.errors import CheckpointError, CommunicationError, DataError, PacelineError, RecipeError
from paceline.job.launcher_reports import read_node_list, read_phase
from paceline.launch.stale_folders import remove_stale_folders
from paceline.launch.worker_guard import ErrorReport
from paceline.recipe import load_recipe
from paceline.session.stop_signals import _notice_check
from tests.hostile.formats import METRICS, RANKS, RECIPE, lines_of, right_tokenizer
from tests.hostile.parser_checks import read_metrics
from tests.unit.checkpoint.states import make_state, save

DEEP = [
    "a = " + "[" * 3000 + "]" * 3000,
    "a = " + "{b = " * 500 + "1" + "}" * 500,
    "a" + ".a" * 3000 + " = 1",
    "[" + "a." * 3000 + "a]",
    "steps = " + "9" * 5000,
    "seed = 0x" + "f" * 5000,
    "lr = 1" + "0" * 400,
    "[options]\na = 1" + "0" * 400,
    "a = 1979-99-99",
]


@pytest.mark.parametrize("text", DEEP, ids=range(len(DEEP)))
def test_recipes_that_were_found_once(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(RecipeError):
        load_recipe(path)
    path.write_bytes(RECIPE)
    with pytest.raises(PacelineError):
        load_recipe(path, [text.replace(" = ", "=", 1)])


@pytest.mark.parametrize("text", ["\ud800\x90\r", "options.x=\udcff", "\udcff=1", '"\udcff"=[1'])
def test_overrides_that_are_no_text(text: str, tmp_path: Path) -> None:
    """What the bytes of a command line become that are no UTF-8."""
    (tmp_path / "recipe.toml").write_bytes(RECIPE)
    with pytest.raises(RecipeError, match="expected text in UTF-8"):
        load_recipe(tmp_path / "recipe.toml", [text])


@pytest.mark.parametrize("ids", [4_000_000_000, 2**40, -1])
def test_tokenizers_that_were_found_once(ids: int, tmp_path: Path) -> None:
    record = right_tokenizer()
    record["model"]["vocab"]["x"] = ids
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(record))
    from paceline.data.tokenizer import load_tokenizer

    with pytest.raises(DataError, match=r"no token's|this is not"):
        load_tokenizer(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"this is not a tokenizer\.json"):
        load_tokenizer(path)


def test_weights_that_are_damaged_leave_the_model_untouched(tmp_path: Path) -> None:
    """One bit of the last tensor: the first ones are not taken over either."""
    import torch

    state = make_state(2)
    save(tmp_path / "run", state)
    place = tmp_path / "w.safetensors"
    export_weights(find_checkpoint(StorageFolder(str(tmp_path / "run")), print), place)
    data = bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(data)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="damaged"):
        load_weights(model, place)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_notice_url_that_answers_drop_by_drop_or_nonsense_hangs_nothing() -> None:
    import socket

    for url in ("http://[", "http://\x00/", "http://127.0.0.1:99999/", "http://a b/", "http://"):
        assert _notice_check(url)() is False
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def drip() -> None:
            line, _ = server.accept()
            with line:
                while not over.wait(0.1):
                    line.send(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert _notice_check(f"http://127.0.0.1:{server.getsockname()[1]}/")() is False
        over.set()
        dripping.join()


def test_losses_that_no_float_holds_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "losses.json").write_text(f'{{"3": {"9" * 400}, "4": 0.5, "5": NaN, "6": Infinity}}')
    assert find_losses(StorageFolder(str(tmp_path)), [], "") == {4: 0.5, 6: float("inf")}


def test_small_files_that_were_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that no integer holds, and values of another type: each is as good as no file."""
    endless = json.dumps(float("-inf"))
    (tmp_path / "roster.json").write_text(f'[{{"rank": 1, "host": "h", "address": "a", "port": {endless}}}]')
    assert read_node_list(tmp_path) == []
    (tmp_path / "rank-0.phase").write_text('{"what": "x", "until": ' + "[" * 5000 + "]" * 5000 + "}")
    assert read_phase(tmp_path, 0) is None
    ErrorReport.of(ValueError("no")).save(tmp_path / "rank-0.json")
    said = json.loads((tmp_path / "rank-0.json").read_text())
    (tmp_path / "rank-0.json").write_text(json.dumps({**said, "message": None}))
    assert ErrorReport.load(tmp_path / "rank-0.json") is None
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "paceline-x").mkdir()
    (tmp_path / "paceline-x" / "owner.json").write_text(f'{{"pid": {endless}}}')
    assert remove_stale_folders() == []


def test_a_phase_that_nobody_knows_is_left_out() -> None:
    """In one record of a rank, and not in the next."""
    more = {**RANKS, "phases": {"more": 0.5, **RANKS["phases"]}}
    read_metrics((lines_of([*METRICS[:3], more, RANKS]), b"{}"))
    read_metrics((lines_of([*METRICS[:3], RANKS, more]), b"{}"))


def exchange(frame: bytes) -> object:
    """What a channel makes of the bytes of a peer that then hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    channel = SocketChannel({1: ours}, ByteLedger())
    try:
        theirs.sendall(frame)
        theirs.close()
        return channel.receive(60.0)
    finally:
        channel.close()


def framed(header: object, body: bytes = b"", *, head: int = -1, all_bodies: int = -1) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    first = len(text) if head < 0 else head
    return FRAME_LENGTHS.pack(first, len(body) if all_bodies < 0 else all_bodies) + text + body


LIES = {
    "a huge header": framed(b"", head=2**62),
    "a huge body": framed(["x", {}, []], all_bodies=2**62),
    "a huge tensor": framed(["x", {}, [["float32", [2**60]]]], b"1234"),
    "no type": framed(["x", {}, [["nn", [1]]]], b"1234"),
    "below zero": framed(["x", {}, [["float32", [-1, -1]]]], b"1234"),
    "more than there is": framed(["x", {}, [["float32", [2]]]], b"1234"),
    "less than there is": framed(["x", {}, []], b"1234"),
    "a number": framed(3),
    "nested": framed(b"[" * 50_000),
    "no text": framed(b"\xff\xfe"),
    "a list of fields": framed(["x", [], []]),
}


@pytest.mark.capability("B3")
@pytest.mark.parametrize("lie", LIES)
def test_a_frame_that_lies_is_an_error_with_the_rank_and_takes_no_memory(lie: str) -> None:
    with pytest.raises(CommunicationError, match=r"rank 1 (sent an invalid message|is gone)"):
        exchange(LIES[lie])


@pytest.mark.capability("B3")
def test_a_frame_that_does_not_lie_arrives() -> None:
    head, bodies = ChannelMessage("x", {"a": 1}, [torch.arange(5)]).encode()
    message = exchange(head + b"".join(bodies))
    assert isinstance(message, ChannelMessage) and message.tensors[0].tolist() == [0, 1, 2, 3, 4]
