"""The formats that Paceline reads: one right text of each, and how it is made wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import strategies as st

numbers = st.one_of(
    st.integers(), st.integers(-3, 300), st.sampled_from([2**31, 2**53, 2**63, -1, 10**30]), st.floats()
)
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=12))
values = st.recursive(
    leaves,
    lambda inside: st.one_of(
        st.lists(inside, max_size=4), st.dictionaries(st.text(max_size=8), inside, max_size=4)
    ),
    max_leaves=12,
)


def changed(record: Any) -> st.SearchStrategy[Any]:
    """A value in which some places are exchanged, left out or doubled."""
    places = sorted(_places(record, ()), key=len)

    def apply(edits: list[tuple[int, str, Any]]) -> Any:
        copy = json.loads(json.dumps(record))
        for index, how, value in edits:
            _edit(copy, places[index % len(places)], how, value)
        return copy

    edit = st.tuples(
        st.integers(0, 10_000), st.sampled_from(["set", "remove", "double", "add"]), st.one_of(leaves, values)
    )
    return st.lists(edit, min_size=1, max_size=3).map(apply)


def _places(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inside in items for place in _places(inside, (*path, key)))][
        0 if path else 1 :
    ]


def _edit(root: Any, path: tuple[Any, ...], how: str, value: Any) -> None:
    try:
        for key in path[:-1]:
            root = root[key]
        if how == "remove":
            del root[path[-1]]
        elif how == "double":
            root[path[-1]] = [root[path[-1]]] * 2
        elif how == "add" and isinstance(root, dict):
            root["more"] = value
        else:
            root[path[-1]] = value
    except (KeyError, IndexError, TypeError):
        return  # an edit before has taken that place away


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """Bytes with a few changes: flips, cuts, and parts that are put in."""

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        out = bytearray(data)
        for place, what, part in edits:
            i = place % (len(out) + 1)
            if what % 3 == 0 and i < len(out):
                out[i] ^= 1 << (what % 8)
            elif what % 3 == 1:
                del out[i : i + what]
            else:
                out[i:i] = part
        return bytes(out)

    edit = st.tuples(st.integers(0, 100_000), st.integers(0, 60), st.binary(max_size=12))
    return st.lists(edit, min_size=1, max_size=4).map(apply)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def record_of(right: Any) -> st.SearchStrategy[bytes]:
    """The text of a record: with other values, with other bytes, or of something else."""
    return st.one_of(changed(right).map(encoded), damaged(encoded(right)), values.map(encoded))


def lines_of(records: Any) -> bytes:
    return b"\n".join(map(encoded, records)) if isinstance(records, list) else encoded(records)


RECIPE = b"""task = "digits"\nseed = 7\nsteps = 4\nstrategy = "replicas=2"\n[options]\nhidden = [4, {a = 1}]
[batch]\nsize = 8\nshards = 2\n[optimizer]\nlr = 1e-3\nname = "adamw"\n[checkpoint]\nkeep = 2\n"""


SCALARS = {
    "step": 3,
    "updates": 3,
    "scale": {"value": 1.0, "clean_steps": 0},
    "optimizer": {"w/step": 3.0},
    "optimizer_kind": "Adam",
    "groups": [{}],
    "tied": {"a": "b"},
}
CHUNK = {"name": "model/w", "dtype": "F32", "shape": [4, 3], "offsets": [0, 0], "sizes": [4, 3]}
FILE = {
    "name": "rank-00000.safetensors",
    "num_bytes": 400,
    "checksum": "xxh3-128:" + "0" * 32,
    "chunks": [CHUNK],
}
MANIFEST: dict[str, Any] = {
    "format": 3,
    "step": 3,
    "serial": 1,
    "saved_ns": 5,
    "origin": {"run": "ab", "recipe": "x", "strategy": "y", "world_size": 1, "versions": {"torch": "2"}},
    "files": [FILE],
    "scalars": SCALARS,
    "state_sha256": "0" * 64,
    "losses": {"3": 0.5},
}


def tensor_file(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(48)


TENSORS = {"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}}
WEIGHTS = {"weight": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}}
HEADER = ["grads", {"step": 3}, [["float32", [2, 2]], ["uint8", [3]]]]
RUN = {
    "event": "run",
    "level": "info",
    "rank": 0,
    "time": 1e9,
    "schema": 1,
    "step": 0,
    "num_steps": 4,
    "task": "digits",
    "strategy": "replicas=2 sync=every-step",
    "ordered": False,
    "ranks": 2,
    "devices": "cpu",
    "threads": 1,
    "host": "h",
    "pid": 5,
    "process_start": 7,
    "versions": {"torch": "2"},
    "parameters": 9,
    "gradient_bytes": 36,
    "tally_bytes": 80,
    "tokens_per_sample": 0,
}
PHASES = {"data": 0.1, "forward": 0.2, "backward": 0.3, "communication": 0.3, "optimizer": 0.1}
STEP = {
    "event": "step",
    "level": "info",
    "rank": 0,
    "time": 1e9,
    "step": 0,
    "epoch": 0,
    "loss": 1.0,
    "metrics": {"accuracy": 0.5},
    "num_samples": 8,
    "num_items": 8.0,
    "grad_norm": 1.0,
    "lr": 0.1,
    "applied": True,
    "loss_scale": 1.0,
    "stops": 0,
    "seconds": 1.0,
    "phases": PHASES,
    "sent_bytes": 80.0,
    "samples_per_second": 8.0,
}
RANKS = {
    "event": "ranks",
    "level": "info",
    "rank": 1,
    "time": 1e9,
    "step": 1,
    "rounds": 2,
    "seconds": 2.0,
    "slowest_seconds": 1.0,
    "phases": PHASES,
    "waiting_seconds": 0.1,
    "exposed_seconds": 0.1,
    "hidden_seconds": 0.2,
    "sent_bytes": 160.0,
    "cpu_seconds": 1.0,
    "peak_bytes": 1e6,
}
ROW = {"calls": 2, "payload_bytes": 80, "sent_bytes": 80.0, "hidden_fraction": 0.5}
METRICS: list[Any] = [
    RUN,
    STEP,
    {**STEP, "step": 1, "loss": "nan"},
    RANKS,
    {**RANKS, "rank": 0},
    {"event": "evaluation", "time": 1e9, "step": 1, "loss": 1.0, "metrics": {"accuracy": 1.0}},
    {"event": "communication", "time": 1e9, "rows": {"all_reduce data": ROW}},
    {"event": "warning", "time": 1e9, "text": "slow"},
    {"event": "end", "time": 1e9, "step": 2, "stopped": False},
]
CERTIFICATE = {"conclusion": "verified: 2 steps", "ok": True, "processes": 2, "steps": 2, "strategy": "x"}


def right_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return json.loads(made.to_str())


ORDER = [["paceline", "train"], {"RANK": "0"}, "/tmp", ["PACELINE_STORE_FD"]]
IDENTITY = {"run": "ab", "sha256": "0" * 64}
INDEX = {"metadata": {"total_size": 48}, "weight_map": {"weight": "a.safetensors"}}
ERROR = {
    "when": 1e9,
    "type": "ValueError",
    "message": "no",
    "traceback": "",
    "details": "",
    "exit_code": 1,
    "connection": False,
}
