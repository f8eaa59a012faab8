"""One end of a measurement in the lab: `lab_probe.py serve|stream|ping ...`, on the standard library alone.

`serve PORT SECONDS` answers streams and pings; `stream HOST PORT SECONDS` sends as fast as it can, and
prints what arrived and how long that took by the receiver's clock; `ping HOST PORT COUNT` prints round trips
in microseconds.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

_CHUNK = 1 << 18
_WARM_SECONDS = 0.5


def serve(port: int, seconds: float) -> None:
    """Answer datagrams at once; count streams after a warm-up. Ends by itself."""
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("", port))
    threading.Thread(target=_echo, args=(echo,), daemon=True).start()
    with socket.create_server(("", port)) as listener:
        listener.settimeout(seconds)
        print("ready", flush=True)
        while True:
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                return
            with peer:
                peer.sendall(json.dumps(_count(peer)).encode())


def _echo(echo: socket.socket) -> None:
    while True:
        data, sender = echo.recvfrom(2048)
        echo.sendto(data, sender)


def _count(peer: socket.socket) -> dict[str, float]:
    buffer, began, total = bytearray(_CHUNK), time.perf_counter(), 0
    started, last = 0.0, 0.0
    while size := peer.recv_into(buffer):
        now = time.perf_counter()
        if started:
            total, last = total + size, now
        elif now - began > _WARM_SECONDS:
            started = now
    return {"bytes": total, "seconds": last - started}


def stream(host: str, port: int, seconds: float) -> None:
    """Send for some seconds."""
    data = bytes(_CHUNK)
    with socket.create_connection((host, port), timeout=30) as peer:
        expires = time.perf_counter() + seconds + _WARM_SECONDS
        while time.perf_counter() < expires:
            peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        print(peer.recv(4096).decode())


def ping(host: str, port: int, count: int) -> None:
    """Round trips of small datagrams, one after the other; a lost one counts as none."""
    trips = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.settimeout(2)
        peer.connect((host, port))
        for _ in range(count):
            began = time.perf_counter()
            peer.send(bytes(64))
            try:
                peer.recv(2048)
            except TimeoutError:
                continue
            trips.append(1e6 * (time.perf_counter() - began))
            time.sleep(0.002)
    print(json.dumps(trips))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "serve":
        serve(int(rest[0]), float(rest[1]))
    else:
        {"stream": stream, "ping": ping}[what](rest[0], int(rest[1]), int(rest[2]))
