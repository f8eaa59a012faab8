"""What both ends of a gRPC channel have in common: the calls, who makes them, how long they may take.

One rank calls, the other answers. A caller brings its letters (`Bring`) and fetches those for it (`Fetch`),
in streams of chunks; no call stays open for long, and one that ends early goes on where the other side is
(`Where`). Every call has a deadline, and shows by the job's key who makes it; the key itself is never sent.
Bytes go in and out as they are: no protobuf, no pickle.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import struct
from collections.abc import Iterable
from typing import NamedTuple

from paceline.comm.channel.reliable_queue import CHUNK_BYTES, StreamPosition
from paceline.errors import MissingExtraError
from paceline.job.handshake import NONCE_BYTES, PROOF_BYTES, compute_proof, verify_proof
from paceline.job.tls import CERTIFICATE_HOST_NAME

SERVICE = "paceline.Channel"
MEET_METHOD, JOIN_METHOD, POSITION_METHOD, SEND_METHOD, RECEIVE_METHOD, LEAVE_METHOD = (
    "Meet",
    "Join",
    "Where",
    "Bring",
    "Fetch",
    "Leave",
)
SERVER_ROLE = b"grpc called"
PEER_GONE = "gone"
_WHO = f"{SERVICE.lower()}-bin"
_HEAD = struct.Struct(f"!IQQ{NONCE_BYTES}s{PROOF_BYTES}s")
_PLACE = struct.Struct("!QQ")
_MOST_CALL_SECONDS = 30.0
_FIRST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.05, 2.0


class CallClaim(NamedTuple):
    """Who makes a call, and where in the letters of the other side or its own it begins.

    Args:
        rank: of the caller.
        place: of a letter that is brought its number, and the byte from which on; else what the caller has.
        nonce: that the caller has made up for this channel.
        proof: of all of it, and of the answer to its nonce.
    """

    rank: int
    place: StreamPosition
    nonce: bytes
    proof: bytes

    @classmethod
    def make(
        cls, method: str, rank: int, place: StreamPosition, nonces: tuple[bytes, bytes], token: str
    ) -> CallClaim:
        """A claim with its proof, which is good for this call alone."""
        return cls(rank, place, nonces[0], compute_proof(token, _role(method, place), rank, *nonces))

    def is_valid_claim(self, method: str, answer: bytes, token: str) -> bool:
        """Whether it is from one who knows the key; `answer` is the nonce of who is called."""
        return verify_proof(self.proof, token, _role(method, self.place), self.rank, self.nonce, answer)

    def metadata(self) -> tuple[tuple[str, bytes]]:
        """As it travels beside a call."""
        return ((_WHO, _HEAD.pack(self.rank, *self.place, self.nonce, self.proof)),)

    @classmethod
    def read(cls, metadata: Iterable[tuple[str, str | bytes]]) -> CallClaim:
        """The inverse of `metadata`.

        Raises:
            ValueError: there is none.
        """
        said = next((value for key, value in metadata if key == _WHO), b"")
        if not isinstance(said, bytes) or len(said) != _HEAD.size:
            raise ValueError("no claim")
        rank, number, num_bytes, nonce, proof = _HEAD.unpack(said)
        return cls(rank, StreamPosition(number, num_bytes), nonce, proof)


def _role(method: str, place: StreamPosition) -> bytes:
    return f"grpc {method} ".encode() + encode_position(place)


def server_nonce(secret: bytes, rank: int, nonce: bytes) -> bytes:
    """The nonce of who is called: of its secret, so that nothing is kept for callers who show nothing."""
    return hmac.digest(secret, rank.to_bytes(4, "big") + nonce, hashlib.sha256)


def encode_position(place: StreamPosition) -> bytes:
    """Sixteen bytes."""
    return _PLACE.pack(*place)


def decode_position(data: bytes) -> StreamPosition:
    """The inverse of `encode_position`; ValueError if it is none."""
    if len(data) != _PLACE.size:
        raise ValueError("no place in letters")
    return StreamPosition(*_PLACE.unpack(data))


def call_timeout_seconds(grace_seconds: float) -> float:
    """How long a call may take: short enough to notice within the grace that nobody is there."""
    return min(_MOST_CALL_SECONDS, grace_seconds / 2)


def backoff_seconds(failures: int, rng: random.Random) -> float:
    """How long to wait before the next try: twice as long after each failure, at random by up to a half."""
    longest = min(_MOST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(failures, 16))
    return longest * (0.5 + rng.random() / 2)


def method_path(method: str) -> str:
    """By which gRPC knows a method."""
    return f"/{SERVICE}/{method}"


def channel_options(grace_seconds: float) -> list[tuple[str, int | str]]:
    """Of gRPC, for either end: a line that is dead is noticed within the grace, and tried again soon."""
    ping = max(1000, int(250 * grace_seconds))
    return [
        ("grpc.max_receive_message_length", 2 * CHUNK_BYTES),
        ("grpc.keepalive_time_ms", ping),
        ("grpc.keepalive_timeout_ms", ping),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # it would send a stream again from its first byte
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.so_reuseport", 0),
        ("grpc.ssl_target_name_override", CERTIFICATE_HOST_NAME),
    ]


def require_grpc() -> None:
    """Raises: MissingExtraError: gRPC is not installed."""
    try:
        import grpc  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "channel=grpc needs grpcio, which is not installed.",
            next_step="pip install 'paceline[grpc]'",
        ) from error
