"""A server of one model: the HTTP interface of completions and chats that public client libraries use.

The engine runs in a thread of its own. HTTP hands requests over and receives tokens through queues, so a
client that is slow, sends nothing or leaves costs the others nothing. Invariant: the text of a request is the
one that it has alone; a request whose client has left is cancelled before the next step of the engine; every
wait has a deadline; an unknown parameter is an error that names it.
Not done here: more than one model, and authentication beyond one token.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jinja2  # noqa: F401, so that a missing one is found before the model is loaded
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.errors import PacelineError, QueueFullError, RequestError
from paceline.serving.answers import (
    Answer,
    AnswerPart,
    ChatApi,
    CompletionApi,
    PreparedRequest,
    parse_json,
    render_event,
)
from paceline.serving.engine import Engine
from paceline.serving.engine_thread import (
    EngineThread,
    GenerationStream,
    LateAnswerError,
    ServerStatistics,
    UnavailableError,
)
from paceline.serving.load_model import ServedModel
from paceline.watch.exporter import metric_families


@dataclass(frozen=True)
class ServerLimits:
    """The limits of a server.

    Args:
        max_queued: texts that wait for a slot; more are answered with 429.
        max_tokens: of one text; 0: as many as the context has room for.
        max_body_bytes: of a request.
        request_seconds: for a whole answer, the time in the queue included.
        receive_seconds: for a client to send a request, and to send the next one.
        send_seconds: for a client to take a part of an answer.
        stop_seconds: after SIGTERM, for texts that have begun.
        max_connections: connections without a request; when there are more, the oldest is closed.
    """

    max_queued: int = 64
    max_tokens: int = 0
    max_body_bytes: int = 4 * 2**20
    request_seconds: float = 600.0
    receive_seconds: float = 30.0
    send_seconds: float = 60.0
    stop_seconds: float = 30.0
    max_connections: int = 4096


class _StatisticsCollector(Collector):
    """The collector of a server's metrics; the label `model` has the name of its model."""

    def __init__(self, thread: EngineThread, name: str) -> None:
        self._thread, self._name = thread, name

    def collect(self) -> Iterable[Metric]:
        return metric_families(self._thread.statistics.samples(self._thread), {"model": self._name})


class GenerationServer(uvicorn.Server):
    """A server that answers until it gets SIGTERM or SIGINT.

    Then texts that wait are refused with 503, and those that have begun get `limits.stop_seconds`.

    Args:
        served, engine: the model.
        token: that every request has to carry, `Authorization: Bearer TOKEN`; empty: none.
        limits: of requests.
        is_loopback: whether only this host reaches it; then requests for other host names are refused, so
            that no page in a browser can use the server under a name of its own.
        ends_with_engine: whether the server ends when its engine fails; `thread.error` has the reason.
            Otherwise it answers every request with 503.
    """

    def __init__(
        self,
        served: ServedModel,
        engine: Engine,
        token: str = "",
        limits: ServerLimits | None = None,
        *,
        is_loopback: bool = True,
        ends_with_engine: bool = False,
    ) -> None:
        self.limits = _within_open_files(limits or ServerLimits())
        self.thread = EngineThread(
            engine, max_queued=self.limits.max_queued, request_seconds=self.limits.request_seconds
        )
        idle = IdleConnections(self.limits)
        config = uvicorn.Config(
            build_app(served, self.thread, token, self.limits, is_loopback=is_loopback),
            http=cast(Any, partial(_Connection, idle=idle)),
            log_level="error",
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=math.ceil(self.limits.stop_seconds),
        )
        super().__init__(config)
        if ends_with_engine:
            self.thread.on_failure = self._end

    def _end(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse texts that wait, finish those that have begun, and end the server."""
        self.thread.refuse_waiting()
        late = UnavailableError("the server has stopped before the end of this text")
        # A second before uvicorn would cut the connections, so that clients get an answer.
        timer = asyncio.get_running_loop().call_later(
            max(0.0, self.limits.stop_seconds - 1.0), self.thread.fail, late
        )
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def _within_open_files(limits: ServerLimits) -> ServerLimits:
    """Raise the limit of open files as far as allowed, and lower that of connections to half of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != soft:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    most = (
        limits.max_connections if soft == resource.RLIM_INFINITY else min(limits.max_connections, soft // 2)
    )
    return replace(limits, max_connections=max(1, most))


class IdleConnections:
    """The connections without a request, oldest first."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self._waiting: OrderedDict[_Connection, asyncio.TimerHandle] = OrderedDict()

    def add(self, connection: _Connection) -> None:
        """Wait for a request, for a limited time; close the oldest connection if there are too many."""
        self.remove(connection)
        loop = asyncio.get_running_loop()
        self._waiting[connection] = loop.call_later(self.limits.receive_seconds, connection.drop)
        if len(self._waiting) > self.limits.max_connections:
            next(iter(self._waiting)).drop()

    def remove(self, connection: _Connection) -> None:
        """Forget a connection."""
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()


_CONNECTION = "paceline.connection"  # among the extensions of a scope


class _Connection(H11Protocol):
    """A connection that is closed if it sends no request, or takes no answer, in time.

    uvicorn waits for the first request, and for a full buffer to be read, forever.
    """

    def __init__(self, *args: Any, idle: IdleConnections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._idle = idle
        self._full: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle.add(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._idle.remove(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._idle.add(self)

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            cast(Any, self.scope).setdefault("extensions", {})[_CONNECTION] = self

    async def write_part(self, data: bytes) -> None:
        """Write a part of the body of the present answer, which has begun.

        Not through the layers of ASGI and h11, which take longer for a token than all else.
        """
        if self.flow.write_paused:
            await self.flow.drain()
        if not self.transport.is_closing():
            is_chunked = self.conn.their_http_version == b"1.1"
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    def pause_writing(self) -> None:
        # Only here, where the client is slow: a timer for each token would cost more than its JSON.
        super().pause_writing()
        self._stop_timer()
        self._full = asyncio.get_running_loop().call_later(self._idle.limits.send_seconds, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._full is not None:
            self._full.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.remove(self)
        self._stop_timer()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection."""
        self._idle.remove(self)
        self.transport.abort()


def build_app(
    served: ServedModel, thread: EngineThread, token: str, limits: ServerLimits, *, is_loopback: bool
) -> Starlette:
    """Build the application; see `GenerationServer`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        thread.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(thread.close)

    views = _Views(served, thread, limits)
    completions, chats = CompletionApi(served, thread.engine), ChatApi(served, thread.engine)
    routes = [
        Route("/v1/completions", partial(views.generate, completions), methods=["POST"]),
        Route("/v1/chat/completions", partial(views.generate, chats), methods=["POST"]),
        Route("/v1/models", views.models),
        Route("/v1/models/{name:path}", views.model),
        Route("/health", views.health),
        Route("/ready", views.ready),
        Route("/metrics", views.metrics),
    ]
    gate = Middleware(_Gate, token=token, statistics=thread.statistics, is_loopback=is_loopback)
    handlers: Any = {404: _not_found, 405: _not_found}
    return Starlette(routes=routes, lifespan=lifespan, middleware=[gate], exception_handlers=handlers)


async def _not_found(request: Request, error: Any) -> Response:
    what = f"{request.method} {request.url.path} is not part of this server"
    return _error_response(error.status_code, what, "", "not_found")


def _error_response(
    status: int, message: str, parameter: str = "", code: str = "", headers: Mapping[str, str] | None = None
) -> Response:
    return JSONResponse(_error_body(status, message, parameter, code), status, headers)


def _error_body(status: int, message: str, parameter: str = "", code: str = "") -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": parameter or None, "code": code or None}
    return {"error": error}


def _describe(error: PacelineError) -> str:
    return f"{error.what}; {error.next_step}" if error.next_step else error.what


class _Gate:
    """Middleware: the token, the host name, and statuses."""

    def __init__(self, app: ASGIApp, token: str, statistics: ServerStatistics, *, is_loopback: bool) -> None:
        self._app, self._token, self._statistics = app, token, statistics
        self._is_loopback = is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                counts = self._statistics.statuses
                counts[message["status"]] = counts.get(message["status"], 0) + 1
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, send_and_count)

    def _refusal(self, request: Request) -> Response | None:
        host = request.url.hostname or ""
        if self._is_loopback and not (host in ("localhost", "::1") or host.startswith("127.")):
            return _error_response(403, f"this server answers to names of this host, not to '{host[:80]}'")
        if request.url.path in ("/health", "/ready") or not self._token:
            return None
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(shown.encode(), self._token.encode()):
            return None
        message = "this server needs its access token: send the header 'Authorization: Bearer TOKEN'"
        return _error_response(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class _Views:
    """Answers to requests."""

    def __init__(self, served: ServedModel, thread: EngineThread, limits: ServerLimits) -> None:
        self._served, self._thread, self._limits = served, thread, limits
        self._created = int(time.time())
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_StatisticsCollector(thread, served.name))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == self._served.name:
            return JSONResponse(self._model())
        return _error_response(404, f"there is no model '{name[:80]}'", "model", "model_not_found")

    def _model(self) -> dict[str, Any]:
        own = {"id": self._served.name, "object": "model", "created": self._created, "owned_by": "paceline"}
        return {**own, "context": self._served.context, "fingerprint": self._thread.engine.fingerprint}

    async def health(self, request: Request) -> Response:
        failure = self._thread.failure
        return PlainTextResponse(
            "ok\n" if failure is None else f"{failure.what}\n", 200 if failure is None else 503
        )

    async def ready(self, request: Request) -> Response:
        is_ready = self._thread.failure is None and not self._thread.is_stopping
        return PlainTextResponse("ready\n" if is_ready else "not ready\n", 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(
            generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def generate(self, api: CompletionApi | ChatApi, request: Request) -> Response:
        """Answer a completion or a chat."""
        try:
            body = await self._read_body(request)
            # Tokenizing takes milliseconds; a thread keeps it from delaying the tokens of others.
            prepared = await asyncio.to_thread(api.prepare, parse_json(body), self._limits.max_tokens)
            stream = self._thread.submit(prepared.requests)
        except ClientDisconnect:
            return Response(status_code=499)
        except PacelineError as error:
            return self._refuse(error)
        if prepared.streams:
            return _EventStream(self._events(api, prepared, stream), stream)
        return await self._whole_answer(api, prepared, stream, request)

    async def _read_body(self, request: Request) -> bytes:
        """Read the body of a request.

        Raises:
            RequestError: it is too long, is no JSON by its header, or takes too long.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a page of another origin cannot send without being allowed to
            raise RequestError(
                f"the content type is '{kind[:80]}'",
                parameter="Content-Type",
                next_step="send application/json",
            )
        most, length = self._limits.max_body_bytes, request.headers.get("content-length", "0")
        body = bytearray()
        if int(length) > most:  # h11 has checked that it is a number
            raise _BodyError(f"the body has {length} bytes, of {most} that a request may have")
        try:
            async with asyncio.timeout(self._limits.receive_seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise _BodyError(f"the body has more than {most} bytes that a request may have")
        except TimeoutError as error:
            seconds = self._limits.receive_seconds
            raise _BodyError(f"the body did not arrive within {seconds:g} seconds", status=408) from error
        return bytes(body)

    def _refuse(self, error: PacelineError) -> Response:
        parameter = error.parameter if isinstance(error, RequestError) else ""
        status, code, headers = _status_of(error)
        if isinstance(error, QueueFullError):
            headers["Retry-After"] = str(self._thread.estimate_wait())
        return _error_response(status, _describe(error), parameter, code, headers)

    async def _whole_answer(
        self,
        api: CompletionApi | ChatApi,
        prepared: PreparedRequest,
        stream: GenerationStream,
        request: Request,
    ) -> Response:
        """Wait for the whole answer, or for the client to leave."""
        answer = asyncio.ensure_future(self._collect(prepared, stream))
        gone = asyncio.ensure_future(_disconnected(request.receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Response(status_code=499)
            return JSONResponse(api.render(prepared, await answer))
        except PacelineError as error:
            return self._refuse(error)
        finally:
            stream.close()
            answer.cancel()
            gone.cancel()

    async def _collect(self, prepared: PreparedRequest, stream: GenerationStream) -> list[list[AnswerPart]]:
        parts: list[list[AnswerPart]] = [[] for _ in prepared.answers]
        async for index, part, _ in _answer_parts(prepared.answers, stream):
            parts[index].append(part)
        return parts

    async def _events(
        self, api: CompletionApi | ChatApi, prepared: PreparedRequest, stream: GenerationStream
    ) -> AsyncIterator[str]:
        """Yield an answer as server-sent events."""
        text = ""
        try:
            for event in api.first_events(prepared):
                yield event
            async for index, part, is_last in _answer_parts(prepared.answers, stream):
                text += api.event(prepared, index, part)
                # A write costs more than all of its text: one for what has come at the same time.
                if not (is_last or stream.has_event):
                    yield text
                    text = ""
            yield f"{text}{''.join(api.last_events(prepared))}data: [DONE]\n\n"
        except PacelineError as error:
            status, code, _ = _status_of(error)
            yield text + render_event(_error_body(status, _describe(error), code=code))


class _BodyError(RequestError):
    """A body that cannot be read; the connection is closed, since the rest of the body may follow."""

    def __init__(self, what: str, *, status: int = 413) -> None:
        super().__init__(what, next_step="send a shorter request, in one go")
        self.status = status


def _status_of(error: PacelineError) -> tuple[int, str, dict[str, str]]:
    """Return the HTTP status of an error, its code, and headers."""
    match error:
        case _BodyError():
            return error.status, "body", {"Connection": "close"}
        case LateAnswerError():
            return 504, "timeout", {}
        case QueueFullError():
            return 429, "queue_full", {}
        case UnavailableError():
            return 503, "unavailable", {"Retry-After": "5"}
        case RequestError(parameter="model"):
            return 404, "model_not_found", {}
        case RequestError():
            return 400, "", {}
        case _:
            return 503, "unavailable", {"Retry-After": "5"}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer_parts(
    answers: Sequence[Answer], stream: GenerationStream
) -> AsyncIterator[tuple[int, AnswerPart, bool]]:
    """Yield the parts of all answers as they become final, and whether it is the last one."""
    open_answers = set(range(len(answers)))
    while open_answers:
        index, event = await stream.next()
        if index not in open_answers:
            continue
        part = answers[index].push(event)
        if part is not None:
            if part.finish_reason is not None:
                open_answers.remove(index)
                stream.end(index)
            yield index, part, not open_answers


class _EventStream(Response):
    """Server-sent events, whose texts end when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], stream: GenerationStream) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["Content-Length"]
        self._events, self._stream = events, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Also where the client has left before the first event, so that the generator never ran.
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            written = asyncio.ensure_future(self._write(scope["extensions"][_CONNECTION]))
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                await asyncio.wait((written, gone), return_when=asyncio.FIRST_COMPLETED)
                if written.done():
                    await written
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                written.cancel()
                gone.cancel()
        finally:
            self._stream.close()

    async def _write(self, connection: _Connection) -> None:
        async for event in self._events:
            await connection.write_part(event.encode())
