"""A server that speaks S3: moto's, in a process of its own."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.ports import free_port

BUCKET = "paceline"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """moto's server in a process of its own; ranks inherit the variables that point to it."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    port = free_port()
    values = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y"}
    for name, value in {**values, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _await_port(port)
            yield f"s3://{BUCKET}/run/checkpoints"
        finally:
            process.kill()


def _await_port(port: int) -> None:
    expires = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < expires, "moto's server did not start"
            time.sleep(0.05)
