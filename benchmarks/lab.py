"""The lab's links against what was asked for: rates by a stream of TCP, latencies by round trips.

The rate counts Ethernet frames, so the goodput that is wanted is 1,448/1,514 of it. An added latency is half
of the difference between the round trips with and without it. The machine's own load is printed beside.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Options, Report, Table, present
from paceline.lab import Lab, Links

_PROBE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("lab_probe.py"))]
_PORT = "5201"
_SHARE = 1448 / 1514
_RATES = {"10mbit": 10e6, "100mbit": 100e6, "200mbit": 200e6, "1gbit": 1e9}
_LATENCIES = {"500us": 0.5, "2ms": 2.0, "10ms": 10.0, "50ms": 50.0}
_DELAYED = ("100mbit", "200mbit", "1gbit")


def ask(lab: Lab, *arguments: str) -> str:
    """Run the probe on h0 to its end; what it printed."""
    command = lab.command("h0", [*_PROBE, *arguments])
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@contextmanager
def served(links: Links) -> Iterator[tuple[Lab, str]]:
    """A lab of two hosts, the second one answering at an address."""
    with Lab(hosts=2, links=links) as lab:
        command = lab.command("h1", [*_PROBE, "serve", _PORT, "100"])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdout.readline()
            yield lab, lab.topology.hosts[1].address
            server.terminate()


def goodput_bits(links: Links, seconds: int) -> float:
    """Bits per second that one TCP stream gets from h0 to h1."""
    with served(links) as (lab, address):
        found = json.loads(ask(lab, "stream", address, _PORT, str(seconds)))
    return 8 * found["bytes"] / found["seconds"]


def round_trips(links: Links, count: int) -> list[float]:
    """Milliseconds of every round trip."""
    with served(links) as (lab, address):
        return [trip / 1e3 for trip in json.loads(ask(lab, "ping", address, _PORT, str(count)))]


def rates(repeats: int, seconds: int) -> tuple[Table, list[dict[str, object]]]:
    """Every rate by itself, and together with a latency of 2 ms."""
    rows, data = [], []
    cases = [(rate, "") for rate in _RATES] + [(rate, "2ms") for rate in _DELAYED]
    for rate, latency in cases:
        found = [goodput_bits(Links(rate=rate, latency=latency), seconds) for _ in range(repeats)]
        shares = [value / (_RATES[rate] * _SHARE) for value in found]
        worst = max(abs(share - 1) for share in shares)
        rows.append(
            (
                f"{rate} {latency}".strip(),
                f"{_RATES[rate] * _SHARE / 1e6:.1f}",
                " ".join(f"{value / 1e6:.1f}" for value in found),
                f"{statistics.median(shares):.3f}",
                "met" if worst <= 0.05 else "missed",
            )
        )
        data.append({"rate": rate, "latency": latency, "bits_per_second": found})
    columns = ("link", "goodput wanted, Mbit/s", "measured", "median ratio", "all within 5 %")
    return Table(
        f"Rates: one TCP stream, {seconds} s after 0.5 s of warm-up, {repeats} times", columns, rows
    ), data


def latencies(count: int) -> tuple[Table, list[dict[str, object]]]:
    """Every latency, against the round trips of a lab without one before it and after it."""
    rows, data = [], []
    for latency, wanted in _LATENCIES.items():
        bare = round_trips(Links(rate="1gbit"), count) + round_trips(Links(rate="1gbit"), count)
        trips = round_trips(Links(rate="1gbit", latency=latency), count)
        added = (statistics.median(trips) - statistics.median(bare)) / 2
        low, *_, high = statistics.quantiles(trips, n=20)
        error = abs(added - wanted)
        rows.append(
            (
                latency,
                f"{statistics.median(bare):.3f}",
                f"{statistics.median(trips):.3f}",
                f"{low:.3f} .. {high:.3f}",
                f"{added:.3f}",
                "met" if error <= max(0.5, 0.1 * wanted) else "missed",
            )
        )
        data.append({"latency": latency, "bare_ms": bare, "trips_ms": trips})
    columns = (
        "latency",
        "bare trip ms",
        "trip ms",
        "5 % .. 95 %",
        "added one way ms",
        "within 0.5 ms or 10 %",
    )
    return Table(f"Latencies: {count} round trips of 64 bytes, one after the other", columns, rows), data


def measure(options: Options) -> Report:
    """Rates, then latencies."""
    with Lab(hosts=2, links=Links(latency="1ms")) as lab:
        means = lab.remarks()
    rate_table, rate_data = rates(1, 1) if options.quick else rates(3, 3)
    latency_table, latency_data = latencies(20 if options.quick else 300)
    return Report(
        "Links of the lab against what was asked for. " + "; ".join(means) + ".",
        [rate_table, latency_table],
        {"rates": rate_data, "latencies": latency_data},
    )


if __name__ == "__main__":
    present(measure, __doc__ or "")
