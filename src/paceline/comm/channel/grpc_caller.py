"""The end of a gRPC channel that calls: one thread brings its letters, another fetches those for it.

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

from paceline.addresses import spell
from paceline.comm.channel.grpc_calls import (
    BRING,
    CALLED,
    FETCH,
    JOIN,
    LEAVE,
    MEET,
    WHERE,
    Claim,
    call_seconds,
    decode_place,
    options,
    path_of,
    pause_seconds,
)
from paceline.comm.channel.grpc_refusals import another_token, is_of_certificates, out_of_reach, refused
from paceline.comm.channel.letters import Letter, Place
from paceline.comm.channel.lost import no_message
from paceline.comm.channel.mailroom import Mailroom, PeerIsGoneError
from paceline.handshake import CHALLENGE_BYTES, NONCE_BYTES, encode_hello, is_proof, nonce

_LAST_WORD_SECONDS = 1.0
_SHORT_SECONDS = 5.0
_MOST_CERTIFICATES = 5  # times that they do not fit, before it is no accident
_NOWHERE = Place(0, 0)


class Caller:
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
        room: Mailroom,
        address: str,
        port: int,
        rank: int,
        token: str,
        *,
        hub_rank: int = 0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._room, self._rank, self._token, self._hub = room, rank, token, hub_rank
        self._whom = f"the server at {spell(address, port)}"
        self._who = rank, hub_rank, self._whom
        self._seconds = call_seconds(room.grace_seconds)
        self._nonces, self._random = (nonce(), b""), random.Random()
        self._closing, self._is_in_doubt = threading.Event(), False
        self._line = _line(spell(address, port), credentials, options(room.grace_seconds))
        self._threads = [
            threading.Thread(target=work, name=f"grpc-{work.__name__}", daemon=True)
            for work in (self._bring_all, self._fetch_all)
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
                self._greet(min(left, _SHORT_SECONDS))
                break
            except grpc.RpcError as error:
                said_no, pause = refused(error, *self._who), pause_seconds(failures, self._random)
                failures, certificates = failures + 1, certificates + is_of_certificates(error)
                late = time.monotonic() + pause >= expires or certificates == _MOST_CERTIFICATES
                if said_no or late:
                    self._line.close()
                    raise said_no or out_of_reach(error, self._rank, self._whom) from error
                self._closing.wait(pause)
        self._room.add(self._hub)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Say that this rank leaves, and end."""
        if self._hub in self._room.ranks:
            with suppress(grpc.RpcError, PeerIsGoneError):
                self._call(LEAVE, self._room.place(self._hub), _LAST_WORD_SECONDS)
        self._closing.set()
        self._room.forget(self._hub)
        self._line.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _greet(self, seconds: float) -> None:
        ours = self._nonces[0]
        said = self._line.unary_unary(path_of(MEET))(encode_hello(self._rank, ours), timeout=seconds)
        answer, proof = said[:NONCE_BYTES], said[NONCE_BYTES:]
        self._nonces = ours, answer
        known = len(said) == CHALLENGE_BYTES and is_proof(
            proof, self._token, CALLED, self._rank, ours, answer
        )
        self._call(JOIN, _NOWHERE, seconds)  # a proof under another key lets the other side know, too
        if not known:
            raise another_token(self._rank, self._whom)

    def _claimed(self, method: str, place: Place) -> tuple[tuple[str, bytes]]:
        return Claim.make(method, self._rank, place, self._nonces, self._token).metadata()

    def _call(self, method: str, place: Place, seconds: float) -> bytes:
        """A short call."""
        call = self._line.unary_unary(path_of(method))
        found: bytes = call(b"", timeout=seconds, metadata=self._claimed(method, place))
        self._met()
        return found

    def _met(self) -> None:
        with suppress(PeerIsGoneError):
            self._room.met(self._hub)

    # What the threads do.

    def _bring_all(self) -> None:
        """Bring one letter after another, until this end closes or the other is lost."""

        def one() -> None:
            letter = self._room.next_letter(self._hub, self._seconds, self._wanted)
            if letter is not None:
                self._bring(letter)

        self._again_and_again(one)

    def _fetch_all(self) -> None:
        """Fetch one letter after another."""
        self._again_and_again(self._fetch)

    def _again_and_again(self, once: Callable[[], None]) -> None:
        failures = 0
        while self._wanted():
            try:
                once()
                failures = 0
            except PeerIsGoneError:
                return
            except ValueError as error:
                self._room.lose(no_message(self._hub, str(error)))
            except grpc.RpcError as error:
                said_no = refused(error, *self._who)
                if said_no:
                    self._room.lose(said_no)
                failures += 1
                self._closing.wait(pause_seconds(failures, self._random))

    def _wanted(self) -> bool:
        return not self._closing.is_set()

    def _bring(self, letter: Letter) -> None:
        """Bring a letter from where the other side is; it says how far it has come."""
        there = decode_place(self._call(WHERE, _NOWHERE, self._seconds)) if self._is_in_doubt else None
        start = there.num_bytes if there and there.number + 1 == letter.number else 0
        self._is_in_doubt = True
        place, (first, *more) = Place(letter.number, start), [*letter.after(start)] or [b""]
        said = {"timeout": self._seconds, "metadata": self._claimed(BRING, place)}
        if more:
            answer = self._line.stream_unary(path_of(BRING))(self._moving(letter, start), **said)
        else:
            answer = self._line.unary_unary(path_of(BRING))(first, **said)
        self._met()
        self._room.has(self._hub, decode_place(answer))
        self._is_in_doubt = decode_place(answer) != Place(letter.number, 0)

    def _moving(self, letter: Letter, start: int) -> Iterator[bytes]:
        for chunk in letter.after(start):
            yield chunk
            start += len(chunk)
            with suppress(PeerIsGoneError):
                self._room.moved(self._hub, Place(letter.number - 1, start))

    def _fetch(self) -> None:
        """Fetch the next letter, or what is left of it."""
        place = self._room.place(self._hub)
        mine = self._room.begin(self._hub, place.number + 1, place.num_bytes)
        until = time.monotonic() + self._seconds
        fetch = self._line.unary_stream(path_of(FETCH))
        call = fetch(b"", timeout=self._seconds, metadata=self._claimed(FETCH, place))
        for chunk in call:
            self._met()
            left = max(0.0, until - time.monotonic())
            goes_on = self._room.take(self._hub, mine, chunk, left, call.is_active)
            if not goes_on and self._room.place(self._hub).number == place.number:
                call.cancel()  # there is no room: what has not come is fetched by another call
                return
        self._met()


def _line(place: str, credentials: grpc.ChannelCredentials | None, chosen: list) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(place, chosen)
    return grpc.secure_channel(place, credentials, chosen)
