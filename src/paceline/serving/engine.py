"""Text for many requests at a time, where no text depends on the others.

Requests wait in a queue until a slot is free. A step of the engine runs some chunks of prompts, each alone,
and then one token of every slot, always in the same shape. Invariant: the logits of a text are a function of
its tokens and of the engine's settings, bit by bit; of neither its slot, nor its neighbours, nor when it
arrived. The engine does not know how a model is run (`SlotForward`), and nothing of characters.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol

from paceline.errors import QueueFullError, RequestError, format_count
from paceline.serving.sampling import LogitRow, SampledToken, SamplingOptions, sample

log = logging.getLogger("paceline")

FinishReason = Literal["stop", "length", "error"]

MAX_CHUNKS_PER_STEP = 4
"""Most chunks of prompts that run between two tokens of the other texts; does not change any bit."""
MAX_CHUNKS_AT_ONCE = 4
"""Most chunks of prompts in one forward; more than one only where that does not change any bit."""


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, and how it is continued.

    Args:
        prompt: tokens, at least one.
        max_tokens: most tokens that are added; None: as many as the context has room for.
        sampling: how tokens are chosen.
        stop_tokens: a text ends with the first of these that is generated.
        sample_index: which of several texts of this prompt and seed; each has its own draws.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = 100
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop_tokens: frozenset[int] = frozenset()
    sample_index: int = 0


class TokenEvent(NamedTuple):
    """One generated token of a request.

    Args:
        request_id: of the ticket.
        token: the token; a stop token is an event, too. -1 after an error.
        finish_reason: "stop" after a stop token, "length" after the last token, "error" if the logits are not
            finite; None: the text goes on.
        logprob, top_logprobs: see `SampledToken`.
    """

    request_id: int
    token: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Ticket:
    """A submitted request and its text so far; the engine updates it in `step`.

    Args:
        request_id: unique within the engine.
        request: as submitted.
        text: the prompt's tokens and all generated ones.
        slot: that it occupies; None while it waits, and afterwards.
        num_prefilled: tokens of the prompt that are in the cache.
        finish_reason: None while it waits or runs; "cancelled" after `Engine.cancel`.
    """

    request_id: int
    request: GenerationRequest
    text: list[int]
    slot: int | None = None
    num_prefilled: int = 0
    finish_reason: FinishReason | Literal["cancelled"] | None = None

    @property
    def tokens(self) -> list[int]:
        """Generated tokens."""
        return self.text[len(self.request.prompt) :]

    @property
    def decodes(self) -> bool:
        """True while the prompt is in the cache and the last token of the text is not."""
        return self.slot is not None and self.num_prefilled == len(self.request.prompt)


class PromptChunk(NamedTuple):
    """A part of a prompt that runs in one forward.

    Args:
        slot: of the text.
        prompt: all of its tokens.
        start: of the part, which has as many tokens as a chunk if there are so many.
    """

    slot: int
    prompt: Sequence[int]
    start: int


class SlotForward(Protocol):
    """Forward of a model on the slots of an engine, on one rank or several.

    Attributes:
        num_slots: number of texts at a time.
        chunk: tokens of a prompt that run at a time.
        context: longest text, in tokens.
        vocab: number of logits.
        fingerprint: hash of the weights and of everything that the bits of logits depend on.
    """

    num_slots: int
    chunk: int
    context: int
    vocab: int
    fingerprint: str

    def clear(self, slot: int) -> None:
        """Empty a slot, so that nothing of its text can be seen by the next one."""

    def prefill(self, chunks: Sequence[PromptChunk]) -> Sequence[LogitRow | None] | None:
        """Append chunks of prompts to the texts of their slots, in order; at most `MAX_CHUNKS_AT_ONCE`.

        Returns:
            For each, the logits after the last token of the prompt, float32 [V]; None before the last chunk.
            None on ranks that do not sample.
        """

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> Sequence[LogitRow] | None:
        """Append one token each to the texts of some slots; all slots are computed.

        Returns:
            Logits of each, float32 [V]; None on ranks that do not sample.
        """

    def share(
        self, samples: Sequence[SampledToken] | None, num_samples: int, num_logprobs: int
    ) -> Callable[[], Sequence[SampledToken]]:
        """Begin to send the samples of the rank that has some to all ranks.

        Args:
            num_samples, num_logprobs: of all samples, and the most `top_logprobs` of one.
        Returns:
            A function that waits for them and returns them.
        """


class Engine:
    """Generation of text for many requests at a time; not thread-safe.

    Args:
        forward: the model on its slots; `build_engine` makes one for a model in this process.
        max_queued: most requests that wait for a slot.

    Attributes:
        heartbeat_seconds: how often an idle engine has to step, so that other ranks do not wait too long;
            None: never.
    """

    heartbeat_seconds: ClassVar[float | None] = None

    def __init__(self, forward: SlotForward, *, max_queued: int = 1024) -> None:
        self.forward, self._max_queued = forward, max_queued
        self._queue: deque[Ticket] = deque()
        self._slots: list[Ticket | None] = [None] * forward.num_slots
        self._num_submitted = 0
        self._prefilled: list[TokenEvent] = []
        self._receive: Callable[[], list[TokenEvent]] = list

    @property
    def num_slots(self) -> int:
        """Number of texts at a time."""
        return self.forward.num_slots

    @property
    def fingerprint(self) -> str:
        """Hash of the weights, the settings and the machine's arithmetic: equal ones give equal bits."""
        return self.forward.fingerprint

    @property
    def context(self) -> int:
        """Longest text, prompt included, in tokens."""
        return self.forward.context

    @property
    def num_queued(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Number of slots with a text."""
        return sum(ticket is not None for ticket in self._slots)

    @property
    def is_idle(self) -> bool:
        """True if a step has nothing to do."""
        return not self._queue and not self.num_running

    def check(self, request: GenerationRequest) -> None:
        """Check a request against the model.

        Raises:
            RequestError: the prompt is empty, too long or has unknown tokens, or `max_tokens` does not fit.
        """
        num_prompt, context = len(request.prompt), self.context
        if not num_prompt:
            raise RequestError("the prompt is empty", parameter="prompt", next_step="give at least one token")
        if num_prompt >= context:
            raise RequestError(
                f"the prompt has {format_count(num_prompt, 'token')}, and the model's context is {context}",
                parameter="prompt",
                next_step=f"shorten it to {context - 1} tokens or less",
            )
        unknown = next((t for t in request.prompt if not 0 <= t < self.forward.vocab), None)
        if unknown is not None:
            raise RequestError(
                f"the prompt has token {unknown}, and the model's vocabulary has {self.forward.vocab}",
                parameter="prompt",
                next_step="encode the prompt with the tokenizer of this model",
            )
        most = context - num_prompt
        if request.max_tokens is not None and not 1 <= request.max_tokens <= most:
            raise RequestError(
                f"max_tokens is {request.max_tokens}; the prompt has {format_count(num_prompt, 'token')} of a"
                f" context of {context}",
                parameter="max_tokens",
                next_step=f"give a number from 1 to {most}, or shorten the prompt",
            )

    def submit(self, request: GenerationRequest) -> Ticket:
        """Queue a request.

        Raises:
            RequestError: see `check`.
            QueueFullError: as many requests wait as may.
        """
        self.check(request)
        if len(self._queue) >= self._max_queued:
            raise QueueFullError(
                f"{format_count(len(self._queue), 'request')} wait for a slot",
                next_step="send the request again later",
            )
        ticket = Ticket(self._num_submitted, request, list(request.prompt))
        self._num_submitted += 1
        self._queue.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request; its slot is free for the next step. Does nothing if it has ended."""
        if ticket.finish_reason is None:
            ticket.finish_reason = "cancelled"
            if ticket.slot is None:
                self._queue.remove(ticket)
            else:
                self._release(ticket)

    def step(self) -> list[TokenEvent]:
        """Run some chunks of prompts and one token of every text.

        Returns:
            Tokens in the order in which they were sampled; a text whose prompt ends here may get two.
        """
        self.begin_step()
        return self.end_step()

    def begin_step(self) -> None:
        """Run the forwards of a step; ranks that do not sample return before its tokens are known."""
        self._assign_slots()
        self._prefilled, self._receive = self._prefill(), self._decode()

    def end_step(self) -> list[TokenEvent]:
        """Wait for the tokens of the step that has begun, and return them as `step` does; empty without one.

        No request may be cancelled between the two halves of a step.
        """
        events = [*self._prefilled, *self._receive()]
        self._prefilled, self._receive = [], list
        return events

    def close(self) -> None:
        """End the ranks that follow this engine, of which there are none here."""

    def run(self) -> None:
        """Step until all submitted requests have ended."""
        while not self.is_idle:
            self.step()

    def _assign_slots(self) -> None:
        for slot, occupant in enumerate(self._slots):
            if occupant is None and self._queue:
                ticket = self._queue.popleft()
                ticket.slot, self._slots[slot] = slot, ticket

    def _prefill(self) -> list[TokenEvent]:
        """Run chunks of prompts in the order of submission; all of them if no text would wait for it."""
        waiting = [ticket for ticket in self._slots if ticket is not None and not ticket.decodes]
        waiting.sort(key=lambda ticket: ticket.request_id)
        pieces = [
            (ticket, PromptChunk(ticket.slot, ticket.request.prompt, start))
            for ticket in waiting
            if ticket.slot is not None
            for start in range(ticket.num_prefilled, len(ticket.request.prompt), self.forward.chunk)
        ]
        if len(waiting) < self.num_running:
            pieces = pieces[:MAX_CHUNKS_PER_STEP]
        events: list[TokenEvent] = []
        for first in range(0, len(pieces), MAX_CHUNKS_AT_ONCE):
            batch = pieces[first : first + MAX_CHUNKS_AT_ONCE]
            rows = self.forward.prefill([chunk for _, chunk in batch])
            for ticket, chunk in batch:
                ticket.num_prefilled = min(chunk.start + self.forward.chunk, len(chunk.prompt))
            # The last chunk of a prompt ends it; its other chunks are before it in the same batch or earlier.
            ended = {ticket.request_id: i for i, (ticket, _) in enumerate(batch) if ticket.decodes}
            if ended:
                tickets = [batch[i][0] for i in ended.values()]
                found = (
                    None if rows is None else [row for i in ended.values() if (row := rows[i]) is not None]
                )
                events += self._sample(tickets, found)()
        return events

    def _decode(self) -> Callable[[], list[TokenEvent]]:
        running = [ticket for ticket in self._slots if ticket is not None and ticket.decodes]
        if not running:
            return list
        slots = [ticket.slot for ticket in running if ticket.slot is not None]
        return self._sample(running, self.forward.decode(slots, [ticket.text[-1] for ticket in running]))

    def _sample(
        self, tickets: Sequence[Ticket], rows: Sequence[LogitRow] | None
    ) -> Callable[[], list[TokenEvent]]:
        """Choose the next token of some texts, or receive it on ranks without logits; the function that is
        returned waits for them.
        """
        samples = None
        if rows is not None:
            samples = [_sample_or_fail(ticket, row) for ticket, row in zip(tickets, rows, strict=True)]
        num_logprobs = max(ticket.request.sampling.logprobs or 0 for ticket in tickets)
        receive = self.forward.share(samples, len(tickets), num_logprobs)

        def append() -> list[TokenEvent]:
            return [self._append(ticket, sampled) for ticket, sampled in zip(tickets, receive(), strict=True)]

        return append

    def _append(self, ticket: Ticket, sampled: SampledToken) -> TokenEvent:
        request = ticket.request
        if sampled.token < 0:
            ticket.finish_reason = "error"
        else:
            ticket.text.append(sampled.token)
        num_prompt, limit = len(request.prompt), request.max_tokens
        most = self.context if limit is None else num_prompt + limit
        if ticket.finish_reason is None and sampled.token in request.stop_tokens:
            ticket.finish_reason = "stop"
        elif ticket.finish_reason is None and len(ticket.text) >= most:
            ticket.finish_reason = "length"
        reason = ticket.finish_reason
        if reason is not None:
            self._release(ticket)
        return TokenEvent(
            ticket.request_id,
            sampled.token,
            None if reason == "cancelled" else reason,
            sampled.logprob,
            sampled.top_logprobs,
        )

    def _release(self, ticket: Ticket) -> None:
        if ticket.slot is not None:
            self.forward.clear(ticket.slot)
            self._slots[ticket.slot] = None
            ticket.slot = None


def _sample_or_fail(ticket: Ticket, row: LogitRow) -> SampledToken:
    """Choose the next token of a text; -1 if its logits are not finite, so that only this text ends."""
    try:
        return sample(row, ticket.text, ticket.request.sampling, ticket.request.sample_index)
    except RequestError as error:
        log.warning("request %d ends: %s", ticket.request_id, error.what)
        return SampledToken(-1)
