"""The end of a gRPC channel that is called: takes what callers bring, and gives what is there for them.

Invariant: a call without the right proof does nothing, is refused with its reason, and is counted; nothing
is kept for it. Calls that broke off hold no room: each call of a rank ends those before it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

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
    SERVICE,
    CallClaim,
    call_timeout_seconds,
    channel_options,
    encode_position,
    server_nonce,
)
from paceline.comm.channel.message_channel import bad_message_error, peer_gone_error
from paceline.comm.channel.reliable_queue import PeerIsGoneError, ReliableQueues, StreamPosition
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.addresses import format_address
from paceline.job.handshake import compute_proof, decode_hello
from paceline.observe.file_writing import warn_on_stderr

_SPARE_THREADS = 8
_LAST_WORD_SECONDS = 1.0


class GrpcServer:
    """Serves ranks that call.

    Args:
        room: its letters and theirs.
        address: by which others reach this host.
        ranks: that may come, each once.
        token: the key of the job; it is never sent.
        credentials: of TLS; None: what is said is not encrypted.
        say: is told how many were turned away, if there were any.
    Attributes:
        port: where it listens.
    Raises:
        CommunicationError: it cannot listen there.
    """

    def __init__(
        self,
        room: ReliableQueues,
        address: str,
        ranks: Sequence[int],
        token: str,
        credentials: grpc.ServerCredentials | None = None,
        say: Callable[[str], object] = warn_on_stderr,
    ) -> None:
        self._room, self._ranks, self._token, self._say = room, frozenset(ranks), token, say
        self._secret = secrets.token_bytes(32)
        self._changed = threading.Condition()
        self._nonces: dict[int, bytes] = {}  # of those that have come
        self._told: set[int] = set()  # that this rank has left, or they have
        self._num_rejected, self._rejected_ranks = 0, set[int]()
        self._seconds = call_timeout_seconds(room.grace_seconds)
        self._threads = ThreadPoolExecutor(2 * len(ranks) + _SPARE_THREADS, thread_name_prefix="grpc-hub")
        self._server = grpc.server(
            self._threads,
            options=channel_options(room.grace_seconds),
            maximum_concurrent_rpcs=4 * len(ranks) + 4 * _SPARE_THREADS,
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._calls()),))
        self.port = self._listen(address, credentials)
        self._server.start()

    def _calls(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            MEET_METHOD: grpc.unary_unary_rpc_method_handler(self._meet),
            JOIN_METHOD: grpc.unary_unary_rpc_method_handler(self._join),
            POSITION_METHOD: grpc.unary_unary_rpc_method_handler(self._where),
            SEND_METHOD: grpc.stream_unary_rpc_method_handler(self._bring),
            RECEIVE_METHOD: grpc.unary_stream_rpc_method_handler(self._fetch),
            LEAVE_METHOD: grpc.unary_unary_rpc_method_handler(self._leave),
        }

    def _listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        place = format_address(address, 0)
        try:
            if credentials is None:
                return int(self._server.add_insecure_port(place))
            return int(self._server.add_secure_port(place, credentials))
        except RuntimeError as error:
            raise CommunicationError(
                f"this rank cannot serve at {address}: {error}", next_step="look at the address of this node"
            ) from error

    def wait_for_all(self, deadline_seconds: float) -> None:
        """Wait until every rank has come.

        Raises:
            DeadlineError: some did not come in time; names them.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._missing(), deadline_seconds)
            missing, strangers, self._num_rejected = self._missing(), self._num_rejected, 0
        if strangers:
            self._say(f"the server has turned away {strangers} calls that are not of this job")
        if missing:
            wrong = "".join(f"; rank {rank} has another token" for rank in sorted(self._rejected_ranks))
            raise DeadlineError(
                f"ranks {missing} did not connect within {deadline_seconds:g} s{wrong}",
                next_step="look at what these ranks printed",
            )

    def _missing(self) -> list[int]:
        return sorted(self._ranks - self._nonces.keys())

    def close(self) -> None:
        """Tell all who are there that this rank leaves, and end."""
        there = self._ranks & {*self._room.ranks}
        for rank in there:
            self._room.forget(rank)
        with self._changed:
            self._changed.wait_for(lambda: there <= self._told, _LAST_WORD_SECONDS)
        self._server.stop(_LAST_WORD_SECONDS).wait()
        self._threads.shutdown(wait=True)

    # The calls. gRPC runs each in a thread of the pool.

    def _meet(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Prove to a caller that this rank knows the key."""
        try:
            rank, theirs = decode_hello(request)
        except ValueError:
            self._turn_away(context, "this is no call of a job")
        ours = server_nonce(self._secret, rank, theirs)
        return ours + compute_proof(self._token, SERVER_ROLE, rank, theirs, ours)

    def _join(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """A rank comes; once."""
        claim = self._claim(JOIN_METHOD, context)
        with self._changed:
            if self._nonces.get(claim.rank) is None:
                self._nonces[claim.rank] = claim.nonce
                self._room.add(claim.rank)
                self._changed.notify_all()
        self._known(claim, context)
        return b""

    def _where(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """How much there is of what a rank brings."""
        claim = self._known(self._claim(POSITION_METHOD, context), context)
        with self._there(claim.rank, context):
            return encode_position(self._room.place(claim.rank))

    def _bring(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """A letter of a rank, from a byte on."""
        claim = self._known(self._claim(SEND_METHOD, context), context)
        with self._there(claim.rank, context):
            call = self._room.begin(claim.rank, *claim.place)
            for chunk in chunks if call else ():
                if not self._room.take(claim.rank, call, chunk, self._seconds, context.is_active):
                    break
            return encode_position(self._room.place(claim.rank))

    def _fetch(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The next letter for a rank, from where it is; nothing, if there is none for half of a call."""
        claim = self._known(self._claim(RECEIVE_METHOD, context), context)
        with self._there(claim.rank, context):
            number, start = claim.place
            self._room.has(claim.rank, claim.place)
            letter = self._room.next_message(claim.rank, self._seconds / 2, context.is_active)
            if letter is None or letter.number != number + 1:
                return
            for chunk in letter.after(start):
                yield chunk
                start += len(chunk)
                self._room.moved(claim.rank, StreamPosition(number, start))

    def _leave(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """A rank leaves, once what it has brought was taken."""
        claim = self._known(self._claim(LEAVE_METHOD, context), context)
        with self._there(claim.rank, context):
            self._room.has(claim.rank, claim.place)
            self._room.lose(peer_gone_error(claim.rank))
        self._mark_informed(claim.rank)
        return b""

    @contextmanager
    def _there(self, rank: int, context: grpc.ServicerContext) -> Iterator[None]:
        """A call of a rank that has come: it shows that the rank is there, and ends when the rank is lost."""
        context.add_callback(self._room.wake)
        try:
            self._room.met(rank)
            yield
        except PeerIsGoneError:
            self._mark_informed(rank)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, PEER_GONE)
        except ValueError as error:
            self._room.lose(bad_message_error(rank, str(error)))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, PEER_GONE)

    def _claim(self, method: str, context: grpc.ServicerContext) -> CallClaim:
        try:
            claim = CallClaim.read(context.invocation_metadata())
        except ValueError:
            self._turn_away(context, "this is no call of a job")
        if not claim.is_valid_claim(method, server_nonce(self._secret, claim.rank, claim.nonce), self._token):
            with self._changed:
                self._rejected_ranks |= {claim.rank} & self._ranks
            self._turn_away(context, "another token")
        if claim.rank not in self._ranks:
            self._turn_away(context, f"rank {claim.rank} has nothing to say here")
        return claim

    def _known(self, claim: CallClaim, context: grpc.ServicerContext) -> CallClaim:
        if self._nonces.get(claim.rank) != claim.nonce:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"rank {claim.rank} has already come")
        return claim

    def _turn_away(self, context: grpc.ServicerContext, why: str) -> None:
        with self._changed:
            self._num_rejected += 1
        context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    def _mark_informed(self, rank: int) -> None:
        with self._changed:
            self._told.add(rank)
            self._changed.notify_all()
