"""Ports for jobs that are told where to meet: nobody else has them between the asking and the listening."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

from paceline.job.cluster import process_environment

_FIRST, _EACH, _RUNS = 16_000, 1_000, 16
"""Below those that the system gives to whoever asks for any (32,768 and up); a block for each worker."""


def free_port() -> int:
    """A port of the loopback at which nobody listens, and which the system gives to nobody by itself."""
    worker = int(process_environment().get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(_FIRST + _EACH * (worker % _RUNS), _FIRST + _EACH * (worker % _RUNS + 1))
    for port in random.SystemRandom().sample(ports, len(ports)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("all ports are taken")
