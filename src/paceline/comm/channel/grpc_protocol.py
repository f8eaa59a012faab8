"""The protocol of a gRPC channel: its methods, the proof of a caller, and the time limits.

One rank calls, the other answers. A client sends its messages (`Bring`) and receives those for it (`Fetch`),
in streams of chunks; no call stays open for long, and one that ends early is continued at the position of the
other side (`Where`). Every call has a deadline, and a proof made with the job's key; the key itself is never
sent. The proof is in the metadata of a call, so that a server decides before it reads a message. Bytes are
sent as they are: no protobuf, no pickle.
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
_CLAIM_KEY, HELLO_KEY = f"{SERVICE.lower()}-bin", f"{SERVICE.lower()}.hello-bin"
_CLAIM = struct.Struct(f"!IQQ{NONCE_BYTES}s{PROOF_BYTES}s")
_POSITION = struct.Struct("!QQ")
MAX_CALL_SECONDS = 30.0
_HANDSHAKE_MS = 10_000
# A rank has two long calls and a short one; the rest is room for calls that break off.
_MAX_CONNECTION_CALLS = 16
_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.05, 2.0


class CallClaim(NamedTuple):
    """The claim of a caller: its rank, and a position in the messages of one side.

    Args:
        rank: rank of the caller.
        position: of a message that is sent its number and first byte; otherwise the position that the caller
            has reached.
        nonce: random number of the caller for this channel.
        proof: proof over all of it, and over the answer to its nonce.
    """

    rank: int
    position: StreamPosition
    nonce: bytes
    proof: bytes

    @classmethod
    def make(
        cls, method: str, rank: int, position: StreamPosition, nonces: tuple[bytes, bytes], token: str
    ) -> CallClaim:
        """Make a claim with its proof, which is valid for this call alone."""
        return cls(rank, position, nonces[0], compute_proof(token, _role(method, position), rank, *nonces))

    def is_valid_claim(self, method: str, answer: bytes, token: str) -> bool:
        """Return whether the caller knows the key; `answer` is the nonce of the server."""
        return verify_proof(self.proof, token, _role(method, self.position), self.rank, self.nonce, answer)

    def metadata(self) -> tuple[tuple[str, bytes]]:
        """Return the claim as metadata of a call."""
        return ((_CLAIM_KEY, _CLAIM.pack(self.rank, *self.position, self.nonce, self.proof)),)

    @classmethod
    def read(cls, metadata: Iterable[tuple[str, str | bytes]]) -> CallClaim:
        """Return the inverse of `metadata`.

        Raises:
            ValueError: there is none.
        """
        value = read_metadata(metadata, _CLAIM_KEY)
        if len(value) != _CLAIM.size:
            raise ValueError("no claim")
        rank, number, num_bytes, nonce, proof = _CLAIM.unpack(value)
        return cls(rank, StreamPosition(number, num_bytes), nonce, proof)


def read_metadata(metadata: Iterable[tuple[str, str | bytes]], key: str) -> bytes:
    """Return the bytes under a key; none if there is no such key."""
    value = next((value for name, value in metadata if name == key), b"")
    return value if isinstance(value, bytes) else b""


def _role(method: str, position: StreamPosition) -> bytes:
    return f"grpc {method} ".encode() + encode_position(position)


def server_nonce(secret: bytes, rank: int, nonce: bytes) -> bytes:
    """Derive the nonce of the server from its secret, so that nothing is stored for callers without a
    proof.
    """
    return hmac.digest(secret, rank.to_bytes(4, "big") + nonce, hashlib.sha256)


def encode_position(position: StreamPosition) -> bytes:
    """Encode a position in 16 bytes."""
    return _POSITION.pack(*position)


def decode_position(data: bytes) -> StreamPosition:
    """Return the inverse of `encode_position`.

    Raises:
        ValueError: these are not 16 bytes.
    """
    if len(data) != _POSITION.size:
        raise ValueError("this is no position of 16 bytes")
    return StreamPosition(*_POSITION.unpack(data))


def call_timeout_seconds(grace_seconds: float) -> float:
    """Return the limit of a call: short enough to notice a lost peer within the grace period."""
    return min(MAX_CALL_SECONDS, grace_seconds / 2)


def backoff_seconds(failures: int, rng: random.Random) -> float:
    """Return the time before the next try: doubled after each failure, and shortened at random by up to a
    half.
    """
    longest = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2 ** min(failures, 16))
    return longest * (0.5 + rng.random() / 2)


def method_path(method: str) -> str:
    """Return the name of a method for gRPC."""
    return f"/{SERVICE}/{method}"


def channel_options(grace_seconds: float) -> list[tuple[str, int | str]]:
    """Return options of gRPC for either end: a dead connection is noticed within the grace period, and
    retried soon.
    """
    ping = max(1000, int(250 * grace_seconds))
    return [
        ("grpc.max_receive_message_length", 2 * CHUNK_BYTES),
        ("grpc.keepalive_time_ms", ping),
        ("grpc.keepalive_timeout_ms", ping),
        # Idle connections are pinged by both ends; servers would otherwise close them for too many pings.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Ranks are in one network: a proxy of the environment must not be used.
        ("grpc.enable_http_proxy", 0),
        # A retry of gRPC would send a stream again from its first byte.
        ("grpc.enable_retries", 0),
        # Each channel has a connection of its own.
        ("grpc.use_local_subchannel_pool", 1),
        # Two servers on one port would each get some of the other's calls.
        ("grpc.so_reuseport", 0),
        # Certificates are issued for this fixed name, as addresses are known only when the job starts.
        ("grpc.ssl_target_name_override", CERTIFICATE_HOST_NAME),
    ]


def server_options(grace_seconds: float) -> list[tuple[str, int | str]]:
    """Return options of gRPC for a server: clients that have proved nothing hold little, and not for long."""
    return [
        *channel_options(grace_seconds),
        # for TLS, and for the first frame of HTTP/2
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # A rank always has a call in progress; one that has none for so long just connects again.
        ("grpc.max_connection_idle_ms", _HANDSHAKE_MS),
        ("grpc.max_concurrent_streams", _MAX_CONNECTION_CALLS),
    ]


def require_grpc() -> None:
    """Raise an error if gRPC is not installed.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import grpc  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "channel=grpc needs grpcio, which is not installed.",
            next_step="pip install 'paceline[grpc]'",
        ) from error
