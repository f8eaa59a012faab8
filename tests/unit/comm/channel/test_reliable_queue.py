"""Whatever is lost, cut off or said twice, every numbered message arrives once and in order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.channel import ChannelMessage
from paceline.comm.channel.reliable_queue import (
    CHUNK_BYTES,
    MessageAssembler,
    NumberedMessage,
    StreamPosition,
    UnacknowledgedQueue,
    encode_message_chunks,
)

pytestmark = pytest.mark.capability("G12")


def unacknowledged(count: int) -> UnacknowledgedQueue:
    sent = UnacknowledgedQueue()
    for k in range(count):
        data = b"".join(
            encode_message_chunks(ChannelMessage("n", {"k": k}, [torch.full((k + 1,), float(k))]))
        )
        sent.put(tuple(data[at : at + 20] for at in range(0, len(data), 20)))
    return sent


class BrokenCalls:
    """Calls end after any chunk, answers are lost, and what an earlier call had still to say comes late."""

    def __init__(self, sent: UnacknowledgedQueue, taken: MessageAssembler, rng: random.Random) -> None:
        self.sent, self.taken, self.rng = sent, taken, rng
        self.late: list[tuple[int, list[bytes]]] = []
        self.found: list[ChannelMessage] = []

    def one_call(self) -> None:
        position = self.taken.position
        if self.rng.random() < 0.6:  # else the sender has not heard it
            self.sent.acknowledge(position.number)
        numbered = self.sent.next
        if numbered is None:
            return
        start = position.num_bytes if numbered.number == position.number + 1 else 0
        call = self.taken.begin_call(numbered.number, start)
        chunks = [*numbered.after(start)]
        broken = self.rng.randrange(len(chunks) + 1)
        for chunk in chunks[:broken]:
            self._take(call, chunk)
        self.late.append((call, chunks[broken:]))
        call, rest = self.rng.choice(self.late)
        for _ in range(min(len(rest), self.rng.randrange(4))):
            self._take(call, rest.pop(0))

    def _take(self, call: int, chunk: bytes) -> None:
        message = self.taken.add_chunk(call, chunk)
        if message is not None:
            self.found.append(message)


class Forgets(MessageAssembler):
    """A mistake: a message that comes again is taken again."""

    def begin_call(self, number: int, num_bytes: int) -> int:
        self._number = number - 1
        self._clear()
        return super().begin_call(number, 0)


def run(taken: MessageAssembler, seed: int) -> list[int]:
    calls = BrokenCalls(unacknowledged(6), taken, random.Random(seed))
    for _ in range(2_000):
        calls.one_call()
    assert all(torch.equal(m.tensors[0], torch.full_like(m.tensors[0], m.fields["k"])) for m in calls.found)
    return [message.fields["k"] for message in calls.found]


@given(seed=st.integers(0, 2**32))
def test_on_a_bad_line_every_message_is_taken_once_and_in_order(seed: int) -> None:
    assert run(MessageAssembler(1), seed) == [*range(6)]


def test_a_taker_that_forgets_what_it_has_takes_messages_twice() -> None:
    """The test above would see it."""
    calls = BrokenCalls(unacknowledged(6), Forgets(1), random.Random(0))
    with pytest.raises((AssertionError, ValueError)):
        for _ in range(200):
            calls.one_call()
        assert [message.fields["k"] for message in calls.found] == [*range(6)]


def test_a_message_goes_on_where_the_taker_is() -> None:
    sent, taken = UnacknowledgedQueue(), MessageAssembler(3)
    message = ChannelMessage("x", {}, [torch.arange(1_000_000.0)])
    sent.put(encode_message_chunks(message))
    numbered = sent.next
    assert numbered is not None and max(len(chunk) for chunk in numbered.chunks) == CHUNK_BYTES
    first, *_ = numbered.chunks
    assert taken.add_chunk(taken.begin_call(1, 0), first) is None
    assert taken.position == StreamPosition(0, len(first))
    assert not any(taken.begin_call(*at) for at in ((1, 0), (2, len(first)), (1, len(first) - 1)))
    found = _rest(taken, numbered, taken.position.num_bytes)
    assert found.sender == 3 and torch.equal(found.tensors[0], message.tensors[0])
    assert taken.position == StreamPosition(1, 0)
    sent.acknowledge(1)
    assert sent.next is None and sent.num_bytes == 0


def _rest(taken: MessageAssembler, numbered: NumberedMessage, start: int) -> ChannelMessage:
    call = taken.begin_call(numbered.number, start)
    (found,) = (m for chunk in numbered.after(start) if (m := taken.add_chunk(call, chunk)) is not None)
    return found


def test_a_message_begins_at_any_byte() -> None:
    numbered = NumberedMessage(1, (b"abc", b"de", b"f"))
    assert [b"".join(numbered.after(n)) for n in range(8)] == [b"abcdef"[n:] for n in range(8)]


def broken() -> Iterator[tuple[bytes, ...]]:
    yield (b"\xff" * 16,)
    whole = b"".join(encode_message_chunks(ChannelMessage("x", {}, [torch.ones(3)])))
    yield (whole + b"more",)
    yield (whole[:16] + b"?" * (len(whole) - 16),)


@pytest.mark.parametrize("chunks", [*broken()])
def test_what_is_no_message_is_an_error(chunks: tuple[bytes, ...]) -> None:
    taken = MessageAssembler(1)
    call = taken.begin_call(1, 0)
    with pytest.raises(ValueError, match=r"header|received more bytes|Expecting value"):
        for chunk in chunks:
            taken.add_chunk(call, chunk)


def test_what_was_never_sent_cannot_be_there() -> None:
    with pytest.raises(ValueError, match="never sent"):
        UnacknowledgedQueue().acknowledge(1)
