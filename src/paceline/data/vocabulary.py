"""Which number stands for which piece of text, as one hash: what the weights of a model hang on.

Two files of one vocabulary have the same hash, whoever wrote them: what else a `tokenizer.json` says (how
text is cut before it is looked up, what is put around it) is not in it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

BYTES = "bytes"  # of a tokenizer whose tokens are bytes


def vocabulary_of(text: str) -> str:
    """The hash of the vocabulary of a `tokenizer.json`, 32 hexadecimal digits.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(text)
        model = found["model"]
        added = sorted([entry["id"], entry["content"]] for entry in found.get("added_tokens") or [])
        pieces = _pieces(model["vocab"])
        merges = [one.split(" ", 1) if isinstance(one, str) else one for one in model.get("merges") or []]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"this is no tokenizer.json: {error!r}"[:200]) from None
    known = {piece for piece in pieces if isinstance(piece, str)}
    rest = [[number, piece] for number, piece in added if piece not in known]
    values = json.dumps([pieces, rest, merges], sort_keys=True).encode()
    return hashlib.sha256(values).hexdigest()[:32]


def _pieces(vocab: Any) -> Any:
    """By piece its number; or, where pieces have scores, a list in the order of their numbers."""
    return dict(vocab) if isinstance(vocab, dict) else [list(entry) for entry in vocab]
