"""The client end of a gRPC channel: one thread sends messages to the server, another receives them.

A call that fails is made again, later each time, and continues at the position of the other side, until that
was unreachable for the grace period. Invariant: a message counts as sent only when the other side has
acknowledged it; both threads end when the other side is lost or `close` is called.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc

from paceline.comm.channel.grpc_protocol import (
    HELLO_KEY,
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
from paceline.job.handshake import (
    CHALLENGE_BYTES,
    NONCE_BYTES,
    encode_hello,
    make_nonce,
    mismatch_error,
    verify_proof,
)


def refusal_error(error: grpc.RpcError, caller: str, hub_rank: int, whom: str) -> CommunicationError | None:
    """Return the error of a call that the server has refused; None: it has not, so the call may be made
    again.

    Args:
        caller: the client, in words.
        hub_rank, whom: the server, as a rank and in words.
    """
    code, refusal = error.code(), None
    if code is grpc.StatusCode.UNAUTHENTICATED:
        refusal = mismatch_error(caller, whom, has_key=False)
    elif code is grpc.StatusCode.FAILED_PRECONDITION and error.details() == PEER_GONE:
        refusal = peer_gone_error(hub_rank)
    elif code is grpc.StatusCode.ALREADY_EXISTS:
        refusal = CommunicationError(
            f"{caller} has already joined {whom}",
            next_step="give each node its own --node-rank; a node that is too late needs a new job",
        )
    if refusal is not None:
        refusal.peer = hub_rank
    return refusal


def is_certificate_error(error: grpc.RpcError) -> bool:
    """Return whether gRPC reports that one side does not accept the other's certificate."""
    why = error.details() or ""
    return "Socket closed" in why or "handshake failed" in why


def unreachable_error(error: grpc.RpcError, caller: str, whom: str) -> CommunicationError:
    """Return the error that the server does not answer, or that the encryption cannot begin."""
    why = error.details() or ""
    if is_certificate_error(error):
        return CommunicationError(
            f"{caller} and {whom} do not have the same certificate, or only one of them encrypts: {why}",
            next_step="give all nodes of one job the same security.tls and security.certificate",
        )
    return CommunicationError(
        f"{caller} cannot reach {whom}: {why}",
        next_step="check that the nodes reach each other on all ports",
    )


_CLOSE_SECONDS = 1.0
_GREETING_SECONDS = 5.0
# The server may just be starting, so a certificate error has to repeat before it counts.
_MAX_CERTIFICATE_FAILURES = 5
_START = StreamPosition(0, 0)


class GrpcClient:
    """A client of the server of one rank.

    Args:
        queues: queues of messages.
        address, port: address of the server.
        rank: rank of this client.
        token: the key of the job; it is never sent.
        hub_rank: rank of the server.
        credentials: TLS credentials; None: calls are not encrypted.
        name: the client in words, for errors; empty: its rank.
    """

    def __init__(
        self,
        queues: ReliableQueues,
        address: str,
        port: int,
        rank: int,
        token: str,
        *,
        hub_rank: int = 0,
        credentials: grpc.ChannelCredentials | None = None,
        name: str = "",
    ) -> None:
        self._queues, self._rank, self._token, self._hub_rank = queues, rank, token, hub_rank
        self._server_name = f"the server at {format_address(address, port)}"
        self._caller = name or f"rank {rank}"
        self._who = self._caller, hub_rank, self._server_name
        self._seconds = call_timeout_seconds(queues.grace_seconds)
        self._nonces, self._random = (make_nonce(), b""), random.Random()
        self._closing, self._position_unknown = threading.Event(), False
        self._channel = _open_grpc_channel(
            format_address(address, port), credentials, channel_options(queues.grace_seconds)
        )
        self._threads = [
            threading.Thread(target=work, name=f"grpc-{work.__name__}", daemon=True)
            for work in (self._send_messages, self._receive_messages)
        ]

    def connect(self, deadline_seconds: float) -> None:
        """Prove to each other that both know the key, and start the threads.

        Raises:
            CommunicationError: the server cannot be reached, or has another key or certificate.
        """
        expires, failures, certificate_failures = time.monotonic() + deadline_seconds, 0, 0
        while True:
            # The last try needs a positive timeout, too.
            left = max(0.1, expires - time.monotonic())
            try:
                self._greet(min(left, _GREETING_SECONDS))
                break
            except grpc.RpcError as error:
                refusal, pause = refusal_error(error, *self._who), backoff_seconds(failures, self._random)
                failures, certificate_failures = (
                    failures + 1,
                    certificate_failures + is_certificate_error(error),
                )
                late = (
                    time.monotonic() + pause >= expires or certificate_failures == _MAX_CERTIFICATE_FAILURES
                )
                if refusal or late:
                    self._channel.close()
                    raise refusal or unreachable_error(error, self._caller, self._server_name) from error
                self._closing.wait(pause)
        self._queues.add_peer(self._hub_rank)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Say that this rank leaves, and end."""
        if self._hub_rank in self._queues.ranks:
            with suppress(grpc.RpcError, PeerIsGoneError):
                self._call(LEAVE_METHOD, self._queues.position(self._hub_rank), _CLOSE_SECONDS)
        self._closing.set()
        self._queues.drop(self._hub_rank)
        self._channel.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _greet(self, seconds: float) -> None:
        client_nonce = self._nonces[0]
        hello = ((HELLO_KEY, encode_hello(self._rank, client_nonce)),)
        reply = self._channel.unary_unary(method_path(MEET_METHOD))(b"", timeout=seconds, metadata=hello)
        server_nonce, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
        self._nonces = client_nonce, server_nonce
        known = len(reply) == CHALLENGE_BYTES and verify_proof(
            proof, self._token, SERVER_ROLE, self._rank, client_nonce, server_nonce
        )
        # Join even if the proof was wrong: the server then learns, too, that this rank has another key.
        self._call(JOIN_METHOD, _START, seconds)
        if not known:
            raise mismatch_error(self._caller, self._server_name, has_key=False)

    def _claim_metadata(self, method: str, position: StreamPosition) -> tuple[tuple[str, bytes]]:
        return CallClaim.make(method, self._rank, position, self._nonces, self._token).metadata()

    def _call(self, method: str, position: StreamPosition, seconds: float) -> bytes:
        """Make a short call."""
        call = self._channel.unary_unary(method_path(method))
        answer: bytes = call(b"", timeout=seconds, metadata=self._claim_metadata(method, position))
        self._note_contact()
        return answer

    def _note_contact(self) -> None:
        with suppress(PeerIsGoneError):
            self._queues.note_contact(self._hub_rank)

    # The work of the threads.

    def _send_messages(self) -> None:
        """Send one message after another, until this end closes or the other is lost."""

        def send_next() -> None:
            message = self._queues.next_message(self._hub_rank, self._seconds, self._wanted)
            if message is not None:
                self._send(message)

        self._repeat_with_backoff(send_next)

    def _receive_messages(self) -> None:
        """Receive one message after another."""
        self._repeat_with_backoff(self._receive)

    def _repeat_with_backoff(self, once: Callable[[], None]) -> None:
        failures = 0
        while self._wanted():
            try:
                once()
                failures = 0
            except PeerIsGoneError:
                return
            except ValueError as error:
                self._queues.mark_lost(bad_message_error(self._hub_rank, str(error)))
            except grpc.RpcError as error:
                refusal = refusal_error(error, *self._who)
                if refusal:
                    self._queues.mark_lost(refusal)
                failures += 1
                # An event and not a sleep, so that `close` ends the wait.
                self._closing.wait(backoff_seconds(failures, self._random))

    def _wanted(self) -> bool:
        return not self._closing.is_set()

    def _send(self, message: NumberedMessage) -> None:
        """Send a message from the position of the other side, which answers with its new position."""
        remote = (
            decode_position(self._call(POSITION_METHOD, _START, self._seconds))
            if self._position_unknown
            else None
        )
        # A message that the server has in part is continued; any other starts with its first byte.
        start = remote.num_bytes if remote and remote.number + 1 == message.number else 0
        # If this call fails, the server may have taken any part of it, so the next one asks first.
        self._position_unknown = True
        position, (first, *more) = StreamPosition(message.number, start), [*message.after(start)] or [b""]
        options = {"timeout": self._seconds, "metadata": self._claim_metadata(SEND_METHOD, position)}
        # A message of one chunk needs no stream, and a unary call is cheaper.
        if more:
            answer = self._channel.stream_unary(method_path(SEND_METHOD))(
                self._track_progress(message, start), **options
            )
        else:
            answer = self._channel.unary_unary(method_path(SEND_METHOD))(first, **options)
        self._note_contact()
        self._queues.acknowledge(self._hub_rank, decode_position(answer))
        self._position_unknown = decode_position(answer) != StreamPosition(message.number, 0)

    def _track_progress(self, message: NumberedMessage, start: int) -> Iterator[bytes]:
        for chunk in message.after(start):
            yield chunk
            start += len(chunk)
            with suppress(PeerIsGoneError):
                self._queues.note_progress(self._hub_rank, StreamPosition(message.number - 1, start))

    def _receive(self) -> None:
        """Receive the next message, or the rest of it."""
        position = self._queues.position(self._hub_rank)
        call_number = self._queues.begin_call(self._hub_rank, position.number + 1, position.num_bytes)
        until = time.monotonic() + self._seconds
        fetch = self._channel.unary_stream(method_path(RECEIVE_METHOD))
        call = fetch(b"", timeout=self._seconds, metadata=self._claim_metadata(RECEIVE_METHOD, position))
        for chunk in call:
            self._note_contact()
            left = max(0.0, until - time.monotonic())
            goes_on = self._queues.add_chunk(self._hub_rank, call_number, chunk, left, call.is_active)
            if not goes_on and self._queues.position(self._hub_rank).number == position.number:
                # There is no room: the rest is fetched by another call.
                call.cancel()
                return
        self._note_contact()


def _open_grpc_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: list
) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, credentials, options)
