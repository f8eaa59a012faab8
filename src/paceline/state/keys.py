"""Keyed random numbers: a key is a pure function of its purpose, never of the numbers drawn before.

Invariant: `key(seed, "dropout", step, shard)` is the same integer in every process, on every machine and
in every run. Nothing in Paceline consumes a stream whose position depends on the world size.
"""

from __future__ import annotations

import hashlib

_BITS = 63  # torch.Generator.manual_seed takes a signed 64-bit integer


def key(*parts: int | str) -> int:
    """Hash the parts to one integer in [0, 2**63).

    Args:
        parts: the run's seed first, then the purpose of the number: names and counters.
            `1` and `"1"` are different parts, and so are `("ab", "c")` and `("a", "bc")`.
    """
    # A separator that names do not contain, and the type, because 1 and "1" are different parts.
    spelled = "\x1f".join([f"{type(part).__name__}:{part}" for part in parts])
    digest = hashlib.blake2b(spelled.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _BITS)
