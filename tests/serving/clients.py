"""Clients of a server that is under test, good and bad ones, and the server in a process or a thread."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from paceline.serving import Engine
from paceline.serving.load_model import ServedModel
from tests.commands import Command
from tests.ports import free_port

SECONDS = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    expires = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < expires
        time.sleep(0.02)


class Client:
    """A client of a server at a port of this host."""

    def __init__(self, port: int, token: str = "") -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def call(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer; a body of bytes is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            sent = {"Content-Type": "application/json", **self._headers, **(headers or {})}
            connection.request("GET" if body is None else "POST", path, data, sent)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()

    def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        """Return a completion."""
        status, _, body = self.call("/v1/completions", {"prompt": prompt, **options})
        assert status == 200, body
        answer: dict[str, Any] = json.loads(body)
        return answer

    def text(self, prompt: str, **options: Any) -> str:
        """Return the text of a completion, streamed if `stream` is set."""
        if not options.get("stream"):
            return str(self.complete(prompt, **options)["choices"][0]["text"])
        status, _, body = self.call("/v1/completions", {"prompt": prompt, **options})
        assert status == 200, body
        return "".join(event["choices"][0]["text"] for event in events_of(body))

    def metric(self, name: str, **labels: str) -> float:
        """Return a value of `/metrics`."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.call("/metrics")[2].decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return next(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def open_stream(self, **options: Any) -> socket.socket:
        """Send a request for a streamed completion, and return the socket."""
        body = json.dumps({"stream": True, **options}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        opened = socket.create_connection(("127.0.0.1", self.port), SECONDS)
        opened.sendall(head.encode() + body)
        return opened


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, which ends as it must."""
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class ServerProcess(Client):
    """`paceline serve` in a process of its own."""

    def __init__(
        self, source: Path, *words: object, token: str = "", environ: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(free_port(), token)
        self._words = ["paceline", "serve", str(source), "--port", str(self.port), *map(str, words)]
        self._folder, self._environ = source.parent, environ or {}

    def __enter__(self) -> Self:
        self._command = Command(self._words, self._folder, self._environ)

        def is_ready() -> bool:
            assert self._command.poll() is None, self._command.communicate()
            try:
                return self.call("/ready")[0] == 200
            except OSError:
                return False

        with ExitStack() as stack:
            stack.callback(self._command.kill)
            wait_until(is_ready)
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        if self._command.poll() is None:
            self._command.kill()
        self._command.wait(SECONDS)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._command.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.terminate()
        return self.wait()

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        return self._command.wait(SECONDS)

    @property
    def is_running(self) -> bool:
        """True before the end."""
        return self._command.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._command.pid

    def processes(self) -> list[int]:
        """Return the server and all processes below it."""
        found = [self.pid]
        for pid in found:
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return found

    @staticmethod
    def private_bytes_of(pid: int) -> int:
        """Return the memory that only one process has."""
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))

    def communicate(self) -> tuple[str, str]:
        """Return what it printed."""
        return self._command.communicate(SECONDS)


@contextmanager
def served_here(
    served: ServedModel, engine: Engine, token: str = "", *, buffer_bytes: int = 0, **limits: Any
) -> Iterator[Client]:
    """Serve in a thread of this process; the engine can be looked at.

    Args:
        buffer_bytes: that the system keeps of what a client does not take; 0: as many as it likes.
    """
    from paceline.serving.server import GenerationServer, ServerLimits

    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        if buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        server = GenerationServer(served, engine, token, ServerLimits(**limits))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="test-server")
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            yield Client(listener.getsockname()[1], token)
        finally:
            server.should_exit = True
            thread.join(SECONDS)
            assert not thread.is_alive()
