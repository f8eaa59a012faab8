"""The thread that runs an engine for a server, and the queues between it and the event loop.

Invariant: only this thread calls the engine, so HTTP never makes a step wait; what is cancelled in the event
loop is cancelled in the engine before its next step. If the engine fails, all texts get the error at once.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.errors import PacelineError, QueueFullError, RequestError, format_count
from paceline.parallel.forward_errors import FORWARD_ERRORS
from paceline.serving.engine import Engine, GenerationRequest, Ticket, TokenEvent
from paceline.watch import metric_catalog as catalog
from paceline.watch.metric_values import MetricSample

_KEPT_TIMES = 1000
_QUANTILES = (0.5, 0.9, 0.99)
_JOIN_SECONDS = 30.0


class UnavailableError(RequestError):
    """The server cannot answer now: it stops, or its engine has failed."""


class LateAnswerError(RequestError):
    """An answer that takes longer than the server allows."""


class StreamEvent(NamedTuple):
    """A token of one text of a stream, by its place; `error` instead if the text cannot go on."""

    place: int
    event: TokenEvent | None
    error: PacelineError | None = None


@dataclass(eq=False)
class _Text:
    """A text that the engine generates for a stream."""

    stream: GenerationStream
    index: int
    request: GenerationRequest
    ticket: Ticket | None = None
    is_open: bool = True
    submitted: float = field(default_factory=time.monotonic)
    last_token: float = 0.0


class GenerationStream:
    """The tokens of some texts that belong together, in the event loop of the server."""

    def __init__(self, thread: EngineThread, requests: Sequence[GenerationRequest], seconds: float) -> None:
        self._thread, self._seconds = thread, seconds
        # One timer for all tokens: a timeout around each wait would cost more than the token's JSON.
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)
        # Not an asyncio.Queue, which takes twice as long for a token.
        self._events: deque[StreamEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.texts = [_Text(self, index, request) for index, request in enumerate(requests)]

    def put(self, event: StreamEvent) -> None:
        """Receive an event of the engine."""
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def has_event(self) -> bool:
        """True if `next` returns at once."""
        return bool(self._events)

    async def next(self) -> tuple[int, TokenEvent]:
        """Wait for the next token of any text; for one task at a time.

        Raises:
            LateAnswerError: the answer takes longer than it may.
            PacelineError: the engine cannot go on with a text.
        """
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        index, event, error = self._events.popleft()
        if event is None:
            assert error is not None
            raise error
        return index, event

    def _expire(self) -> None:
        what = f"the answer took longer than {self._seconds:g} seconds"
        self.put(StreamEvent(0, None, LateAnswerError(what, next_step="ask for fewer tokens")))

    def end(self, index: int) -> None:
        """End one text, whose slot is then free."""
        self._thread.cancel([self.texts[index]])

    def close(self) -> None:
        """End all texts that have not ended, because nobody waits for them."""
        self._timer.cancel()
        self._thread.statistics.num_cancelled += sum(text.is_open for text in self.texts)
        self._thread.cancel(self.texts)


class EngineThread:
    """The thread that runs an engine, and the only one that calls it.

    Args:
        engine: the engine.
        max_queued: texts that wait for a slot.
        request_seconds: for the texts of a request, the time in the queue included.

    Attributes:
        failure: why the engine cannot go on, as requests are answered; None while it can.
        error: the error of the engine.
        is_stopping: whether new texts are refused.
    """

    def __init__(self, engine: Engine, *, max_queued: int, request_seconds: float) -> None:
        self.engine, self._max_queued, self._request_seconds = engine, max_queued, request_seconds
        self.statistics = ServerStatistics()
        self.failure: PacelineError | None = None
        self.error: PacelineError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.is_stopping = False
        self.num_open = 0  # texts that have not ended; changed in the event loop only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._condition = threading.Condition()
        self._submitted: list[_Text] = []
        self._cancelled: list[_Text] = []
        self._closed = self._refuse_waiting = False
        self._running: dict[int, _Text] = {}
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; tokens arrive in this loop."""
        self._loop = loop
        self._thread.start()

    def close(self) -> None:
        """End the thread after its present step."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(_JOIN_SECONDS)

    def submit(self, requests: Sequence[GenerationRequest]) -> GenerationStream:
        """Hand texts over to the engine, which has checked them (`Engine.check`).

        Raises:
            QueueFullError: as many texts wait as may.
            UnavailableError: the server stops, or the engine has failed.
        """
        if self.failure is not None:
            raise UnavailableError(
                f"the engine has failed: {self.failure.what}", next_step="restart the server"
            )
        if self.is_stopping:
            raise UnavailableError("the server is stopping", next_step="send the request to another one")
        num_waiting = self.num_open - self.engine.num_slots
        if num_waiting + len(requests) > self._max_queued:
            raise QueueFullError(
                f"{format_count(max(num_waiting, 0), 'text')} wait for a slot, of {self._max_queued} that"
                f" may; this request has {len(requests)}",
                next_step="send the request again later",
            )
        stream = GenerationStream(self, requests, self._request_seconds)
        self.num_open += len(requests)
        with self._condition:
            self._submitted += stream.texts
            self._condition.notify()
        return stream

    def cancel(self, texts: Iterable[_Text]) -> None:
        """End those of some texts that have not ended; the engine learns of it before its next step."""
        ended = [text for text in texts if text.is_open]
        for text in ended:
            self._count_ended(text)
        with self._condition:
            self._cancelled += ended
            self._condition.notify()

    def estimate_wait(self) -> int:
        """Return in how many seconds a slot becomes free, from the mean time of a step: 1 to 60."""
        seconds = self.statistics.step_seconds / max(1, self.statistics.num_steps)
        lengths = [text.request.max_tokens or self.engine.context for text in [*self._running.values()]]
        mean = sum(lengths) / max(1, len(lengths))
        return max(1, min(60, math.ceil(seconds * mean / self.engine.num_slots)))

    def refuse_waiting(self) -> None:
        """Accept no more texts, and end those that have no slot yet."""
        self.is_stopping = True
        with self._condition:
            self._refuse_waiting = True
            self._condition.notify()

    def fail(self, error: PacelineError) -> None:
        """End all texts with an error; called in the event loop."""
        with self._condition:
            open_texts = [text for text in [*self._submitted, *self._running.values()] if text.is_open]
        for text in open_texts:
            text.stream.put(StreamEvent(text.index, None, error))
        self.cancel(open_texts)

    def _count_ended(self, text: _Text) -> None:
        text.is_open = False
        self.num_open -= 1

    def _run(self) -> None:
        try:
            while self._take_over():
                is_idle, started = self.engine.is_idle, time.monotonic()
                if not is_idle or self.engine.heartbeat_seconds is not None:
                    events = self.engine.step()
                    if not is_idle:
                        self._deliver(events, time.monotonic() - started)
        except (PacelineError, *FORWARD_ERRORS) as error:
            failure = (
                error if isinstance(error, PacelineError) else PacelineError(f"a forward failed: {error}")
            )
            self._call_in_loop(self._set_failure, failure)

    def _take_over(self) -> bool:
        """Wait for something to do, and pass new and ended texts to the engine; return False at the end."""
        with self._condition:
            while not (self._submitted or self._cancelled or self._closed or self._refuse_waiting):
                if not self.engine.is_idle:
                    return True
                beat = self.engine.heartbeat_seconds
                if not self._condition.wait(beat or 1.0) and beat is not None:
                    return True
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
            refuse, self._refuse_waiting = self._refuse_waiting, False
            for text in submitted:
                text.ticket = self.engine.submit(text.request)
                self._running[text.ticket.request_id] = text
            for text in cancelled:
                self._end(text)
            refused = [
                text for text in self._running.values() if refuse and text.ticket and text.ticket.slot is None
            ]
            for text in refused:
                self._end(text)
        if refused:
            self._call_in_loop(self._refuse, refused)
        return not self._closed

    def _end(self, text: _Text) -> None:
        if text.ticket is not None:
            self.engine.cancel(text.ticket)
            self._running.pop(text.ticket.request_id, None)

    def _deliver(self, events: Sequence[TokenEvent], seconds: float) -> None:
        now, batch = time.monotonic(), []
        for event in events:
            text = self._running.get(event.request_id)
            if text is not None:
                self.statistics.add_token(text, now)
                batch.append((text, event))
                if event.finish_reason is not None:
                    del self._running[event.request_id]
        self.statistics.num_steps += 1
        self.statistics.step_seconds += seconds
        if batch:
            self._call_in_loop(self._hand_over, batch)

    def _call_in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                self._loop.call_soon_threadsafe(function, *arguments)

    def _hand_over(self, batch: Sequence[tuple[_Text, TokenEvent]]) -> None:
        for text, event in batch:
            if text.is_open:
                if event.finish_reason is not None:
                    self._count_ended(text)
                text.stream.put(StreamEvent(text.index, event))

    def _refuse(self, texts: Sequence[_Text]) -> None:
        error = UnavailableError("the server is stopping", next_step="send the request to another one")
        for text in texts:
            if text.is_open:
                self._count_ended(text)
                text.stream.put(StreamEvent(text.index, None, error))

    def _set_failure(self, error: PacelineError) -> None:
        self.error = error
        self.failure = UnavailableError(f"the engine has failed: {error.what}")
        self.fail(self.failure)
        self.on_failure()


class ServerStatistics:
    """Numbers for `/metrics`; single values, so that any thread can read them."""

    def __init__(self) -> None:
        self.num_steps = self.num_cancelled = self.num_generated = self.num_prompt = 0
        self.step_seconds = 0.0
        self.statuses: dict[int, int] = {}
        self.first_token: deque[float] = deque(maxlen=_KEPT_TIMES)
        self.between_tokens: deque[float] = deque(maxlen=_KEPT_TIMES)

    def add_token(self, text: _Text, now: float) -> None:
        """Count a token, and the time that it took."""
        self.num_generated += 1
        if text.last_token:
            self.between_tokens.append(now - text.last_token)
        else:
            self.first_token.append(now - text.submitted)
            self.num_prompt += len(text.request.prompt)
        text.last_token = now

    def samples(self, thread: EngineThread) -> Iterator[MetricSample]:
        """Yield the values of `SERVER_METRICS`."""
        engine = thread.engine
        used, slots = engine.num_running, engine.num_slots
        for status, count in sorted(self.statuses.copy().items()):
            yield MetricSample(catalog.SERVER_REQUESTS, (str(status),), count)
        yield MetricSample(catalog.SERVER_TOKENS, ("prompt",), self.num_prompt)
        yield MetricSample(catalog.SERVER_TOKENS, ("generated",), self.num_generated)
        yield MetricSample(catalog.SERVER_STEPS, (), self.num_steps)
        yield MetricSample(catalog.SERVER_STEP_SECONDS, (), self.step_seconds)
        yield MetricSample(catalog.SERVER_CANCELLED, (), self.num_cancelled)
        yield MetricSample(catalog.SERVER_SLOTS, ("used",), used)
        yield MetricSample(catalog.SERVER_SLOTS, ("free",), slots - used)
        yield MetricSample(catalog.SERVER_QUEUED, (), max(0, thread.num_open - slots))
        for metric, times in (
            (catalog.SERVER_FIRST_TOKEN, self.first_token),
            (catalog.SERVER_BETWEEN_TOKENS, self.between_tokens),
        ):
            kept = sorted(times.copy())
            for quantile in _QUANTILES if kept else ():
                value = kept[min(len(kept) - 1, math.ceil(quantile * len(kept)) - 1)]
                yield MetricSample(metric, (str(quantile),), value)
