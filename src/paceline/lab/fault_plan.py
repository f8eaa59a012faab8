"""Fault plans: faults with their hosts and triggers, as values. Pure.

Invariant: a plan and its seed determine everything but the clock: the steps that a probability triggers, the
byte and bit of a file that change, the tensor and element that become NaN. The same plan on the same job
writes the same event log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.errors import RecipeError
from paceline.lab.topology import parse_duration_seconds, parse_fraction, parse_rate_bits
from paceline.state.keys import key

HostNames = str | Sequence[str]


@dataclass(frozen=True)
class FaultSpec:
    """A fault of a plan, with exactly one of the triggers `step`, `at` and `probability`.

    Args:
        kind: the name of the method of `FaultPlan` that made it.
        hosts: the hosts that it affects; triggers count the steps of the first one.
        others: the other side of a partition.
        step: triggers after this many optimizer steps of the running job on that host.
        at: triggers this many seconds after the start of the job.
        probability: triggers after each step with this probability.
        seconds: duration; None for the rest of the job.
        value: factor of a slowdown; rate, latency or loss of a link.
        path: a file as the host sees it; with wildcards, the newest match.
        process: the only process that it affects: "launcher", or a rank as in "rank1"; empty: all of a host.
    """

    kind: str
    hosts: tuple[str, ...]
    others: tuple[str, ...] = ()
    step: int | None = None
    at: float | None = None
    probability: float | None = None
    seconds: float | None = None
    value: float | str | None = None
    path: str = ""
    process: str = ""

    def __post_init__(self) -> None:
        triggers = [t for t in (self.step, self.at, self.probability) if t is not None]
        rules = {
            "needs one of step, at and probability": len(triggers) == 1,
            "has a negative time or step": all(t >= 0 for t in (*triggers, self.seconds or 0)),
            "has a probability above 1": (self.probability or 0) <= 1,
            "names no host": bool(self.hosts),
            'has a process other than "launcher" or a rank such as "rank1"': self.process in ("", "launcher")
            or re.fullmatch(r"rank\d+", self.process) is not None,
            "has hosts on both sides of a partition": not set(self.hosts) & set(self.others),
            "needs step or probability, because it happens inside a worker": self.kind != "nan"
            or self.at is None,
        }
        for problem, holds in rules.items():
            if not holds:
                raise RecipeError(
                    f"the fault '{self.kind}' {problem}", next_step='for example kill("h2", step=3)'
                )


@dataclass(frozen=True)
class FaultPlan:
    """An immutable list of faults; every method returns a plan with one fault more.

        FaultPlan(seed=1).kill("h2", step=3).partition(["h0"], ["h1", "h2"], at=5.0).slow("h3", 3.0, at=1.0)

    Every method takes one of the triggers `step`, `at` (seconds) and `probability` (after each step).
    """

    seed: int = 0
    faults: tuple[FaultSpec, ...] = ()

    def kill(self, host: str, *, process: str = "", **trigger: Any) -> FaultPlan:
        """Send SIGKILL to every process of a host, as a power cut would, or to one.

        Args:
            process: "launcher", or a rank as in "rank1"; empty: all.
        """
        return self._and("kill", host, process=process, **trigger)

    def stop(self, host: str, *, seconds: float, process: str = "", **trigger: Any) -> FaultPlan:
        """Send SIGSTOP to every process of a host or to one, and SIGCONT after `seconds`.

        The kernel of the host still answers.

        Args:
            process: as in `kill`.
        """
        return self._and("stop", host, seconds=seconds, process=process, **trigger)

    def slow(self, host: str, factor: float, *, seconds: float | None = None, **trigger: Any) -> FaultPlan:
        """Let the processes of a host run one `factor`-th of the time, in slices of 30 ms."""
        if factor <= 1:
            raise RecipeError(
                f"expected a slowdown factor above 1, found {factor:g}",
                next_step='for example slow("h2", 3.0, step=3)',
            )
        return self._and("slow", host, value=factor, seconds=seconds, **trigger)

    def link_down(self, host: str, *, seconds: float | None = None, **trigger: Any) -> FaultPlan:
        """Cut the link of a host; the host sees that it has no carrier."""
        return self._and("link_down", host, seconds=seconds, **trigger)

    def partition(
        self, one: HostNames, other: HostNames, *, seconds: float | None = None, **trigger: Any
    ) -> FaultPlan:
        """Drop all frames between two groups of hosts, silently and in both directions."""
        return self._and("partition", one, others=_host_names(other), seconds=seconds, **trigger)

    def rate(self, host: str, rate: str, *, seconds: float | None = None, **trigger: Any) -> FaultPlan:
        """Change the rate of the link of a host (or of the uplink of a rack) in both directions."""
        parse_rate_bits(rate)
        return self._and("rate", host, value=rate, seconds=seconds, **trigger)

    def delay(self, host: str, latency: str, *, seconds: float | None = None, **trigger: Any) -> FaultPlan:
        """Change the latency of frames that leave a host (or a rack)."""
        parse_duration_seconds(latency)
        return self._and("delay", host, value=latency, seconds=seconds, **trigger)

    def drop(self, host: str, loss: str, *, seconds: float | None = None, **trigger: Any) -> FaultPlan:
        """Lose a fraction such as "5%" of the frames that leave a host (or a rack)."""
        parse_fraction(loss)
        return self._and("drop", host, value=loss, seconds=seconds, **trigger)

    def disk_full(self, host: str, *, seconds: float | None = None, **trigger: Any) -> FaultPlan:
        """Fill the host's own disk (`Lab(disk=...)`): the next write fails with ENOSPC."""
        return self._and("disk_full", host, seconds=seconds, **trigger)

    def torn_write(self, host: str, path: str, **trigger: Any) -> FaultPlan:
        """Truncate a file at a random length, as a power cut does to a file that was not synced."""
        return self._and("torn_write", host, path=path, **trigger)

    def corrupt(self, host: str, path: str, **trigger: Any) -> FaultPlan:
        """Flip one bit of a file."""
        return self._and("corrupt", host, path=path, **trigger)

    def nan(self, host: str, **trigger: Any) -> FaultPlan:
        """Write a NaN into one element of one parameter, in the memory of a host's first worker."""
        return self._and("nan", host, **trigger)

    def _and(self, kind: str, hosts: HostNames, **values: Any) -> FaultPlan:
        return replace(self, faults=(*self.faults, FaultSpec(kind, _host_names(hosts), **values)))

    def due(self, host: str, step: int) -> tuple[int, ...]:
        """Return the indices of the faults that this step of this host triggers."""
        return tuple(
            i
            for i, fault in enumerate(self.faults)
            if fault.hosts[0] == host and self._is_triggered(i, fault, step)
        )

    def _is_triggered(self, index: int, fault: FaultSpec, step: int) -> bool:
        if fault.probability is not None:
            return self.draw(index, step, 1 << 32) < fault.probability * (1 << 32)
        return fault.step == step

    def draw(self, index: int, step: int, end: int, *purpose: str) -> int:
        """Return a number in [0, end) for a fault at a step, or -1 if triggered by time; always the same."""
        return key(self.seed, "fault", index, step, *purpose) % end

    def invalid_targets(self, hosts: Sequence[str], racks: Sequence[str]) -> list[str]:
        """Return the names that do not exist, or that are racks where only a host makes sense.

        A rack has an uplink, but neither processes nor steps.
        """
        links = {*hosts, *racks}
        return [
            name
            for fault in self.faults
            for name in (*fault.hosts, *fault.others)
            if name not in (links if fault.kind in _LINK_KINDS and fault.at is not None else hosts)
        ]

    def to_json(self) -> str:
        """Return the plan as text for `from_json`."""
        return json.dumps({"seed": self.seed, "faults": [asdict(fault) for fault in self.faults]})

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """Return the plan that `to_json` wrote."""
        record = json.loads(text)
        faults = [
            FaultSpec(**{**f, "hosts": tuple(f["hosts"]), "others": tuple(f["others"])})
            for f in record["faults"]
        ]
        return cls(record["seed"], tuple(faults))

    @classmethod
    def parse(cls, texts: Sequence[str], seed: int = 0) -> FaultPlan:
        """Parse texts such as "kill h2 step=3", "partition h0 h1,h2 at=5" or "slow h3 3 probability=0.1".

        Raises:
            RecipeError: the fault is unknown, or its arguments are wrong.
        """
        plan = cls(seed)
        for text in texts:
            plan = _append_fault(plan, text)
        return plan


def _append_fault(plan: FaultPlan, text: str) -> FaultPlan:
    kind, *words = text.split()
    options = dict(word.split("=", 1) for word in words if "=" in word)
    if kind not in FAULT_KINDS:
        raise RecipeError(
            f"unknown fault '{kind}'", where=text, next_step=f"one of: {', '.join(FAULT_KINDS)}"
        )
    method: Callable[..., FaultPlan] = getattr(plan, kind)
    reads = _POSITIONAL_PARSERS.get(kind, (str, str))
    try:
        values = [read(word) for read, word in zip(reads, _positional_words(words), strict=False)]
        return method(*values, **{name: _OPTION_PARSERS[name](value) for name, value in options.items()})
    except (TypeError, ValueError, KeyError) as error:
        raise RecipeError(
            f"'{text}' is not a valid fault: {error}", next_step='for example "kill h2 step=3"'
        ) from error


def _positional_words(words: Sequence[str]) -> list[str]:
    positional = [word for word in words if "=" not in word]
    if len(positional) > 2:
        raise ValueError(f"unexpected argument {positional[2]}")
    return positional


def _parse_host_group(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


_POSITIONAL_PARSERS: Mapping[str, tuple[Callable[[str], Any], ...]] = {
    "partition": (_parse_host_group, _parse_host_group),
    "slow": (str, float),
}
_OPTION_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "step": int,
    "at": float,
    "probability": float,
    "seconds": float,
    "process": str,
}


_LINK_KINDS = ("rate", "delay", "drop")
FAULT_KINDS = (
    "kill", "stop", "slow", "link_down", "partition", "rate", "delay", "drop", "disk_full", "torn_write",
    "corrupt", "nan",
)  # fmt: skip


def _host_names(hosts: HostNames) -> tuple[str, ...]:
    return (hosts,) if isinstance(hosts, str) else tuple(hosts)
