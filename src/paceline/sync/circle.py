"""Several servers of one job: what they say to each other, apart from what workers say.

Rank 0 decides, in one order, and tells the others; each applies the same updates to its own parts. A push
counts once all servers have it: the others tell rank 0, which hears it then. So a worker that is lost
half-way has pushed to all of them or to none.

Invariant: what a server answers is matched by its kind, one for each server and exchange. A server that is
lost ends the job, by its name; whether a worker is lost is for rank 0 to say.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.comm.channel import Channel, Message
from paceline.errors import CommunicationError, DeadlineError

_ANSWERS = {"norm", "share"}


class Circle:
    """The channel of a server, as its rule hears it; see `Channel`. Alone it changes nothing.

    Args:
        others: ranks of the other servers.
        decides: whether this is rank 0.
        deadline_seconds: of every wait for another server.
    """

    def __init__(
        self, inner: Channel, others: Sequence[int], deadline_seconds: float, *, decides: bool
    ) -> None:
        self._inner, self.others, self._decides = inner, tuple(others), decides
        self._deadline = deadline_seconds
        self._heard: deque[Message] = deque()
        self._answers: defaultdict[tuple[str, int], deque[Message]] = defaultdict(deque)
        self._errors: deque[CommunicationError] = deque()  # of workers, while servers were waited for
        self._pushes: dict[int, Message] = {}  # by number, those that not all servers have
        self._have: defaultdict[int, set[int]] = defaultdict(set)
        self._signs: dict[int, float] = {}
        self._gone: CommunicationError | None = None  # a server that has said all of a round before it left
        self.last_sign, self.close = inner.last_sign, inner.close
        self.begin()

    def begin(self) -> None:
        """A round begins: nothing is under way, and the others are alive."""
        self._pushes.clear()
        self._have.clear()
        self._signs = dict.fromkeys(self.others, time.monotonic())

    def send(self, to: int, message: Message, deadline_seconds: float) -> None:
        """See `Channel`; what is for one that is lost, and is not needed now, goes nowhere."""
        try:
            self._inner.send(to, message, deadline_seconds)
        except CommunicationError:
            if self._needs(to):
                raise

    def _needs(self, rank: int) -> bool:
        """Whether this server cannot go on without a rank of which it has heard that it is lost."""
        if rank in self.others:
            return rank in self._signs
        return self._decides and not any(error.peer == rank for error in self._errors)

    def rest(self) -> None:
        """A round ends: from now on others have something else to do than to answer."""
        self._signs = {}

    def look_after(self) -> None:
        """See that the other servers live, and let them know that this one does.

        Raises:
            CommunicationError: see `require_signs`.
        """
        self.require_signs()
        for rank in self._signs:
            self.send(rank, Message("alive"), self._deadline)

    def tell(self, kind: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """The same message to all other servers."""
        for rank in self.others:
            self.send(rank, Message(kind, fields, tensors), self._deadline)

    def receive(self, deadline_seconds: float) -> Message:
        """See `Channel`: what is no answer; on rank 0 a push only once all servers have it."""
        expires = time.monotonic() + deadline_seconds
        while not self._heard:
            if self._gone:
                raise self._gone
            if self._errors:
                raise self._errors.popleft()
            self._listen(max(0.0, expires - time.monotonic()))
        return self._heard.popleft()

    def answers(self, kind: str) -> dict[int, Message]:
        """One message of a kind from every other server, by rank.

        Raises:
            CommunicationError: a server is lost, or says nothing for the deadline; names it.
        """
        expires = time.monotonic() + self._deadline
        while missing := [rank for rank in self.others if not self._answers[kind, rank]]:
            left = expires - time.monotonic()
            if left <= 0:
                raise _silent(missing[0], self._deadline)
            try:
                self._listen(left)
            except DeadlineError as error:
                raise _silent(missing[0], self._deadline) from error
        return {rank: self._answers[kind, rank].popleft() for rank in self.others}

    def flush(self, seconds: float = math.inf) -> bool:
        """See `Channel`; that a server is lost is told by `receive`, when it is needed again."""
        try:
            return self._inner.flush(seconds)
        except CommunicationError as error:
            if error.peer not in self.others:
                raise
            self._gone = error
            return False

    def drop(self, rank: int) -> None:
        """See `Channel`."""
        self._inner.drop(rank)
        self._heard = deque(message for message in self._heard if message.sender != rank)
        self._errors = deque(error for error in self._errors if error.peer != rank)
        self._forget_pushes(rank)

    def require_signs(self) -> None:
        """See that the other servers, who answer every sign of life with one, have given one lately.

        Raises:
            CommunicationError: one has not; names it.
        """
        now = time.monotonic()
        for rank, seen in self._signs.items():
            if now - seen > 0.75 * self._deadline:
                raise _silent(rank, now - seen)

    def _listen(self, seconds: float) -> None:
        """Hear one message, or that a peer is lost."""
        try:
            self._sort(self._inner.receive(seconds))
        except CommunicationError as error:
            if error.peer is None:
                raise
            if error.peer in self.others and self._answers["share", error.peer]:
                self._gone = error
            elif error.peer in self.others:
                raise CommunicationError(
                    f"the server of rank {error.peer} is lost: {error.what}", next_step=_ADVICE
                ) from error
            elif self._decides:
                self._errors.append(error)

    def _sort(self, message: Message) -> None:
        kind, sender = message.kind, message.sender
        if sender in self._signs:
            self._signs[sender] = time.monotonic()
        if kind in _ANSWERS:
            self._answers[kind, sender].append(message)
        elif kind == "have":
            self._have[message.fields["number"]].add(sender)
            self._complete(message.fields["number"])
        elif kind == "push" and self._decides:
            self._pushes[message.fields["number"]] = message
            self._complete(message.fields["number"])
        elif kind != "alive" or not self._decides:
            if kind == "ready":  # it has lost what it was doing, and its push with that
                self._forget_pushes(sender)
            self._heard.append(message)

    def _complete(self, number: int) -> None:
        if number in self._pushes and len(self._have[number]) == len(self.others):
            del self._have[number]
            self._heard.append(self._pushes.pop(number))

    def _forget_pushes(self, rank: int) -> None:
        self._pushes = {n: message for n, message in self._pushes.items() if message.sender != rank}


_ADVICE = "its parts of the model are gone with it: resume from the newest checkpoint"


def _silent(rank: int, seconds: float) -> CommunicationError:
    return DeadlineError(
        f"the server of rank {rank} has given no sign for {seconds:g} s",
        next_step="look at what that rank does, or raise runtime.deadline_seconds",
    )


def require_same(what: str, mine: int, theirs: Mapping[int, int]) -> None:
    """See that all servers have applied the same updates.

    Raises:
        CommunicationError: one has not; names it.
    """
    for rank, number in theirs.items():
        if number != mine:
            raise CommunicationError(
                f"at {what} the server of rank {rank} has made {number} updates, and another {mine}",
                next_step="this is a mistake of the rule, not of the recipe: please report it",
            )
