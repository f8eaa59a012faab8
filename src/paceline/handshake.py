"""Proofs that two sides know the same key, none of which says anything about it.

Each side makes up a nonce, and shows that it can compute the HMAC-SHA-256 of both nonces under the key, with
who it is; so an answer is of no use a second time, or to the other side. Invariant: messages have one size,
so a stranger decides nothing about memory, and comparisons take the same time whatever differs.
Source: challenge and response with both nonces, ISO/IEC 9798-4 (mutual authentication by a MAC).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

NONCE_BYTES = 32
PROOF_BYTES = 32
_HELLO = struct.Struct("!4sI32s")
_MAGIC = b"PCL1"
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
WELCOME, REFUSED = b"\x01", b"\x00"


def encrypts(tls: str, num_nodes: int) -> bool:
    """Whether connections between nodes are encrypted once both sides are known.

    Args:
        tls: "on", "off", or "auto": where a job has several nodes.
    """
    return num_nodes > 1 if tls == "auto" else tls == "on"


def role(side: bytes, tls: bool) -> bytes:
    """Who gives a proof, and whether it encrypts afterwards: nobody in between can talk them out of it."""
    return side + b" tls" if tls else side


def nonce() -> bytes:
    """Bytes that nobody has seen before."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(token: str, role: bytes, rank: int, first: bytes, second: bytes) -> bytes:
    """What only a holder of the token can say.

    Args:
        role: of who says it; a proof of one side is none of the other's.
        rank: that the caller claims.
        first, second: the nonces of the caller and of the one that is called.
    """
    text = role + rank.to_bytes(4, "big") + first + second
    return hmac.digest(token.encode(), text, hashlib.sha256)


def is_proof(said: bytes, token: str, role: bytes, rank: int, first: bytes, second: bytes) -> bool:
    """Whether `said` is that proof."""
    return hmac.compare_digest(said, prove(token, role, rank, first, second))


def encode_hello(rank: int, own_nonce: bytes) -> bytes:
    """The first message of a caller."""
    return _HELLO.pack(_MAGIC, rank, own_nonce)


def decode_hello(message: bytes) -> tuple[int, bytes]:
    """Rank and nonce; ValueError if it is no such message."""
    if len(message) != HELLO_BYTES:
        raise ValueError("no hello")
    magic, rank, its_nonce = _HELLO.unpack(message)
    if magic != _MAGIC:
        raise ValueError("no hello")
    return rank, its_nonce
