"""A server under load: 32 clients in an open loop at 80 % of the highest throughput, and 10,000 requests.

The model is Paceline's GPT of 10 million parameters with random weights, in a process of its own of 32 slots;
clients are threads of this process, on the same cores. The time to the first token and between tokens is what
clients see. The share of HTTP and JSON is the CPU time of the event loop in that of the server.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.report import Options, Report, Table, present
from paceline.models import GPT, GPTConfig

_SLOTS, _TOKENS, _DEADLINE = 32, 32, 120.0
_OPTIONS = {"context": 256, "layers": 6, "heads": 6, "width": 384}


@dataclass
class Server:
    """A server process and how clients use it."""

    port: int
    process: subprocess.Popen[bytes]

    def request(self, tokens: int, *, stream: bool) -> list[float]:
        """Send a request; returns the times of its chunks, seconds from the beginning."""
        began, times = time.perf_counter(), list[float]()
        body = {"prompt": "def f(x):\n    return", "max_tokens": tokens, "seed": random.randrange(2**32)}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_DEADLINE)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**body, "stream": stream}),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(answer.read().decode())
        for line in answer:
            if line.startswith(b'data: {"error"'):
                raise RuntimeError(line.decode())
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - began)
        connection.close()
        return times or [time.perf_counter() - began]

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time of the event loop, which is the main thread, and of the whole process."""
        ticks = os.sysconf("SC_CLK_TCK")
        folder = Path(f"/proc/{self.process.pid}")

        def read(file: Path) -> float:
            fields = file.read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / ticks

        return read(folder / f"task/{self.process.pid}/stat"), read(folder / "stat")

    def resident_bytes(self) -> int:
        """Private pages of the process."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))


@dataclass
class Load:
    """Times that clients saw, in seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    num_errors: int = 0

    def add(self, times: list[float]) -> None:
        self.first.append(times[0])
        self.between += [b - a for a, b in pairwise(times)]


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve a model until the block ends."""
    torch.manual_seed(0)
    text = 'task = "byte-gpt"\n[options]\n' + "".join(f"{k} = {v}\n" for k, v in _OPTIONS.items())
    state = {name: value.clone() for name, value in GPT(GPTConfig(**_OPTIONS)).state_dict().items()}
    save_file(state, folder / "gpt.safetensors", {"recipe": text})
    words = [
        "serve",
        folder / "gpt.safetensors",
        "--port",
        "0",
        "--slots",
        str(_SLOTS),
        "--max-queued",
        "1000",
    ]
    process = subprocess.Popen([sys.executable, "-m", "paceline", *map(str, words)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        server = Server(int(line.rpartition(":")[2].partition("/")[0]), process)
        server.request(2, stream=False)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_DEADLINE)


def closed_loop(server: Server, seconds: float) -> float:
    """Requests per second of 32 clients that always have one request under way."""
    ends = time.perf_counter() + seconds

    def client(_: int) -> int:
        count = 0
        while time.perf_counter() < ends:
            server.request(_TOKENS, stream=True)
            count += 1
        return count

    with ThreadPoolExecutor(_SLOTS) as pool:
        began = time.perf_counter()
        total = sum(pool.map(client, range(_SLOTS)))
        return total / (time.perf_counter() - began)


def open_loop(server: Server, rate: float, seconds: float) -> Load:
    """Send requests at random times, `rate` per second on average, whether or not earlier ones have ended."""
    load, draws = Load(), random.Random(0)

    def send() -> None:
        try:
            load.add(server.request(_TOKENS, stream=True))
        except (OSError, RuntimeError):
            load.num_errors += 1

    with ThreadPoolExecutor(256) as pool:
        next_time = time.perf_counter()
        ends = next_time + seconds
        while next_time < ends:
            time.sleep(max(0.0, next_time - time.perf_counter()))
            pool.submit(send)
            next_time += draws.expovariate(rate)
    return load


def quantile(times: list[float], share: float) -> str:
    """A quantile in milliseconds."""
    return f"{sorted(times)[min(len(times) - 1, int(share * len(times)))] * 1e3:,.1f}" if times else "-"


def measure(options: Options) -> Report:
    """Measure throughput, latency, the share of HTTP, and memory."""
    seconds, count = (60.0, 10_000) if not options.quick else (2.0, 50)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        most = closed_loop(server, seconds / 4)
        loop_before, all_before = server.cpu_seconds()
        load = open_loop(server, 0.8 * most, seconds)
        loop_after, all_after = server.cpu_seconds()
        share = (loop_after - loop_before) / max(all_after - all_before, 1e-9)
        memory = [server.resident_bytes()]
        with ThreadPoolExecutor(_SLOTS) as pool:
            for _ in range(4):
                list(pool.map(lambda _: server.request(1, stream=False), range(count // 4)))
                memory.append(server.resident_bytes())
    rows = [
        ("highest throughput (closed loop)", f"{most:.1f} requests/s, {most * _TOKENS:,.0f} tokens/s"),
        ("requests at 80 % of it (open loop)", f"{len(load.first):,} in {seconds:.0f} s"),
        ("errors", str(load.num_errors)),
        (
            "time to the first token, p50 and p99",
            " and ".join(quantile(load.first, q) for q in (0.5, 0.99)) + " ms",
        ),
        (
            "time between tokens, p50 and p99",
            " and ".join(quantile(load.between, q) for q in (0.5, 0.99)) + " ms",
        ),
        ("HTTP and JSON in the CPU time of the server", f"{share:.1%}"),
        (
            f"private memory, after each quarter of {count:,} requests",
            ", ".join(f"{m / 2**20:.1f}" for m in memory) + " MiB",
        ),
    ]
    data: dict[str, Any] = {"throughput": most, "share": share, "memory": memory, "errors": load.num_errors}
    table = Table(f"{_SLOTS} slots, {_TOKENS} tokens a request, streamed", ("what", "value"), rows)
    return Report("How a server behaves under load.", [table], data)


if __name__ == "__main__":
    present(measure, __doc__ or "")
