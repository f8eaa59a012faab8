"""Links between ranks of one host: signals and open files, over sockets that have no name on any disk.

The kernel carries every signal, so it also orders memory: what a rank wrote before it told is there for
who has heard it, on every processor. A wait sleeps, has a deadline, and ends at once if a peer is killed.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from paceline.comm.net import Net
from paceline.comm.routes.host_peer import Peer, Signal
from paceline.errors import CommunicationError, DeadlineError
from paceline.mesh import Group

_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_IN_A_SUM, _FULL = "did not join in a sum", "did not listen"
_NEXT_STEP = "look at the first rank that ended: it is the cause"


class HostLinks:
    """Connections of one rank with all others of its group, on one host.

    Threads may wait side by side: one of them reads what comes for all, and wakes the others.

    Args:
        peers: connected sockets of type SEQPACKET, by global rank.
        group, net: for what errors say, and for the deadline.
    Attributes:
        ranks: those at the other ends.
    """

    def __init__(self, peers: Mapping[int, socket.socket], group: Group, net: Net) -> None:
        self._by_rank = {rank: Peer(rank, s) for rank, s in sorted(peers.items())}
        self._peers, self.ranks = [*self._by_rank.values()], frozenset(peers)
        self._group, self._net = group, net
        self._turn, self._is_reading = threading.Condition(), False

    def tell(self, signal: Signal) -> None:
        """Say something to all.

        Raises:
            CommunicationError: a rank is gone; DeadlineError: it does not listen.
        """
        self._send(signal.encode(), [], self._peers, _IN_A_SUM)

    def hear(self, signal: Signal) -> None:
        """Wait until every other rank has said the same.

        Raises:
            CommunicationError: a rank is gone, or is out of step; DeadlineError: it says nothing.
        """
        key = (signal.phase, signal.number)
        self._listen(lambda peer: key in peer.said, self._peers, _IN_A_SUM)
        for peer in self._peers:
            if (label := peer.said.pop(key)) != signal.label:
                raise self._error(
                    f"rank {peer.rank} sums {label}, this rank {signal.label}",
                    "every rank must sum the same buffers in the same order",
                )

    def share(self, file: int) -> dict[int, int]:
        """Give an open file to every other rank, and get theirs, by rank; the caller closes them."""
        self._send(b"file", [file], self._peers, _IN_A_SUM)
        self._listen(lambda peer: bool(peer.files), self._peers, _IN_A_SUM)
        return {peer.rank: peer.files.pop(0) for peer in self._peers}

    # -- with one of them -----------------------------------------------------------------------------------

    def tell_one(self, rank: int, signals: Sequence[Signal], file: int | None = None) -> None:
        """Say some things to one rank at once, and give it an open file before; the caller closes that.

        Raises:
            CommunicationError: it is gone; DeadlineError: it does not listen.
        """
        to = [self._by_rank[rank]]
        if file is not None:
            self._send(b"file", [file], to, _FULL)
        self._send(b"\n".join([signal.encode() for signal in signals]), [], to, _FULL)

    def hear_one(self, rank: int, phase: int, number: int, what: str) -> str:
        """Wait until one rank has said something; its label.

        Args:
            what: it failed to do, if it is late.
        Raises:
            CommunicationError: it is gone; DeadlineError: it says nothing.
        """
        peer, key = self._by_rank[rank], (phase, number)
        self._listen(lambda peer: key in peer.said, [peer], what)
        return peer.said.pop(key)

    def heard(self, rank: int, phase: int, number: int) -> str | None:
        """As `hear_one`, of what has come by now; None: it has not."""
        said, key = self._by_rank[rank].said, (phase, number)
        if key not in said:
            with self._turn:
                while key not in said and self._read_now([self._by_rank[rank]]):
                    pass
        return said.pop(key, None)

    def has_said(self, rank: int, phase: int, number: int) -> bool:
        """Whether one rank has said so by now; once."""
        return self._by_rank[rank].said.pop((phase, number), None) is not None

    def take_file(self, rank: int) -> int:
        """The oldest file that one rank has given; the caller closes it."""
        return self._by_rank[rank].files.pop(0)

    def catch_up(self) -> None:
        """Read all that has come, without a wait."""
        with self._turn:
            while self._read_now(self._peers):
                pass

    def close(self) -> None:
        """Leave."""
        for peer in self._peers:
            peer.socket.close()
            while peer.files:
                os.close(peer.files.pop())

    def _send(self, data: bytes, files: Sequence[int], to: Sequence[Peer], what: str) -> None:
        expires = time.monotonic() + self._net.deadline_seconds
        for peer in to:
            while not self._sent(peer, data, files):
                with self._turn:
                    self._await([peer], peer, expires, what)

    def _sent(self, peer: Peer, data: bytes, files: Sequence[int]) -> bool:
        try:
            if files:
                socket.send_fds(peer.socket, [data], files, _AT_ONCE)
            else:
                peer.socket.send(data, _AT_ONCE)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._error(f"rank {peer.rank} is gone: {error}", _NEXT_STEP) from error
        return True

    def _read_now(self, peers: Sequence[Peer]) -> bool:
        """Read what has come of some, one message or more, unless another thread reads; the turn is held."""
        if self._is_reading or not any(peer.read() for peer in peers if not peer.gone):
            return False
        self._turn.notify_all()
        return True

    def _listen(self, has_said: Callable[[Peer], bool], to: Sequence[Peer], what: str) -> None:
        expires = time.monotonic() + self._net.deadline_seconds
        with self._turn:
            while silent := [peer for peer in to if not has_said(peer)]:
                if lost := [peer.rank for peer in silent if peer.gone]:
                    raise self._error(f"rank {lost[0]} is gone", _NEXT_STEP)
                self._await(silent, None, expires, what)

    def _await(self, silent: Sequence[Peer], full: Peer | None, expires: float, what: str) -> None:
        """Sleep until a peer says something, or `full` takes more; read what was said. The turn is held."""
        left = max(0.0, expires - time.monotonic())
        if self._is_reading and full is None:
            has_come = self._turn.wait(left)
        else:
            has_come = self._read(full, left)
        if not has_come:
            raise self._late([peer.rank for peer in silent], what)

    def _read(self, full: Peer | None, seconds: float) -> bool:
        """Wait without the turn; read for all threads, unless one does so. Whether there was anything."""
        reads = not self._is_reading
        self._is_reading = True
        self._turn.release()
        try:
            poll = select.poll()
            by_file = {peer.socket.fileno(): peer for peer in self._peers if not peer.gone}
            for file, peer in by_file.items():
                wanted = (select.POLLIN if reads else 0) | (select.POLLOUT if peer is full else 0)
                if wanted:
                    poll.register(file, wanted)
            ready = poll.poll(seconds * 1e3)
            for file, _ in ready if reads else ():
                by_file[file].read()
        finally:
            self._turn.acquire()
            if reads:
                self._is_reading = False
                self._turn.notify_all()
        return bool(ready)

    def _error(self, what: str, next_step: str) -> CommunicationError:
        return CommunicationError(what, where=self._where(), next_step=next_step)

    def _late(self, ranks: Sequence[int], what: str) -> DeadlineError:
        return DeadlineError(
            f"ranks {list(ranks)} {what} within {self._net.deadline_seconds:g} s",
            where=self._where(),
            next_step="look for the rank that is stuck, or raise runtime.deadline_seconds",
        )

    def _where(self) -> str:
        group = self._group
        return (
            f"rank {group.ranks[group.rank]}, shared memory of group '{group.name}' {group.ranks}, "
            f"step {self._net.step}"
        )
