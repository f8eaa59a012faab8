"""The script that delays and loses frames, for kernels without netem: `forwarder.py LAB JSON`.

JSON: {"device", "latency", "jitter", "loss", "seed"}, in seconds and fractions. It reads what the kernel
sends to a TAP device of that name, keeps each frame for its delay, and writes it back as received by the
device. With the standard library alone. With loss, frames have the size of the wire; without, large segments
of TCP pass whole (up to 64 KiB), which lets one process carry a gigabit. A line of JSON on standard input
changes latency, jitter and loss, an empty object requests the counts, and the end of the input ends the
script. Invariant: frames are never reordered, and lost ones are counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PI, _VNET_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _TSO4, _TSO6 = 0x01, 0x02, 0x04
_PR_SET_TIMERSLACK = 29
_FRAME_BYTES = 10 + 65536 + 64
_BATCH = 64
_QUEUE_BYTES = 64 << 20
_LATE_SECONDS = 5e-4


class FrameForwarder:
    """The forwarder of one direction of a link."""

    def __init__(self, device: str, latency: float, jitter: float, loss: float, seed: int) -> None:
        self.fd = open_tap(device)
        self.change(latency, jitter, loss)
        self.random = random.Random(seed)
        self.queue: deque[tuple[float, bytes]] = deque()
        self.queued_bytes = 0
        self.count = {"frames": 0, "lost": 0, "overflow": 0, "late": 0}

    def read(self) -> None:
        """Read the frames that have arrived, at most one batch."""
        # Not until nothing is left, or frames that are due would wait for those that arrive.
        for _ in range(_BATCH):
            try:
                frame = os.read(self.fd, _FRAME_BYTES)
            except BlockingIOError:
                return
            self.accept(frame, time.monotonic())

    def accept(self, frame: bytes, now: float) -> None:
        """Lose a frame, or queue it until it is due, never before the frame in front of it."""
        if self.loss and self.random.random() < self.loss:
            self.count["lost"] += 1
        elif self.queued_bytes + len(frame) > _QUEUE_BYTES:
            self.count["overflow"] += 1
        else:
            delay = self.latency + (self.random.uniform(-self.jitter, self.jitter) if self.jitter else 0.0)
            due = max(now + delay, self.queue[-1][0] if self.queue else 0.0)
            self.queue.append((due, frame))
            self.queued_bytes += len(frame)

    def write(self) -> None:
        """Write the frames that are due."""
        now = time.monotonic()
        while self.queue and self.queue[0][0] <= now:
            due, frame = self.queue.popleft()
            self.queued_bytes -= len(frame)
            self.count["frames"] += 1
            self.count["late"] += now - due > _LATE_SECONDS
            with contextlib.suppress(OSError):  # the port is down: frames on a cut link are lost
                os.write(self.fd, frame)

    def change(self, latency: float, jitter: float, loss: float) -> None:
        """Set the delay of frames from now on; without loss, accept segments that are not cut yet."""
        self.latency, self.jitter, self.loss = latency, jitter, loss
        fcntl.ioctl(self.fd, _TUNSETOFFLOAD, _CHECKSUM if loss else _CHECKSUM | _TSO4 | _TSO6)

    def handle_request(self, request: dict[str, float]) -> None:
        """Change the delay; an empty request prints the counts."""
        if request:
            self.change(**request)
        else:
            send_record(self.count)

    def wait(self) -> bool:
        """Wait for a frame, a request or the next due time; return False when the input has ended."""
        pause = max(0.0, self.queue[0][0] - time.monotonic()) if self.queue else None
        ready = select.select([self.fd, 0], [], [], pause)[0]
        if self.fd in ready:
            self.read()
        if 0 in ready:
            text = os.read(0, 65536)
            for line in text.splitlines():
                self.handle_request(json.loads(line))
            return bool(text)
        return True


def open_tap(device: str) -> int:
    """Create the TAP device; it vanishes with this process."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TAP | _NO_PI | _VNET_HEADER))
    return fd


def request_realtime_scheduling() -> str:
    """Request real-time scheduling with precise timers; return the scheduling that was granted."""
    # In nanoseconds; the default of 50 microseconds would add to every delay.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return "normal"
    return "real-time"


def main(arguments: list[str]) -> int:
    """Forward frames until the input ends."""
    try:
        forwarder = FrameForwarder(**json.loads(arguments[1]))
    except OSError as error:
        send_record({"error": f"/dev/net/tun: {error.strerror}"})
        return 1
    send_record({"scheduling": request_realtime_scheduling()})
    while forwarder.wait():
        forwarder.write()
    return 0


def send_record(record: Mapping[str, object]) -> None:
    """Print one line of JSON for the lab."""
    os.write(1, (json.dumps(record) + "\n").encode())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
