"""Codecs on slow links, beside DDP and its hooks, and beside what can be had at all.

The roofline of a codec is max(compute + coding, bytes / rate) / compute: sums go on beside the backward pass,
coding does not. So a rank has one micro-batch: gradients of several are added up, and leave in the backward
of the last; one case has two, to show what that costs. Compute is the same loop without communication in the
same processes; coding is processor time for each MB of gradients, measured on the same hosts; bytes are those
of the ledger. One host of the lab has one rank with one thread, and hosts share the cores of this machine.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.marked import found_in
from benchmarks.report import Options, Report, Table, present
from benchmarks.wire_job import COMPUTE, HOOKS, MARK
from paceline.lab import Lab, Links

_ROOT = Path(__file__).resolve().parent.parent
_BOUND = 1.25
_CODECS = ("fp32", "bf16", "int8", "int4", "sign", "topk:0.01", "topk:0.01+int4", "lowrank:2")
_GOODPUT = 1448 / 1514  # of a rate that counts Ethernet frames


@dataclass(frozen=True)
class Case:
    """What is trained over which links.

    Args:
        subject: name in `benchmarks.wire_job.SUBJECTS`.
        bits: of every host's link.
        micro_batches: of a rank in a step.
    """

    title: str
    subject: str
    hosts: int
    rate: str
    bits: float
    codecs: tuple[str, ...] = _CODECS
    hooks: tuple[str, ...] = tuple(HOOKS)
    repeats: int = 5
    micro_batches: int = 1


def cases(options: Options) -> list[Case]:
    """What is measured."""
    if options.quick:
        return [Case("quick MLP, 100 Mbit/s", "quick", 2, "100mbit", 1e8, ("fp32", "int8"), ("DDP",), 1)]
    gpt, few = f"byte-gpt, {options.precision}", ("fp32", "int8", "topk:0.01", "topk:0.01+int4", "lowrank:2")
    return [
        Case("8.4 M MLP, 2 hosts, 1 Gbit/s", "mlp", 2, "1gbit", 1e9),
        Case("8.4 M MLP, 2 hosts, 100 Mbit/s", "mlp", 2, "100mbit", 1e8),
        Case(f"{gpt}, 2 hosts, 1 Gbit/s", "gpt", 2, "1gbit", 1e9),
        Case(f"{gpt}, 2 hosts, 100 Mbit/s", "gpt", 2, "100mbit", 1e8),
        Case(f"{gpt}, 2 hosts, 100 Mbit/s, 2 micro-batches", "gpt", 2, "100mbit", 1e8, few, (), 3, 2),
        Case(f"{gpt}, 2 hosts, 10 Mbit/s", "gpt", 2, "10mbit", 1e7, few, tuple(HOOKS), 3),
        Case(f"{gpt}, 4 hosts, 1 Gbit/s", "gpt", 4, "1gbit", 1e9, few, tuple(HOOKS), 3),
        Case(f"{gpt}, 4 hosts, 100 Mbit/s", "gpt", 4, "100mbit", 1e8, few, tuple(HOOKS), 3),
        Case("8.4 M MLP, 4 hosts, 100 Mbit/s", "mlp", 4, "100mbit", 1e8, few, tuple(HOOKS), 3),
        Case("8.4 M MLP, 2 hosts, 10 Mbit/s", "mlp", 2, "10mbit", 1e7, few, (), 1),
    ]


def run(case: Case, precision: str) -> dict[str, Any]:
    """Measure one case in a lab of its own."""
    command = ["paceline", "run", "-n", str(case.hosts), "-m", "benchmarks.wire_job", case.subject]
    command.append(str(case.hosts * case.micro_batches))
    words = [";".join(case.codecs), ";".join(case.hooks), str(case.repeats), precision]
    with Lab(hosts=case.hosts, links=Links(rate=case.rate)) as lab:
        outcome = lab.run([*command, *words], directory=_ROOT, deadline_seconds=400.0)
    return found_in(outcome, MARK)


def roofline(compute: float, coding: float, sent_bytes: float, bits_per_second: float) -> float:
    """The best ratio of a step to its compute that can be had."""
    return max(compute + coding, 8 * sent_bytes / bits_per_second) / compute


def table_of(case: Case, found: dict[str, Any]) -> Table:
    """Every side: its step, what it sends and codes, its roofline."""
    num_bytes, rows, met = 4 * found["parameters"], [], 0
    seconds = {series["name"]: series["seconds"] for series in found["series"]}
    compute = statistics.median(seconds[COMPUTE])
    for series in found["series"]:
        name, own = series["name"], sorted(series["seconds"])
        step, cells = statistics.median(own), ("-",) * 5
        if name in case.codecs:
            sent, coding = num_bytes * found["sent_per_byte"][name], found["coding_ms_per_mb"][name]
            best = roofline(compute, coding * num_bytes / 1e9, sent, _GOODPUT * case.bits)
            above = step / compute / best
            met += above <= _BOUND
            cells = (
                f"{sent / 1e6:.3f}",
                f"{coding:.2f}",
                f"{best:.2f}",
                f"{above:.2f}",
                "met" if above <= _BOUND else "missed",
            )
        losses = series["losses"]
        rows.append(
            (
                name,
                f"{step * 1e3:.0f}",
                f"{own[0] * 1e3:.0f} .. {own[-1] * 1e3:.0f}",
                f"{step / compute:.2f}",
                *cells,
                f"{losses[0]:.3f} > {losses[-1]:.3f}",
            )
        )
    remarks = [f"within {_BOUND} of the roofline: {met} of {len(case.codecs)} codecs"]
    remarks += [f"{name} did not run: {why}" for name, why in found["failed"].items()]
    columns = (
        "side",
        "ms",
        "min .. max",
        "/ compute",
        "MB sent",
        "ms a MB",
        "roofline",
        "above it",
        "1.25",
        "loss",
    )
    return Table(f"{case.title} ({found['parameters'] / 1e6:.2f} M parameters)", columns, rows, remarks)


def measure(options: Options) -> Report:
    """All cases."""
    tables, data = [], {}
    for case in cases(options):
        found = run(case, options.precision)
        tables.append(table_of(case, found))
        data[case.title] = found
    return Report("Codecs on links of the lab, beside DDP and its hooks.", tables, {"cases": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
