"""The channel over sockets: one loop reads and writes whatever is ready, so no peer holds up another."""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from paceline.comm.channel.channel import Message, Peer
from paceline.comm.channel.lost import LOOK_ELSEWHERE, gone, late
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError, DeadlineError


class SocketChannel:
    """A channel over connected TCP sockets, one for each peer.

    Args:
        peers: connected sockets by rank.
        ledger: counts what is sent, as `send` over group `channel`.
    Wire: 16 bytes, the header and the tensors, in one direction.
    """

    def __init__(self, peers: Mapping[int, socket.socket], ledger: ByteLedger) -> None:
        self._peers = {rank: Peer(rank, s) for rank, s in peers.items()}
        self._ledger = ledger
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.socket.setblocking(False)
            peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self._arrived: deque[Message] = deque()
        self._lost: deque[CommunicationError] = deque()  # not told yet

    def send(self, to: int, message: Message, deadline_seconds: float) -> None:
        """See `Channel`."""
        peer = self._peers.get(to)
        if peer is None:
            if any(error.peer == to for error in self._lost):
                return  # `receive` or `flush` will tell
            raise gone(to)
        head, bodies = message.encode()
        with self._losing(peer):
            peer.outbox.put((memoryview(head), *bodies), deadline_seconds, lasts=message.lasts)
            self._watch(peer)
        self._ledger.launched("send", "channel", len(head) + sum(len(b) for b in bodies), 2)

    def receive(self, deadline_seconds: float) -> Message:
        """See `Channel`.

        Raises:
            CommunicationError: a peer is lost.
            DeadlineError: nobody said anything in time.
        """
        expires = time.monotonic() + deadline_seconds
        while not self._arrived:
            if self._lost:
                raise self._lost.popleft()
            if not self._peers:
                raise CommunicationError("all ranks of this channel are gone", next_step=LOOK_ELSEWHERE)
            left = expires - time.monotonic()
            if not self._turn(max(0.0, left)) and left <= 0:
                raise DeadlineError(
                    f"no message arrived within {deadline_seconds:g} s from ranks {sorted(self._peers)}",
                    next_step="look for the rank that is stuck, or raise runtime.deadline_seconds",
                )
        return self._arrived.popleft()

    def flush(self, seconds: float = math.inf) -> bool:
        """See `Channel`. What arrives meanwhile is kept.

        Raises:
            CommunicationError: a peer is lost; the others have had their time.
        """
        expires = time.monotonic() + seconds
        while (waits := self._num_waiting() > 0) and expires > time.monotonic():
            self._turn(expires - time.monotonic())
        if self._lost:
            raise self._lost.popleft()
        return not waits

    def last_sign(self, rank: int) -> float:
        """See `Channel`."""
        peer = self._peers.get(rank)
        return -math.inf if peer is None else max(peer.heard_at, peer.outbox.moved_at)

    def num_waiting_bytes(self, rank: int) -> int:
        """How much a peer has not taken yet."""
        return self._peers[rank].outbox.num_bytes if rank in self._peers else 0

    def _num_waiting(self) -> int:
        return sum(peer.outbox.num_bytes for peer in self._peers.values())

    def drop(self, rank: int) -> None:
        """See `Channel`."""
        peer = self._peers.pop(rank, None)
        if peer is not None:
            self._selector.unregister(peer.socket)
            peer.socket.close()
        self._arrived = deque(message for message in self._arrived if message.sender != rank)
        self._lost = deque(error for error in self._lost if error.peer != rank)

    def close(self) -> None:
        """See `Channel`."""
        self._selector.close()
        for peer in self._peers.values():
            peer.socket.close()

    def _turn(self, seconds: float) -> bool:
        """Wait until a socket is ready, at most so long; read and write what can be. Whether any was."""
        patience = min(peer.outbox.expires_at for peer in self._peers.values()) - time.monotonic()
        ready = self._selector.select(max(0.0, min(seconds, patience)))
        for key, events in ready:
            peer: Peer = key.data
            with self._losing(peer):
                if events & selectors.EVENT_READ:
                    peer.heard_at = time.monotonic()
                    self._arrived += peer.read()
                if events & selectors.EVENT_WRITE:
                    peer.outbox.write()
                    self._watch(peer)
        for peer in list(self._peers.values()):
            if peer.outbox.expires_at <= time.monotonic():
                self._lose(peer, late(peer.rank))
        return bool(ready)

    def _watch(self, peer: Peer) -> None:
        """Hear of it when a socket can take what waits for it."""
        writes = selectors.EVENT_WRITE if peer.outbox.num_bytes else 0
        self._selector.modify(peer.socket, selectors.EVENT_READ | writes, peer)

    @contextmanager
    def _losing(self, peer: Peer) -> Iterator[None]:
        """What breaks in here loses this peer, and no other."""
        try:
            yield
        except OSError as error:
            self._lose(peer, gone(peer.rank, str(error)))
        except CommunicationError as error:
            self._lose(peer, error)

    def _lose(self, peer: Peer, error: CommunicationError) -> None:
        error.peer = peer.rank
        self._lost.append(error)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        del self._peers[peer.rank]
