"""The diagnosis of a run: which rank is slow and why, and what else costs time, from its records. Pure.

A rank is slow if its own work takes longer than that of the others and they wait for it. Time in collectives
is never held against a rank: all ranks wait equally long for the one that arrives last. Invariant: each
finding cites the steps and the numbers that it follows from, and a run without a bottleneck has none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from paceline.observe.step_stats import PHASES
from paceline.report.number_format import format_bytes, format_duration, format_percent

Bottleneck = Literal[
    "slow disk",
    "slow link",
    "straggler",
    "small batch",
    "lock",
    "memory pressure",
    "wrong thread count",
    "precision without CPU support",
]
Record = Mapping[str, Any]

_LOCAL = (*(phase for phase in PHASES if phase != "communication"), "encoding", "other")
"""Parts of a round in which a rank works by itself; encoding is communication outside of collectives."""
_MAX_WINDOWS = 25  # the newest: what was slow an hour ago may have passed
_MIN_WINDOWS = 4
_MIN_EFFECT = 0.08  # of a round; less is noise on a busy machine
_MIN_CONSISTENCY = 0.8  # of all windows in which the rank is the slowest
_MIN_ARRIVAL = 0.3  # of its excess that others spend waiting; with overlap it is not the whole
_CPU_FRACTION = 0.2  # of the excess; one that computed used the CPU for more, unless it got no core at all
_LARGE_SHARE = 0.3
_SLOW_ROUND_TRIP = 5.0  # times that of the other ranks
_MIN_ROUND_TRIP_SECONDS = 1e-3
_SMALL_ROUND_SECONDS = 5e-3  # of forward and backward
_MATRIX_FLAGS: Mapping[str, frozenset[str]] = {
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}),
    "fp16": frozenset({"avx512_fp16", "amx_fp16", "fphp"}),
}
_MORE_WORK = 'see what else runs on its host, or give faster ones more work: strategy.balance = "speed"'
_ADVICE: Mapping[str, str] = {
    "data": "put its data on a faster disk, raise loader.workers, or keep samples in loader.cache_bytes",
    "forward": _MORE_WORK,
    "backward": _MORE_WORK,
    "optimizer": "see what else runs on its host; zero=1 shares the update among ranks",
    "encoding": "it encodes slowly: see what else runs on its host, or choose a cheaper codec",
    "other": "look at callbacks and logging, which run between the phases",
    "lock": "py-spy dump --pid PID shows where it waits; look for locks, the GIL, and processes on its cores",
    "slow link": "check cable, switch and host; fewer bytes: a codec, route=hierarchical, or sync=diloco:8",
}


class HostFacts(NamedTuple):
    """The facts that a reader knows about the host of a run.

    Args:
        cores: number of cores.
        cpu_flags: instruction sets as in /proc/cpuinfo; empty if unknown.
    """

    cores: int
    cpu_flags: frozenset[str]


class Finding(NamedTuple):
    """A bottleneck.

    Args:
        bottleneck: one of eight.
        phase: the part of a round that takes long; empty if it is none of them.
        rank: the rank that causes it; None if all are alike.
        effect: share of a round that it costs, 0 to 1.
        first_step, last_step: the steps of the records that show it.
        text: one sentence with the numbers.
        advice: what to do.
    """

    bottleneck: Bottleneck
    phase: str
    rank: int | None
    effect: float
    first_step: int
    last_step: int
    text: str
    advice: str

    @property
    def sentence(self) -> str:
        """The text with the records that it cites, and the advice."""
        advice = self.advice[:1].upper() + self.advice[1:]
        return f"{self.text} (records of steps {self.first_step} to {self.last_step}). {advice}."


def diagnose(records: Sequence[Record], host: HostFacts | None = None) -> list[Finding]:
    """Return the bottlenecks in the last start of a run, the largest effect first.

    Args:
        records: of the run, in the order in which they were written.
        host: of the run; None if it is not known, then nothing is said about threads and number formats.
    """
    starts = [i for i, record in enumerate(records) if record["event"] == "run"]
    records = records[starts[-1] :] if starts else records
    rounds = _RankRounds.from_records(records)
    if rounds is None:
        return []
    start = records[0] if starts else {}
    found = [
        *_find_slow_rank(rounds),
        *_find_slow_link(rounds, records),
        *_find_slow_data(rounds),
        *_find_small_batch(rounds),
        *_find_memory_pressure(rounds, records),
    ]
    if host is not None and start.get("devices") == "cpu":
        found += [*_find_thread_count(rounds, start, host), *_find_precision(rounds, start, host)]
    if any(finding.bottleneck == "small batch" for finding in found):
        # A message of a few bytes takes long on any link, and its time is part of the overhead.
        found = [
            finding for finding in found if finding.bottleneck != "slow link" or finding.rank is not None
        ]
    return sorted(found, key=lambda finding: -finding.effect)


def read_host_facts(start: Record) -> HostFacts | None:
    """Return the facts about this host if it is that of a run, see the record `run`; else None."""
    if start.get("host") != socket.gethostname():
        return None
    flags: frozenset[str] = frozenset()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, _, words = line.partition(":")
            if name.strip().lower() in ("flags", "features"):
                flags = frozenset(words.split())
                break
    return HostFacts(os.cpu_count() or 1, flags)


class _RankRounds:
    """Seconds of a round by rank, window and part.

    Args:
        windows: for each window the record of each rank, in the order of ranks.
    """

    def __init__(self, windows: Sequence[Mapping[int, Record]]) -> None:
        self.ranks = sorted(windows[0])
        self.first_step = min(r["step"] - r["rounds"] + 1 for r in windows[0].values())
        self.last_step = max(r["step"] for r in windows[-1].values())
        self.num_windows = len(windows)
        by_window = [{rank: _parts_of(window[rank]) for rank in self.ranks} for window in windows]
        for parts in map(dict.values, by_window):
            # Whoever arrives last waits for nobody, so the links took no longer than its collectives.
            shortest = min(part["exposed"] for part in parts)
            for part in parts:
                part["transfer"] = min(part["exposed"] - part["waiting"], shortest)
                part["waiting"] = part["exposed"] - part["transfer"]
        self.parts = {rank: [parts[rank] for parts in by_window] for rank in self.ranks}
        self.sent_bytes = median(r["sent_bytes"] / r["rounds"] for w in windows for r in w.values())
        self.round_seconds = median(self.values(self.ranks[0], "round"))

    @staticmethod
    def from_records(records: Sequence[Record]) -> _RankRounds | None:
        """Return the newest windows that have all ranks; None if there are too few."""
        windows: list[dict[int, Record]] = []
        for record in records:
            if record["event"] == "ranks":
                if not windows or record["rank"] in windows[-1]:
                    windows.append({})
                windows[-1][record["rank"]] = record
        num_ranks = max(map(len, windows), default=0)
        whole = [window for window in windows if len(window) == num_ranks]
        whole = whole[1:] if len(whole) > _MIN_WINDOWS else whole  # the first one has compilation
        return _RankRounds(whole[-_MAX_WINDOWS:]) if len(whole) >= _MIN_WINDOWS else None

    def values(self, rank: int, *names: str) -> list[float]:
        """Return the sum of some parts in each window."""
        return [sum(parts[name] for name in names) for parts in self.parts[rank]]

    def mean(self, *names: str) -> float:
        """Return the sum of some parts, as the median over windows and ranks."""
        return median(value for rank in self.ranks for value in self.values(rank, *names))

    def share(self, *names: str) -> float:
        """Return the same as a fraction of a round."""
        return self.mean(*names) / self.round_seconds if self.round_seconds > 0 else 0.0

    def excess(self, rank: int, *names: str) -> list[float]:
        """Return by how much a rank exceeds the median of the others in each window."""
        others = zip(*(self.values(other, *names) for other in self.ranks if other != rank), strict=True)
        own = self.values(rank, *names)
        return [value - median(rest) for value, rest in zip(own, others, strict=True)]

    def finding(
        self,
        bottleneck: Bottleneck,
        effect: float,
        text: str,
        advice: str,
        phase: str = "",
        rank: int | None = None,
    ) -> Finding:
        """Return a finding of these windows."""
        return Finding(bottleneck, phase, rank, effect, self.first_step, self.last_step, text, advice)


def _parts_of(record: Record) -> dict[str, float]:
    """Return seconds of a round: all local parts, exposed, waiting, cpu and round."""
    rounds, phases = record["rounds"], record["phases"]
    communication = phases["communication"]
    exposed = float(record.get("exposed_seconds", communication))
    parts: dict[str, float] = {phase: phases[phase] for phase in PHASES if phase != "communication"}
    # Collectives inside forward and backward, as of tensor parallelism, are no work of this rank.
    inside = max(0.0, exposed - communication)
    compute = parts["forward"] + parts["backward"]
    for phase in ("forward", "backward"):
        parts[phase] -= min(1.0, inside / compute) * parts[phase] if compute > 0 else 0.0
    parts["encoding"] = max(0.0, communication - exposed)
    parts["other"] = max(0.0, record["seconds"] - sum(phases[phase] for phase in PHASES))
    parts["exposed"], parts["waiting"] = exposed, min(record["waiting_seconds"], exposed)
    parts["cpu"], parts["round"] = record["cpu_seconds"], record["seconds"]
    return {name: seconds / rounds for name, seconds in parts.items()}


def _find_slow_rank(rounds: _RankRounds) -> Iterator[Finding]:
    if len(rounds.ranks) < 2 or rounds.round_seconds <= 0:
        return
    slowest = [
        max(rounds.ranks, key=lambda rank: rounds.values(rank, *_LOCAL)[w]) for w in range(rounds.num_windows)
    ]
    rank = max(rounds.ranks, key=slowest.count)
    excess = median(rounds.excess(rank, *_LOCAL))
    others_wait = -median(rounds.excess(rank, "exposed"))
    effect = excess / rounds.round_seconds
    if (
        effect < _MIN_EFFECT
        or slowest.count(rank) < _MIN_CONSISTENCY * rounds.num_windows
        or others_wait < _MIN_ARRIVAL * excess
    ):
        return
    by_part = {part: median(rounds.excess(rank, part)) for part in _LOCAL}
    part = max(by_part, key=lambda name: by_part[name])
    own = median(rounds.values(rank, part))
    usual = own - by_part[part]
    cpu = median(rounds.excess(rank, "cpu"))
    text = (
        f"Rank {rank} is slow in {part}: {format_duration(own)} a round, the others {format_duration(usual)};"
        f" they wait {format_duration(max(0.0, others_wait))} longer for it,"
        f" {format_percent(effect)} of a round"
    )
    is_computing = cpu >= _CPU_FRACTION * excess
    used = f"; it used the CPU for {format_duration(max(0.0, cpu))} of that"
    kind: Bottleneck = "straggler"
    advice = _ADVICE[part]
    if part == "data" and not is_computing:
        kind, text = "slow disk", text + used
    elif part != "data" and not is_computing:
        kind, text, advice = "lock", text + used, _ADVICE["lock"]
    yield rounds.finding(kind, effect, text, advice, part, rank)


def _find_slow_link(rounds: _RankRounds, records: Sequence[Record]) -> Iterator[Finding]:
    if len(rounds.ranks) < 2:
        return
    share = rounds.share("transfer")
    slow = _slow_round_trips(rounds, records) or _named_links(rounds, records)
    if slow is not None and share >= _MIN_EFFECT:
        rank, evidence = slow
        text = (
            f"The link of rank {rank} is slow: {evidence};"
            f" communication takes {format_percent(share)} of a round"
        )
        yield rounds.finding("slow link", share, text, _ADVICE["slow link"], "communication", rank)
    elif share >= _LARGE_SHARE:
        seconds = rounds.mean("transfer")
        rate = format_bytes(rounds.sent_bytes / seconds, decimal=True)
        text = (
            f"Communication takes {format_percent(share)} of a round on all ranks, without waiting for slower"
            f" ones: {format_bytes(rounds.sent_bytes)} in {format_duration(seconds)}, {rate} a second"
        )
        yield rounds.finding("slow link", share, text, _ADVICE["slow link"], "communication")


def _slow_round_trips(rounds: _RankRounds, records: Sequence[Record]) -> tuple[int, str] | None:
    """Return the rank whose fastest link is slower than those of all others."""
    times: dict[int, dict[str, list[float]]] = {}
    for record in records:
        if record["event"] == "process":
            for peer, seconds in record.get("link_round_trip_seconds", {}).items():
                times.setdefault(record.get("rank", 0), {}).setdefault(peer, []).append(float(seconds))
    # A rank beside a slow one has one slow link as well, but not only slow ones.
    fastest = {rank: min(map(median, peers.values())) for rank, peers in times.items() if peers}
    if len(fastest) < 3:
        return None
    rank = max(fastest, key=lambda other: fastest[other])
    usual = median(seconds for other, seconds in fastest.items() if other != rank)
    if fastest[rank] < max(_SLOW_ROUND_TRIP * usual, _MIN_ROUND_TRIP_SECONDS):
        return None
    own, rest = format_duration(fastest[rank]), format_duration(usual)
    return rank, f"its shortest round trip is {own}, that of the others {rest}"


def _named_links(rounds: _RankRounds, records: Sequence[Record]) -> tuple[int, str] | None:
    """Return the rank that the job's own probe of links has named."""
    for record in reversed(records):
        if record["event"] == "straggler" and record.get("cause") == "communication":
            if record["step"] < rounds.first_step:
                return None
            own, usual = format_duration(record["seconds"]), format_duration(record["usual"])
            return record[
                "rank"
            ], f"a message to it took {own}, to the others {usual} (step {record['step']})"
    return None


def _find_slow_data(rounds: _RankRounds) -> Iterator[Finding]:
    share = rounds.share("data")
    fastest = min(median(rounds.values(rank, "data")) for rank in rounds.ranks)
    if share < _LARGE_SHARE or fastest < _LARGE_SHARE / 2 * rounds.round_seconds:
        return
    busy = rounds.mean("cpu") / max(1e-12, rounds.round_seconds - rounds.mean("exposed"))
    cause = "the disk or the network is slow" if busy < 1 - share / 2 else "the samples take long to compute"
    text = (
        f"All ranks wait for data: {format_duration(rounds.mean('data'))} of a round"
        f" ({format_percent(share)}), with {busy:.2f} cores in use: {cause}"
    )
    advice = (
        "raise loader.workers and loader.prefetch, set loader.cache_bytes, or move the data to a faster disk"
    )
    yield rounds.finding("slow disk", share, text, advice, "data")


def _find_small_batch(rounds: _RankRounds) -> Iterator[Finding]:
    compute = rounds.mean("forward", "backward")
    working = rounds.round_seconds - rounds.mean("waiting")
    overhead = rounds.mean("transfer", "optimizer", "encoding", "other") / working if working > 0 else 0.0
    if overhead >= 0.5 and 0 < compute < _SMALL_ROUND_SECONDS:
        text = (
            f"The batch is small: forward and backward take {format_duration(compute)} of a round, and"
            f" {format_percent(overhead)} is work that does not depend on the number of samples"
        )
        yield rounds.finding("small batch", overhead, text, "raise batch.size, or use fewer processes")


def _find_memory_pressure(rounds: _RankRounds, records: Sequence[Record]) -> Iterator[Finding]:
    samples = [r for r in records if r["event"] == "system" and "memory_bytes" in r][-20:]
    tables = [sample["memory_bytes"] for sample in samples if sample["memory_bytes"].get("total")]
    if not tables:
        return
    available = median(float(table["available"]) / float(table["total"]) for table in tables)
    stalls = [
        float(s.get("stalled_seconds", {}).get("memory", 0.0)) / s["seconds"]
        for s in samples
        if s.get("seconds")
    ]
    stalled = median(stalls) if stalls else 0.0
    if available < 0.05 or stalled > 0.1:
        text = (
            f"The host is short of memory: {format_percent(available)} is available, and processes waited for"
            f" memory in {format_percent(stalled)} of the time"
        )
        advice = 'use smaller micro-batches (batch.accumulation), memory.recompute = "blocks" or zero=2'
        yield rounds.finding("memory pressure", max(stalled, _MIN_EFFECT), text, advice)


def _find_thread_count(rounds: _RankRounds, start: Record, host: HostFacts) -> Iterator[Finding]:
    threads, num_ranks = int(start.get("threads", 0)), len(rounds.ranks)
    share = rounds.share("forward", "backward", "optimizer")
    wanted, advice = (
        threads * num_ranks,
        f"set runtime.threads = {max(1, host.cores // num_ranks)}, or leave it out",
    )
    if threads > 0 and share >= _LARGE_SHARE and (wanted > 1.5 * host.cores or 2 * wanted <= host.cores):
        word = "more" if wanted > host.cores else "fewer"
        used = rounds.mean("cpu") / rounds.round_seconds
        text = (
            f"{num_ranks} ranks of {threads} threads are {word} than the {host.cores} cores of the host;"
            f" each rank uses {used:.2f} cores, and {format_percent(share)} of a round is computation"
        )
        yield rounds.finding("wrong thread count", share / 2, text, advice)


def _find_precision(rounds: _RankRounds, start: Record, host: HostFacts) -> Iterator[Finding]:
    name = str(start.get("precision", ""))
    supported = _MATRIX_FLAGS.get(name)
    if supported is not None and host.cpu_flags and not host.cpu_flags & supported:
        share = rounds.share("forward", "backward")
        text = (
            f"The CPU has no instructions for {name}, so PyTorch emulates it; forward and backward take"
            f" {format_percent(share)} of a round"
        )
        yield rounds.finding(
            "precision without CPU support", share / 2, text, 'set precision.compute = "fp32"'
        )
