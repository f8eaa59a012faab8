"""The server end of a gRPC channel: it takes the messages of clients, and returns those for them.

Invariants: a call without a valid proof does nothing, is refused with a reason, and is counted; nothing is
stored for it. No message of a caller is read before its proof was checked, so that a caller that sends half
of one holds no thread. Calls that broke off use no memory and no thread: each call of a rank ends the one
before it, and all have a deadline.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from paceline.comm.channel.grpc_protocol import (
    HELLO_KEY,
    JOIN_METHOD,
    LEAVE_METHOD,
    MAX_CALL_SECONDS,
    MEET_METHOD,
    PEER_GONE,
    POSITION_METHOD,
    RECEIVE_METHOD,
    SEND_METHOD,
    SERVER_ROLE,
    SERVICE,
    CallClaim,
    call_timeout_seconds,
    encode_position,
    read_metadata,
    server_nonce,
    server_options,
)
from paceline.comm.channel.message_channel import bad_message_error, peer_gone_error
from paceline.comm.channel.reliable_queue import PeerIsGoneError, ReliableQueues, StreamPosition
from paceline.errors import CommunicationError, DeadlineError, format_count
from paceline.job.addresses import format_address
from paceline.job.handshake import OTHER_KEY, compute_proof, decode_hello
from paceline.observe.file_writing import warn_on_stderr

_SPARE_THREADS = 8
_CLOSE_SECONDS = 1.0
_MAX_REJECTED_RANKS = 128
_SILENT_SECONDS = 1.0
"""Time without a call after which a caller counts as gone, so that another process may take its place."""


class GrpcServer:
    """A server for ranks that call.

    Args:
        queues: queues of messages.
        address: address by which others reach this host.
        ranks: ranks that may connect, each once, or a range of numbers.
        token: the key of the job; it is never sent.
        credentials: TLS credentials; None: calls are not encrypted.
        log: called with the number of rejected calls, if there were any.
        port: where it listens; 0: any free port.
        max_peers: how many of the ranks are connected at the same time; None: all.
        returning: a rank whose process is gone may connect again from another process.
    Attributes:
        port: where it listens.
    Raises:
        CommunicationError: it cannot listen there.
    """

    def __init__(
        self,
        queues: ReliableQueues,
        address: str,
        ranks: Sequence[int],
        token: str,
        credentials: grpc.ServerCredentials | None = None,
        log: Callable[[str], object] = warn_on_stderr,
        *,
        port: int = 0,
        max_peers: int | None = None,
        returning: bool = False,
    ) -> None:
        self._queues, self._ranks, self._token, self._log = queues, ranks, token, log
        self._max_peers, self._returning = len(ranks) if max_peers is None else max_peers, returning
        # Nonces are derived from it, so nothing is stored for a caller before it has a valid proof.
        self._secret = secrets.token_bytes(32)
        self._changed = threading.Condition()
        # Nonces of the ranks that have connected.
        self._nonces: dict[int, bytes] = {}
        # The call of each rank that is being served, by method.
        self._running: dict[tuple[int, str], grpc.ServicerContext] = {}
        # When the last call of each rank ended.
        self._ended_at: dict[int, float] = {}
        # Ranks that know that this rank has left, or have left themselves.
        self._informed: set[int] = set()
        self._num_rejected, self._rejected_ranks = 0, set[int]()
        self._seconds = call_timeout_seconds(queues.grace_seconds)
        # Each rank has two long calls, one in each direction; spare threads answer the short ones.
        num_threads = 2 * self._max_peers + _SPARE_THREADS
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grpc-hub")
        self._server = grpc.server(
            self._threads,
            options=server_options(queues.grace_seconds),
            maximum_concurrent_rpcs=4 * self._max_peers + 4 * _SPARE_THREADS,
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._calls()),))
        self.port = self._listen(address, port, credentials)
        self._server.start()

    def _calls(self) -> dict[str, grpc.RpcMethodHandler]:
        # For a method with one request, gRPC reads it before it calls the method, in a thread that waits for
        # as long as the caller likes. So all methods take a stream, which most of them do not read.
        answers = grpc.stream_unary_rpc_method_handler
        return {
            MEET_METHOD: answers(self._meet),
            JOIN_METHOD: answers(self._join),
            POSITION_METHOD: answers(self._position),
            SEND_METHOD: answers(self._receive),
            RECEIVE_METHOD: grpc.stream_stream_rpc_method_handler(self._send),
            LEAVE_METHOD: answers(self._leave),
        }

    def _listen(self, address: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
        position = format_address(address, port)
        try:
            if credentials is None:
                return int(self._server.add_insecure_port(position))
            return int(self._server.add_secure_port(position, credentials))
        except RuntimeError as error:
            raise CommunicationError(
                f"this rank cannot serve at {position}: {error}",
                next_step="look at the address of this node",
            ) from error

    def wait_for_all(self, deadline_seconds: float) -> None:
        """Wait until every rank has connected.

        Raises:
            DeadlineError: some did not connect in time; names them.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._missing(), deadline_seconds)
            missing, strangers, self._num_rejected = self._missing(), self._num_rejected, 0
        if strangers:
            self._log(f"the server rejected {format_count(strangers, 'call')} from outside this job")
        if missing:
            reasons = "".join(f"; rank {rank} has {OTHER_KEY}" for rank in sorted(self._rejected_ranks))
            raise DeadlineError(
                f"ranks {missing} did not connect within {deadline_seconds:g} s{reasons}",
                next_step="look at what these ranks printed",
            )

    def _missing(self) -> list[int]:
        return sorted({*self._ranks} - self._nonces.keys())

    def close(self) -> None:
        """Tell all connected ranks that this rank leaves, and end."""
        connected = {rank for rank in self._queues.ranks if rank in self._ranks}
        for rank in connected:
            self._queues.drop(rank)
        with self._changed:
            self._changed.wait_for(lambda: connected <= self._informed, _CLOSE_SECONDS)
        # Calls in flight may carry the acknowledgement of the last message.
        self._server.stop(_CLOSE_SECONDS).wait()
        self._threads.shutdown(wait=True)

    # The methods. gRPC runs each in a thread of the pool.

    def _meet(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Prove to a client that this rank knows the key."""
        try:
            rank, client_nonce = decode_hello(read_metadata(context.invocation_metadata(), HELLO_KEY))
        except ValueError:
            self._reject(context, "this is no call of a job")
        server_nonce_bytes = server_nonce(self._secret, rank, client_nonce)
        return server_nonce_bytes + compute_proof(
            self._token, SERVER_ROLE, rank, client_nonce, server_nonce_bytes
        )

    def _join(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Let a rank connect; once, or again if it is gone and may return."""
        claim = self._claim(JOIN_METHOD, context)
        with self._changed:
            # The first call with a valid proof is the rank; another process with its number is refused below.
            if self._may_connect(claim):
                self._nonces[claim.rank] = claim.nonce
                self._informed.discard(claim.rank)
                self._queues.drop(claim.rank)  # what an earlier process of the rank has left
                self._queues.add_peer(claim.rank)
                self._changed.notify_all()
        self._require_connected(claim, context)
        return b""

    def _may_connect(self, claim: CallClaim) -> bool:
        known = self._nonces.get(claim.rank)
        if known is None:
            return len(self._nonces) < self._max_peers or len(self._queues.ranks) < self._max_peers
        is_called = any(rank == claim.rank for rank, _ in self._running)
        silent_seconds = time.monotonic() - self._ended_at.get(claim.rank, 0.0)
        return (
            self._returning and known != claim.nonce and not is_called and silent_seconds >= _SILENT_SECONDS
        )

    def _position(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Return the position up to which messages of a rank have arrived."""
        claim = self._require_connected(self._claim(POSITION_METHOD, context), context)
        with self._serving(POSITION_METHOD, claim.rank, context):
            return encode_position(self._queues.position(claim.rank))

    def _receive(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Take a message of a rank, from a byte on."""
        claim = self._require_connected(self._claim(SEND_METHOD, context), context)
        with self._serving(SEND_METHOD, claim.rank, context):
            call = self._queues.begin_call(claim.rank, *claim.position)
            for chunk in chunks if call else ():
                if not self._queues.add_chunk(claim.rank, call, chunk, self._seconds, context.is_active):
                    break
            return encode_position(self._queues.position(claim.rank))

    def _send(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the next message for a rank, from its position; nothing, if there is none for half of a
        call.
        """
        claim = self._require_connected(self._claim(RECEIVE_METHOD, context), context)
        with self._serving(RECEIVE_METHOD, claim.rank, context):
            number, start = claim.position
            self._queues.acknowledge(claim.rank, claim.position)
            # Half of the limit, so that an empty answer arrives before the client's own deadline.
            message = self._queues.next_message(claim.rank, self._seconds / 2, context.is_active)
            if message is None or message.number != number + 1:
                return
            for chunk in message.after(start):
                yield chunk
                start += len(chunk)
                self._queues.note_progress(claim.rank, StreamPosition(number, start))

    def _leave(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Let a rank leave, after everything that it has sent was taken."""
        claim = self._require_connected(self._claim(LEAVE_METHOD, context), context)
        with self._serving(LEAVE_METHOD, claim.rank, context):
            self._queues.acknowledge(claim.rank, claim.position)
            self._queues.mark_lost(peer_gone_error(claim.rank))
        self._mark_informed(claim.rank)
        return b""

    @contextmanager
    def _serving(self, method: str, rank: int, context: grpc.ServicerContext) -> Iterator[None]:
        """Run a call of a connected rank: it ends the one before it, records the contact, and is aborted when
        the rank is lost.
        """
        # A thread that waits for a message has to notice that its call has ended.
        context.add_callback(self._queues.wake)
        with self._changed:
            earlier, self._running[rank, method] = self._running.get((rank, method)), context
        if earlier is not None:
            # A thread that reads from it is free at once, and not only at its deadline.
            earlier.cancel()
        try:
            self._queues.note_contact(rank)
            yield
        except PeerIsGoneError:
            self._mark_informed(rank)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, PEER_GONE)
        except ValueError as error:
            self._queues.mark_lost(bad_message_error(rank, str(error)))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, PEER_GONE)
        finally:
            with self._changed:
                self._ended_at[rank] = time.monotonic()
                if self._running.get((rank, method)) is context:
                    del self._running[rank, method]

    def _claim(self, method: str, context: grpc.ServicerContext) -> CallClaim:
        try:
            claim = CallClaim.read(context.invocation_metadata())
        except ValueError:
            self._reject(context, "this is no call of a job")
        if not claim.is_valid_claim(method, server_nonce(self._secret, claim.rank, claim.nonce), self._token):
            with self._changed:
                if claim.rank in self._ranks and len(self._rejected_ranks) < _MAX_REJECTED_RANKS:
                    self._rejected_ranks.add(claim.rank)
            self._reject(context, OTHER_KEY)
        if claim.rank not in self._ranks:
            self._reject(context, f"rank {claim.rank} may not connect here")
        remaining = context.time_remaining()
        # Ranks set a deadline; without one, a copy of their call could hold a thread until the job ends.
        if remaining is None or remaining > MAX_CALL_SECONDS + _CLOSE_SECONDS:
            self._reject(context, "a call needs a deadline")
        return claim

    def _require_connected(self, claim: CallClaim, context: grpc.ServicerContext) -> CallClaim:
        if self._nonces.get(claim.rank) != claim.nonce:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"rank {claim.rank} has already connected")
        return claim

    def _reject(self, context: grpc.ServicerContext, why: str) -> None:
        with self._changed:
            self._num_rejected += 1
        context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    def _mark_informed(self, rank: int) -> None:
        with self._changed:
            self._informed.add(rank)
            self._changed.notify_all()
