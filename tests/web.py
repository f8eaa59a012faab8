"""A folder behind HTTP on this machine, with the habits of servers: no ranges, connections that break."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Web:
    """What is served, and how.

    Args:
        url: of the folder.
        ranges: whether a part of a file can be asked for.
        breaks: so many answers with contents end in their middle.
        asked: (method, path, range) of every request.
    """

    url: str = ""
    ranges: bool = True
    breaks: int = 0
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)


@contextmanager
def serving(folder: Path) -> Iterator[Web]:
    """Serve a folder until the block ends."""
    web = Web()
    handler = type("Handler", (_Handler,), {"web": web, "folder": folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        web.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, name="test-web")
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    web: Web
    folder: Path
    protocol_version = "HTTP/1.1"
    timeout = 60.0

    def do_HEAD(self) -> None:
        self._answer(with_contents=False)

    def do_GET(self) -> None:
        self._answer(with_contents=True)

    def _answer(self, *, with_contents: bool) -> None:
        asked = self.headers.get("Range")
        self.web.asked.append((self.command, self.path, asked))
        place = self.folder / self.path.partition("?")[0].lstrip("/")
        if not place.is_file():
            self.send_error(404)
            return
        size = place.stat().st_size
        first, last = 0, size - 1
        if asked and self.web.ranges:
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or size - 1), size - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes" if self.web.ranges else "none")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        if with_contents:
            self._send(place, first, last)

    def _send(self, place: Path, first: int, last: int) -> None:
        with place.open("rb") as stream:
            stream.seek(first)
            contents = stream.read(last - first + 1)
        if self.web.breaks:
            self.web.breaks -= 1
            contents, self.close_connection = contents[: len(contents) // 2], True
        self.wfile.write(contents)

    def log_message(self, *parts: object) -> None:
        """Say nothing."""
