"""What it means that a call of gRPC has failed: an error that names who cannot talk to whom, or nothing.

The end of a gRPC channel that calls: one thread brings its letters, another fetches those for it.

A call that fails is made again, later each time, and goes on where the other side is; that is so until the
other side was out of reach for the grace. Invariant: a letter counts as brought only when the other side
says that it has it; both threads end when the other side is lost or `close` is called.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc

from paceline.comm.channel.grpc_protocol import (
    JOIN_METHOD,
    LEAVE_METHOD,
    MEET_METHOD,
    PEER_GONE,
    POSITION_METHOD,
    RECEIVE_METHOD,
    SEND_METHOD,
    SERVER_ROLE,
    CallClaim,
    backoff_seconds,
    call_timeout_seconds,
    channel_options,
    decode_position,
    method_path,
)
from paceline.comm.channel.message_channel import bad_message_error, peer_gone_error
from paceline.comm.channel.reliable_queue import (
    NumberedMessage,
    PeerIsGoneError,
    ReliableQueues,
    StreamPosition,
)
from paceline.errors import CommunicationError
from paceline.job.addresses import format_address
from paceline.job.handshake import CHALLENGE_BYTES, NONCE_BYTES, encode_hello, make_nonce, verify_proof


def refusal_error(error: grpc.RpcError, rank: int, hub_rank: int, whom: str) -> CommunicationError | None:
    """What the other side has said no to; None: it has not, so the call may be made again.

    Args:
        rank: of who has called.
        hub_rank, whom: who was called, as a rank and in words.
    """
    code, found = error.code(), None
    if code is grpc.StatusCode.UNAUTHENTICATED:
        found = wrong_token_error(rank, whom)
    elif code is grpc.StatusCode.FAILED_PRECONDITION and error.details() == PEER_GONE:
        found = peer_gone_error(hub_rank)
    elif code is grpc.StatusCode.ALREADY_EXISTS:
        found = CommunicationError(
            f"Rank {rank} has already joined {whom}.",
            next_step="give each node its own --node-rank; a node that comes late needs a new job",
        )
    if found is not None:
        found.peer = hub_rank
    return found


def wrong_token_error(rank: int, whom: str) -> CommunicationError:
    """A caller and who is called know other keys."""
    return CommunicationError(
        f"Rank {rank} has another token than {whom}: it belongs to another job.",
        next_step="give all nodes of one job the same key: --token-file, or PACELINE_TOKEN",
    )


def is_certificate_error(error: grpc.RpcError) -> bool:
    """Whether it is what gRPC says where one side does not take the other's certificate."""
    why = error.details() or ""
    return "Socket closed" in why or "handshake failed" in why


def unreachable_error(error: grpc.RpcError, rank: int, whom: str) -> CommunicationError:
    """Nobody answers, or the encryption cannot begin."""
    why = error.details() or ""
    if is_certificate_error(error):
        return CommunicationError(
            f"rank {rank} and {whom} do not have one certificate, or one of both encrypts and one does not:"
            f" {why}",
            next_step="give all nodes of one job the same security.tls and security.certificate",
        )
    return CommunicationError(
        f"rank {rank} cannot reach {whom}: {why}",
        next_step="check that the nodes reach each other on all ports",
    )


_LAST_WORD_SECONDS = 1.0
_GREETING_SECONDS = 5.0
_MAX_CERTIFICATE_FAILURES = 5  # times that they do not fit, before it is no accident
_START = StreamPosition(0, 0)


class GrpcClient:
    """Calls the hub of one rank.

    Args:
        room: its letters and ours.
        address, port: where it listens.
        rank: of who calls.
        token: the key of the job; it is never sent.
        hub_rank: whom it calls.
        credentials: of TLS; None: what is said is not encrypted.
    """

    def __init__(
        self,
        room: ReliableQueues,
        address: str,
        port: int,
        rank: int,
        token: str,
        *,
        hub_rank: int = 0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._room, self._rank, self._token, self._hub_rank = room, rank, token, hub_rank
        self._server_name = f"the server at {format_address(address, port)}"
        self._who = rank, hub_rank, self._server_name
        self._seconds = call_timeout_seconds(room.grace_seconds)
        self._nonces, self._random = (make_nonce(), b""), random.Random()
        self._closing, self._position_unknown = threading.Event(), False
        self._line = _open_grpc_channel(
            format_address(address, port), credentials, channel_options(room.grace_seconds)
        )
        self._threads = [
            threading.Thread(target=work, name=f"grpc-{work.__name__}", daemon=True)
            for work in (self._send_messages, self._receive_messages)
        ]

    def connect(self, deadline_seconds: float) -> None:
        """Show each other that both know the key, and begin.

        Raises:
            CommunicationError: the hub cannot be reached, or has another key or certificate.
        """
        expires, failures, certificates = time.monotonic() + deadline_seconds, 0, 0
        while True:
            left = max(0.1, expires - time.monotonic())
            try:
                self._greet(min(left, _GREETING_SECONDS))
                break
            except grpc.RpcError as error:
                said_no, pause = refusal_error(error, *self._who), backoff_seconds(failures, self._random)
                failures, certificates = failures + 1, certificates + is_certificate_error(error)
                late = time.monotonic() + pause >= expires or certificates == _MAX_CERTIFICATE_FAILURES
                if said_no or late:
                    self._line.close()
                    raise said_no or unreachable_error(error, self._rank, self._server_name) from error
                self._closing.wait(pause)
        self._room.add(self._hub_rank)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Say that this rank leaves, and end."""
        if self._hub_rank in self._room.ranks:
            with suppress(grpc.RpcError, PeerIsGoneError):
                self._call(LEAVE_METHOD, self._room.place(self._hub_rank), _LAST_WORD_SECONDS)
        self._closing.set()
        self._room.forget(self._hub_rank)
        self._line.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _greet(self, seconds: float) -> None:
        ours = self._nonces[0]
        said = self._line.unary_unary(method_path(MEET_METHOD))(
            encode_hello(self._rank, ours), timeout=seconds
        )
        answer, proof = said[:NONCE_BYTES], said[NONCE_BYTES:]
        self._nonces = ours, answer
        known = len(said) == CHALLENGE_BYTES and verify_proof(
            proof, self._token, SERVER_ROLE, self._rank, ours, answer
        )
        self._call(JOIN_METHOD, _START, seconds)  # a proof under another key lets the other side know, too
        if not known:
            raise wrong_token_error(self._rank, self._server_name)

    def _claim_metadata(self, method: str, place: StreamPosition) -> tuple[tuple[str, bytes]]:
        return CallClaim.make(method, self._rank, place, self._nonces, self._token).metadata()

    def _call(self, method: str, place: StreamPosition, seconds: float) -> bytes:
        """A short call."""
        call = self._line.unary_unary(method_path(method))
        found: bytes = call(b"", timeout=seconds, metadata=self._claim_metadata(method, place))
        self._met()
        return found

    def _met(self) -> None:
        with suppress(PeerIsGoneError):
            self._room.met(self._hub_rank)

    # What the threads do.

    def _send_messages(self) -> None:
        """Bring one letter after another, until this end closes or the other is lost."""

        def one() -> None:
            letter = self._room.next_message(self._hub_rank, self._seconds, self._wanted)
            if letter is not None:
                self._bring(letter)

        self._repeat_with_backoff(one)

    def _receive_messages(self) -> None:
        """Fetch one letter after another."""
        self._repeat_with_backoff(self._fetch)

    def _repeat_with_backoff(self, once: Callable[[], None]) -> None:
        failures = 0
        while self._wanted():
            try:
                once()
                failures = 0
            except PeerIsGoneError:
                return
            except ValueError as error:
                self._room.lose(bad_message_error(self._hub_rank, str(error)))
            except grpc.RpcError as error:
                said_no = refusal_error(error, *self._who)
                if said_no:
                    self._room.lose(said_no)
                failures += 1
                self._closing.wait(backoff_seconds(failures, self._random))

    def _wanted(self) -> bool:
        return not self._closing.is_set()

    def _bring(self, letter: NumberedMessage) -> None:
        """Bring a letter from where the other side is; it says how far it has come."""
        there = (
            decode_position(self._call(POSITION_METHOD, _START, self._seconds))
            if self._position_unknown
            else None
        )
        start = there.num_bytes if there and there.number + 1 == letter.number else 0
        self._position_unknown = True
        place, (first, *more) = StreamPosition(letter.number, start), [*letter.after(start)] or [b""]
        said = {"timeout": self._seconds, "metadata": self._claim_metadata(SEND_METHOD, place)}
        if more:
            answer = self._line.stream_unary(method_path(SEND_METHOD))(
                self._track_progress(letter, start), **said
            )
        else:
            answer = self._line.unary_unary(method_path(SEND_METHOD))(first, **said)
        self._met()
        self._room.has(self._hub_rank, decode_position(answer))
        self._position_unknown = decode_position(answer) != StreamPosition(letter.number, 0)

    def _track_progress(self, letter: NumberedMessage, start: int) -> Iterator[bytes]:
        for chunk in letter.after(start):
            yield chunk
            start += len(chunk)
            with suppress(PeerIsGoneError):
                self._room.moved(self._hub_rank, StreamPosition(letter.number - 1, start))

    def _fetch(self) -> None:
        """Fetch the next letter, or what is left of it."""
        place = self._room.place(self._hub_rank)
        mine = self._room.begin(self._hub_rank, place.number + 1, place.num_bytes)
        until = time.monotonic() + self._seconds
        fetch = self._line.unary_stream(method_path(RECEIVE_METHOD))
        call = fetch(b"", timeout=self._seconds, metadata=self._claim_metadata(RECEIVE_METHOD, place))
        for chunk in call:
            self._met()
            left = max(0.0, until - time.monotonic())
            goes_on = self._room.take(self._hub_rank, mine, chunk, left, call.is_active)
            if not goes_on and self._room.place(self._hub_rank).number == place.number:
                call.cancel()  # there is no room: what has not come is fetched by another call
                return
        self._met()


def _open_grpc_channel(place: str, credentials: grpc.ChannelCredentials | None, chosen: list) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(place, chosen)
    return grpc.secure_channel(place, credentials, chosen)
