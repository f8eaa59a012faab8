"""A server that speaks S3: moto's, in a process of its own."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port

BUCKET = "paceline"


@pytest.fixture(scope="module")
def object_server() -> Iterator[int]:
    """The port of moto's server, which is a process of its own."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _await_port(port)
            yield port
        finally:
            process.kill()


@pytest.fixture
def server(object_server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of this test alone; ranks inherit the variables that point to its server."""
    values = {"ENDPOINT_URL": f"http://127.0.0.1:{object_server}", "ACCESS_KEY_ID": "x"}
    for name, value in {**values, "SECRET_ACCESS_KEY": "y", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return f"s3://{BUCKET}/{tmp_path.name}/checkpoints"


def _await_port(port: int) -> None:
    expires = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < expires, "moto's server did not start"
            time.sleep(0.05)
