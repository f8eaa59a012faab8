"""The server of the live page: one static page, JSON about runs, and a stream that announces changes.

Invariant: read-only; every answer about a run needs the token of the link, and nothing is loaded from another
origin. A browser that leaves costs nothing more.
"""

from __future__ import annotations

import asyncio
import csv
import hmac
import io
import math
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import resources
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.watch.curves import CurvePoints
from paceline.watch.run_collection import RunCollection

MAX_POINTS = 4000
_MAX_RUNS, _MAX_NAMES = 500, 20  # of one request
_HEARTBEAT_SECONDS = 10.0
_MIN_SECONDS_BETWEEN_CHANGES = 0.5
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_FILES = {"page.js": "text/javascript", "page.css": "text/css"}


class PageServer(uvicorn.Server):
    """A server of the page, which ends its streams when it is asked to exit.

    Args:
        runs, token: see `build_app`.
    """

    def __init__(self, runs: RunCollection, token: str) -> None:
        self._changes = ChangeSignal(runs)
        app = build_app(runs, token, self._changes)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=5
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all streams, for which uvicorn would wait, and then the server."""
        self._changes.close()
        await super().shutdown(sockets)


def build_app(runs: RunCollection, token: str, changes: ChangeSignal) -> Starlette:
    """Build the application.

    Args:
        runs: what it shows; it is started and closed with the application.
        token: what a request has to know, as `?token=` or in the cookie that the page sets.
        changes: wakes the streams.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        changes.bind(asyncio.get_running_loop())
        await asyncio.to_thread(runs.start)
        yield
        await asyncio.to_thread(runs.close)

    views = _Views(runs, changes)
    routes = [
        Route("/", views.page),
        Route("/page.{kind}", views.file),
        Route("/api/runs", views.list_runs),
        Route("/api/runs/{key}", views.run),
        Route("/api/runs/{key}/events", views.events),
        Route("/api/curves", views.curves),
        Route("/api/curve.csv", views.curve_csv),
        Route("/api/changes", views.changes),
    ]
    middleware = [Middleware(_Gate, token=token)]
    return Starlette(routes=routes, lifespan=lifespan, middleware=middleware)


class _Gate:
    """Middleware that refuses requests without the token, and sets the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *headers]
            await send(message)

        is_public = scope["path"].removeprefix("/") in _FILES
        shown = request.query_params.get("token") or request.cookies.get("paceline-token") or ""
        if request.method not in ("GET", "HEAD"):
            response: Response | None = PlainTextResponse("read-only", 405)
        elif not is_public and not hmac.compare_digest(shown.encode(), self._token.encode()):
            response = PlainTextResponse(
                "This page needs the token of the link that `paceline watch` printed.\n", 403
            )
        else:
            response = None
        if response is not None:
            await response(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)


class ChangeSignal:
    """Wakes all streams of changes, from the thread that reads runs."""

    def __init__(self, runs: RunCollection) -> None:
        self._runs = runs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self.closed = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use the loop of the server."""
        self._loop = loop
        self._runs.call_on_change(self._wake)

    def close(self) -> None:
        """End all streams."""
        self.closed = True
        self._set()

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, version: int) -> int:
        """Return the version of the runs once it differs from `version`, or after some seconds."""
        event = self._event
        if self._runs.version == version and not self.closed:
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), _HEARTBEAT_SECONDS)
        return self._runs.version


class _Views:
    """Answers to requests."""

    def __init__(self, runs: RunCollection, changes: ChangeSignal) -> None:
        self._runs, self._changes = runs, changes

    async def page(self, request: Request) -> Response:
        response = Response(_read_file("page.html"), media_type="text/html")
        if (
            "token" in request.query_params
        ):  # so that the page's own requests need not have it in their address
            response.set_cookie(
                "paceline-token", request.query_params["token"], httponly=True, samesite="strict", path="/"
            )
        return response

    async def file(self, request: Request) -> Response:
        name = f"page.{request.path_params['kind']}"
        if name not in _FILES:
            return PlainTextResponse("not found", 404)
        return Response(_read_file(name), media_type=_FILES[name])

    async def list_runs(self, request: Request) -> Response:
        return _json({"version": self._runs.version, "runs": await asyncio.to_thread(self._runs.summaries)})

    async def run(self, request: Request) -> Response:
        state = await asyncio.to_thread(self._runs.state, request.path_params["key"])
        return PlainTextResponse("no such run", 404) if state is None else _json(state)

    async def events(self, request: Request) -> Response:
        after = _int(request, "after", -1)
        return _json(await asyncio.to_thread(self._runs.events, request.path_params["key"], after))

    async def curves(self, request: Request) -> Response:
        """Return curves of several runs: `run` and `name` may be there many times."""
        keys, names, first, end = _chosen_curves(request)
        points = max(2, min(MAX_POINTS, _int(request, "points", 600)))

        def read() -> list[Mapping[str, Any]]:
            found = self._runs.points(keys[:_MAX_RUNS], names[:_MAX_NAMES], first, end, points)
            return [
                {"run": key, "name": name, "steps": part.steps, **_finite_columns(part)}
                for key, name, part in found
            ]

        return JSONResponse(await asyncio.to_thread(read))

    async def curve_csv(self, request: Request) -> Response:
        keys, names, first, end = _chosen_curves(request)

        def render() -> str:
            text = io.StringIO()
            writer = csv.writer(text)
            writer.writerow(["run", "name", "step", "time", "value"])
            run_names = {state["id"]: state["name"] for state in self._runs.summaries()}
            for key, name, part in self._runs.points(keys[:_MAX_RUNS], names[:_MAX_NAMES], first, end, 10**6):
                rows = zip(part.steps, part.times, part.last, strict=True)
                writer.writerows([run_names.get(key, key), name, *row] for row in rows)
            return text.getvalue()

        headers = {"Content-Disposition": 'attachment; filename="curves.csv"'}
        return Response(await asyncio.to_thread(render), media_type="text/csv", headers=headers)

    async def changes(self, request: Request) -> Response:
        """Send the version of the runs whenever it rises, as server-sent events."""

        async def stream() -> AsyncIterator[str]:
            version = -1
            while not self._changes.closed:
                version = await self._changes.wait(version)
                yield f"data: {version}\n\n"
                # Many changes within half a second are one for a page.
                await asyncio.sleep(_MIN_SECONDS_BETWEEN_CHANGES)

        return StreamingResponse(stream(), media_type="text/event-stream")


def _read_file(name: str) -> str:
    return resources.files("paceline.watch").joinpath(name).read_text("utf-8")


def _int(request: Request, name: str, default: int) -> int:
    try:
        return int(request.query_params.get(name, default))
    except ValueError:
        return default


def _chosen_curves(request: Request) -> tuple[list[str], list[str], int, int | None]:
    end = _int(request, "end", -1)
    keys, names = request.query_params.getlist("run"), request.query_params.getlist("name")
    return keys, names, _int(request, "first", 0), None if end < 0 else end


def _finite_columns(part: CurvePoints) -> dict[str, list[float | None]]:
    """Return the columns for strict JSON; low and high are left out where they are the values."""
    columns = {"last": part.last, "times": part.times}
    if part.low is not part.last:
        columns |= {"low": part.low, "high": part.high}
    is_finite = math.isfinite
    return {
        name: [value if is_finite(value) else None for value in values] for name, values in columns.items()
    }


def _json(value: Any) -> Response:
    """Return an answer in strict JSON: numbers that are not finite are null."""
    return JSONResponse(_finite(value))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(inside) for key, inside in value.items()}
        case str():
            return value
        case Sequence():
            return [_finite(inside) for inside in value]
        case _:
            return value
