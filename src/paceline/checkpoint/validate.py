"""Whether a manifest can be true: checked in full before anything that it names is opened.

Invariant: of what passes, every file lies in the folder of the checkpoint, every byte of every tensor is in
exactly one chunk, and no tensor is larger than the files that hold it. ValueError says what is wrong first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from paceline.checkpoint.kept_values import check_kept
from paceline.checkpoint.strict_json import count, fields, listed, numeric, table, text
from paceline.checkpoint.tensor_file import Chunk, is_code, keys_of
from paceline.disk.checksum import is_checksum

_NAME = re.compile(r"rank-\d{5,9}(\.\d{1,4}-of-\d{1,4})?\.safetensors", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FILE = frozenset({"name", "num_bytes", "checksum", "chunks"})
_CHUNK = frozenset({"name", "dtype", "shape", "offsets", "sizes"})
_ORIGIN = frozenset({"run", "recipe", "strategy", "world_size", "versions"})
_SCALARS = frozenset(
    {
        "step",
        "updates",
        "updates_per_step",
        "scale",
        "optimizer",
        "optimizer_kind",
        "groups",
        "others",
        "tied",
    }
)
_SINCE: Mapping[str, Any] = {"others": {}, "updates_per_step": 1}  # older ones lack these
_RECORD = frozenset({"step", "serial", "saved_ns", "origin", "files", "scalars", "state_sha256", "losses"})
_MOST_AXES = 64
_LENGTH_BYTES = 8


def check_record(record: Any) -> None:
    """A whole manifest, without its seal and format."""
    found = fields(record, "the manifest", _RECORD)
    for name in ("step", "serial", "saved_ns"):
        count(found[name], name)
    _match(_DIGEST, found["state_sha256"], "state_sha256")
    _check_origin(found["origin"])
    _check_scalars(found["scalars"])
    for step, loss in table(found["losses"], "losses").items():
        if not step.isdecimal():
            raise ValueError(f"losses has the step '{step[:40]}'")
        numeric(loss, "a loss")
    _check_files(found["files"])


def check_part(record: Any) -> None:
    """One rank's report, without its seal."""
    found = fields(record, "the report", frozenset({"files", "scalars"}))
    _check_scalars(found["scalars"])
    _check_files(found["files"])


def _check_files(files: Any) -> None:
    names: set[str] = set()
    for file in listed(files, "files"):
        found = fields(file, "a file", _FILE)
        _match(_NAME, found["name"], "the name of a file")
        if not is_checksum(text(found["checksum"], "a checksum")):
            raise ValueError(f"a checksum is {found['checksum'][:80]!r}")
        chunks = [_check_chunk(chunk) for chunk in listed(found["chunks"], "chunks")]
        if found["name"] in names:
            raise ValueError(f"{found['name']} is there twice")
        if len({*keys_of(chunks)}) != len(chunks):
            raise ValueError(f"{found['name']} has two chunks of one tensor in one place")
        names.add(found["name"])
        if count(found["num_bytes"], "num_bytes") < _LENGTH_BYTES + sum(chunk.num_bytes for chunk in chunks):
            raise ValueError(f"{found['name']} is too short for its chunks")


def check_cover(chunks: Sequence[Chunk]) -> None:
    """Every byte of every tensor is in exactly one chunk."""
    by_name: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_name.setdefault(chunk.name, []).append(chunk)
    for name, parts in by_name.items():
        if len({(part.dtype, part.shape) for part in parts}) != 1:
            raise ValueError(f"the chunks of '{name[:80]}' are of different tensors")
        if sum(prod(part.sizes) for part in parts) != prod(parts[0].shape):
            raise ValueError(f"the chunks of '{name[:80]}' do not fill it")
        _check_apart(name, parts)


def _check_apart(name: str, parts: Sequence[Chunk]) -> None:
    """No two boxes share a value; those that end before another one begins are left out."""
    boxes = [part for part in parts if prod(part.sizes)]
    open_boxes: list[Chunk] = []
    for box in sorted(boxes, key=lambda one: one.offsets):
        begin = box.offsets[0] if box.offsets else 0
        open_boxes = [one for one in open_boxes if one.offsets and one.offsets[0] + one.sizes[0] > begin]
        if any(_meet(one, box) for one in open_boxes) or (not box.offsets and len(boxes) > 1):
            raise ValueError(f"two chunks of '{name[:80]}' overlap")
        open_boxes.append(box)


def _meet(a: Chunk, b: Chunk) -> bool:
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _check_chunk(value: Any) -> Chunk:
    found = fields(value, "a chunk", _CHUNK)
    name = text(found["name"], "the name of a tensor")
    if not is_code(text(found["dtype"], "dtype")):
        raise ValueError(f"'{name[:80]}' is of an unknown type")
    shape, offsets, sizes = (_counts(found[key], key) for key in ("shape", "offsets", "sizes"))
    inside = all(start + size <= whole for start, size, whole in zip(offsets, sizes, shape, strict=False))
    if not (len(shape) == len(offsets) == len(sizes) <= _MOST_AXES and inside):
        raise ValueError(f"a chunk lies outside of '{name[:80]}'")
    return Chunk(name, found["dtype"], shape, offsets, sizes)


def _check_origin(value: Any) -> None:
    found = fields(value, "the origin", _ORIGIN)
    for name in ("run", "recipe", "strategy"):
        text(found[name], name)
    if count(found["world_size"], "world_size") == 0:
        raise ValueError("world_size is 0")
    for name, version in table(found["versions"], "versions").items():
        text(version, f"the version of {name[:40]}")


def _check_scalars(value: Any) -> None:
    given = table(value, "the scalars")
    found: Mapping[str, Any] = fields({**_SINCE, **given}, "the scalars", _SCALARS)
    table(found["others"], "others")
    scale = fields(found["scale"], "scale", frozenset({"value", "clean_steps"}))
    for name in ("step", "updates"):
        count(found[name], name)
    if count(found["updates_per_step"], "updates_per_step") == 0:
        raise ValueError("updates_per_step is 0")
    numeric(scale["value"], "the loss scale")
    count(scale["clean_steps"], "clean_steps")
    text(found["optimizer_kind"], "optimizer_kind")
    for name, number in table(found["optimizer"], "the numbers of the optimizer").items():
        check_kept(number, name[:80])
    for group in listed(found["groups"], "groups"):
        for name, value in table(group, "what the optimizer has changed in a group").items():
            if not isinstance(value, bool | int | float | str | None):
                raise ValueError(f"'{name[:80]}' of a group of the optimizer is no number")
    for name, first in table(found["tied"], "tied").items():
        text(first, f"what '{name[:80]}' is tied to")


def _counts(value: Any, what: str) -> tuple[int, ...]:
    return tuple(count(one, what) for one in listed(value, what))


def _match(pattern: re.Pattern[str], value: Any, what: str) -> None:
    if not pattern.fullmatch(text(value, what)):
        raise ValueError(f"{what} is {value[:80]!r}")
