"""A live page that is really served, on a port of its own."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TOKEN = "the-token"
SECONDS = 60.0


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """Yield the address without the token."""
    pytest.importorskip("uvicorn", reason="needs paceline[watch]")
    from paceline.cli.watch import _listen
    from paceline.watch.page_server import PageServer
    from paceline.watch.run_collection import RunCollection

    with _listen("127.0.0.1", 0) as listener:
        server = PageServer(RunCollection(list(folders)), TOKEN)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        expires = time.monotonic() + SECONDS
        while not server.started:
            assert thread.is_alive() and time.monotonic() < expires
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(SECONDS)
            assert not thread.is_alive()


def get(address: str, token: str = TOKEN, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of an answer."""
    mark = "&" if "?" in address else "?"
    request = urllib.request.Request(f"{address}{mark}token={token}" if token else address, method=method)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def read(address: str) -> Any:
    """Return an answer in strict JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    status, _, body = get(address)
    assert status == 200, body
    return json.loads(body, parse_constant=refuse)


def names_of(runs: Sequence[Any]) -> list[str]:
    return [run["name"] for run in runs]
