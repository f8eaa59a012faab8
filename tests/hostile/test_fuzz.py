"""Every parser of what others may have written, on inputs that nobody has thought of: a named error.

In the suite some hundred inputs for each, the same ones in every run; in the soak a hundred thousand. What
was found once stands in the other files of this folder, by name.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.checkpoint import Files, Shelf, load_weights
from paceline.checkpoint.manifest import _seal, decode_part
from paceline.checkpoint.tensor_file import decode
from paceline.comm.channel import Message
from paceline.errors import CheckpointError, DataError, RecipeError
from paceline.handshake import decode_hello
from paceline.introduction import is_introduced
from paceline.launch.fork_server import Order
from paceline.phase import read_phase
from paceline.recipe import load_recipe
from paceline.recipe.toml_text import parse_toml
from paceline.report import facts, read_run, render, summary
from paceline.roster import read_roster
from tests.hostile.formats import (
    CERTIFICATE,
    FILE,
    HEADER,
    MANIFEST,
    METRICS,
    ORDER,
    RECIPE,
    SCALARS,
    TENSORS,
    WEIGHTS,
    changed,
    damaged,
    right_tokenizer,
    tensor_file,
    values,
)

pytestmark = [pytest.mark.capability("N10", "N13"), pytest.mark.timeout(240)]
QUICK, LONG = 300, 100_000


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def try_all(inputs: st.SearchStrategy[Any], check: Callable[[Any], object], count: int) -> None:
    """Call `check` on so many inputs; it raises what must not be raised."""

    @settings(
        max_examples=count,
        deadline=2000,
        derandomize=True,
        database=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(inputs)
    def run(value: Any) -> None:
        check(value)

    run()


def refuses(*errors: type[Exception]) -> Callable[[Callable[[Any], object]], Callable[[Any], object]]:
    """A check that allows these errors."""

    def wrap(read: Callable[[Any], object]) -> Callable[[Any], object]:
        def check(value: Any) -> None:
            try:
                read(value)
            except errors:
                return

        return check

    return wrap


def written(name: str, data: bytes) -> Path:
    path = Path(_folder()) / name
    path.write_bytes(data)
    return path


def _folder() -> str:
    return _FOLDER.name


_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-")


@refuses(RecipeError)
def read_recipe(data: bytes) -> None:
    load_recipe(written("recipe.toml", data))


@refuses(RecipeError)
def read_override(text: str) -> None:
    load_recipe(written("plain.toml", RECIPE), [text])


@refuses(CheckpointError)
def read_shelf(record: Any) -> None:
    """A manifest with a right seal, whatever it says; and the folder of it as a whole."""
    folder = Path(_folder()) / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True, exist_ok=True)
    sealed = {**record, "manifest_sha256": _seal(record)} if isinstance(record, dict) else record
    (folder / "manifest.json").write_text(json.dumps(sealed))
    (folder / "rank-00000.safetensors").write_bytes(bytes(400))
    Shelf.look(Files(str(folder.parent)))


@refuses(ValueError)
def read_part(record: Any) -> None:
    sealed = {**record, "manifest_sha256": _seal(record)} if isinstance(record, dict) else record
    decode_part(json.dumps(sealed).encode())


def read_metrics(found: tuple[Any, Any]) -> None:
    """Reading never fails, whatever stands there."""
    records, certificate = found
    folder = Path(_folder())
    (folder / "recipe.toml").write_bytes(RECIPE)
    lines = [json.dumps(one) for one in records] if isinstance(records, list) else [json.dumps(records)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "certificate.json").write_text(json.dumps(certificate))
    run = read_run(folder)
    facts(run)
    summary(run)
    render([run])


@refuses(CheckpointError)
def read_weights(data: bytes) -> None:
    load_weights(torch.nn.Linear(3, 4, bias=False), written("w.safetensors", data))


@refuses(DataError)
def read_tokenizer(record: Any) -> None:
    pytest.importorskip("tokenizers")
    from paceline.data.tokens import load_tokenizer

    load_tokenizer(written("tokenizer.json", json.dumps(record).encode()))


PARSERS: dict[str, tuple[Callable[[], st.SearchStrategy[Any]], Callable[[Any], object]]] = {
    "recipe": (lambda: st.one_of(damaged(RECIPE), st.binary(max_size=200)), read_recipe),
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
    "manifest": (lambda: st.one_of(changed(MANIFEST), values), read_shelf),
    "report of a rank": (
        lambda: st.one_of(changed({"files": [FILE], "scalars": SCALARS}), values),
        read_part,
    ),
    "tensor file": (
        lambda: st.one_of(
            changed(TENSORS).map(tensor_file), damaged(tensor_file(TENSORS)), st.binary(max_size=80)
        ),
        refuses(ValueError)(lambda data: decode(bytearray(data))),
    ),
    "weights": (
        lambda: st.one_of(changed(WEIGHTS).map(tensor_file), damaged(tensor_file(WEIGHTS))),
        read_weights,
    ),
    "frame": (
        lambda: st.tuples(
            st.one_of(
                changed(HEADER).map(lambda h: json.dumps(h).encode()), damaged(json.dumps(HEADER).encode())
            ),
            st.sampled_from([0, 3, 16, 19]).map(bytearray),
        ),
        refuses(ValueError)(lambda found: Message.decode(*found, 1)),
    ),
    "hello": (lambda: st.binary(max_size=80), refuses(ValueError)(decode_hello)),
    "introduction": (lambda: st.text(max_size=200), lambda said: is_introduced(said, "key")),
    "order of a worker": (
        lambda: st.tuples(st.one_of(changed(ORDER), values), st.lists(st.integers(3, 9), max_size=6)),
        lambda found: Order.read(*found),
    ),
    "phase": (
        lambda: values,
        lambda value: read_phase(written("rank-0.phase", json.dumps(value).encode()).parent, 0),
    ),
    "roster": (
        lambda: values,
        lambda value: read_roster(written("roster.json", json.dumps(value).encode()).parent),
    ),
    "metrics": (
        lambda: st.tuples(
            st.one_of(changed(METRICS), values), st.one_of(changed(CERTIFICATE), st.just(CERTIFICATE), values)
        ),
        read_metrics,
    ),
    "tokenizer": (lambda: st.one_of(changed(right_tokenizer()), values), read_tokenizer),
}
FEWER = {"metrics": 100, "tokenizer": 100, "manifest": 150, "recipe": 200, "weights": 150}
"""These take milliseconds each."""


@pytest.mark.parametrize("parser", PARSERS)
def test_no_input_is_more_than_a_named_error(parser: str) -> None:
    inputs, check = PARSERS[parser]
    try_all(inputs(), check, FEWER.get(parser, QUICK))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("parser", PARSERS)
def test_no_input_of_a_hundred_thousand_is_more_than_a_named_error(parser: str) -> None:
    inputs, check = PARSERS[parser]
    try_all(inputs(), check, LONG)
