"""Which run owns the checkpoints of a folder, and their evaluation losses, even if a file is damaged.

Both stand in small files of the folder, which carry their SHA-256, and in every manifest. Invariant: a small
file is believed only if it is what was written; else the manifests are asked.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.files import Files
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.strict_json import parse

RUN = "run.json"
LOSSES = "losses.json"
_SEAL = "sha256"
_MOST_BYTES = 64 * 2**20


def encode_table(values: Mapping[str, Any]) -> bytes:
    """A small table with its SHA-256."""
    return (json.dumps({**values, _SEAL: _seal(values)}, sort_keys=True) + "\n").encode()


def read_table(files: Files, name: str) -> tuple[dict[str, Any], bool]:
    """A small table, and whether its SHA-256 vouches for it; empty if it is not there or cannot be read."""
    try:
        size = files.size(name)
        found = parse(files.read(name)) if size is not None and size <= _MOST_BYTES else {}
    except (OSError, ValueError):
        return {}, False
    if not isinstance(found, dict):
        return {}, False
    seal = found.pop(_SEAL, None)
    return found, seal is not None and seal == _seal(found)


def find_run(files: Files, manifests: Sequence[Manifest]) -> tuple[str, bool]:
    """Of whom the checkpoints are, and whether `run.json` says so.

    Without a file that can be believed it is the run that most of the checkpoints name, if there are any.
    A file of an older version, which has no SHA-256, is believed if a checkpoint agrees or there is none.
    """
    found, sealed = read_table(files, RUN)
    said = found.get("run", "")
    named = Counter(one.origin.run for one in manifests)
    if isinstance(said, str) and said and (sealed or said in named or (not named and len(found) == 1)):
        return said, sealed
    newest_first = sorted(manifests, key=lambda one: -one.serial)
    return max((one.origin.run for one in newest_first), key=lambda run: named[run], default=""), False


def find_losses(files: Files, manifests: Sequence[Manifest], run: str) -> dict[int, float]:
    """Evaluation loss by step: from `losses.json` if it is what was written, and from the manifests."""
    found: dict[int, float] = {}
    for one in sorted(manifests, key=lambda one: one.serial):
        found.update(_losses(one.losses) if one.origin.run == run else {})
    read, sealed = read_table(files, LOSSES)
    own = _losses(read) if sealed or not found else {}
    return {**found, **own}


def _losses(values: Mapping[str, Any]) -> dict[int, float]:
    return {
        int(step): float(loss)
        for step, loss in values.items()
        if step.isdecimal() and len(step) < 20 and _is_loss(loss)
    }


def _is_loss(value: Any) -> bool:
    """A number, and none of hundreds of digits, which no float holds."""
    held = type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    return held and not math.isnan(value)


def _seal(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
