"""The outcome of a job in the lab, and the summary that `lab run` prints at the end. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import format_count
from paceline.lab.network import FRAME_BYTES, PAYLOAD_BYTES
from paceline.lab.utilization import LinkTraffic
from paceline.report.number_format import format_bytes


@dataclass(frozen=True)
class LabOutcome:
    """The outcome of a job in the lab.

    Args:
        exit_codes: exit code of the command by host; negative for the signal that ended it.
        seconds: from the start of the commands to the end of the last one.
        traffic: traffic on the link of each host and rack while the job ran.
        output: lines that the command wrote, by host.
        events: log of the fault plan, in order.
        remarks: further lines of the summary.
        ledger_bytes: bytes that all ranks sent in collectives, by their ledgers; None without metrics.
        forced: hosts whose command had to be killed.
        signal: the first signal that this process received meanwhile, which stopped the commands; 0: none.
    """

    exit_codes: Mapping[str, int]
    seconds: float
    traffic: Mapping[str, LinkTraffic]
    output: Mapping[str, Sequence[str]]
    events: Sequence[Mapping[str, object]] = ()
    remarks: Sequence[str] = ()
    ledger_bytes: float | None = None
    forced: Sequence[str] = ()
    signal: int = 0

    @property
    def exit_code(self) -> int:
        """0 if no command failed; else the code of the first host that failed, 128 + signal for a signal."""
        codes = [code if code >= 0 else 128 - code for code in self.exit_codes.values()]
        return next((code for code in codes if code), 0)

    @property
    def summary(self) -> str:
        """The summary as text that ends with a newline."""
        return "".join(f"{line}\n" for line in render_outcome(self))


def render_outcome(outcome: LabOutcome) -> list[str]:
    """Return the lines of the summary."""
    killed = {
        str(host) for event in outcome.events if event["fault"] == "kill" for host in _event_hosts(event)
    }
    lines = [
        f"lab: {format_count(len(outcome.exit_codes), 'host')}, {outcome.seconds:.1f} s",
        f"{'link':<10}{'exit':>6}{'up':>14}{'down':>14}{'dropped':>9}",
    ]
    for name, traffic in outcome.traffic.items():
        code = outcome.exit_codes.get(name)
        note = "  killed by the fault plan" if name in killed else ""
        note += "  did not end and was killed" if name in outcome.forced else ""
        lines.append(
            f"{name:<10}{'' if code is None else code:>6}{_size(traffic.up.num_bytes):>14}"
            f"{_size(traffic.down.num_bytes):>14}{traffic.up.dropped + traffic.down.dropped:>9}{note}"
        )
    lines += _render_wire_bytes(outcome)
    lines += [f"fault: {render_event(event)}" for event in outcome.events]
    return [*lines, *outcome.remarks]


def _event_hosts(event: Mapping[str, object]) -> list[object]:
    hosts = event["hosts"]
    return list(hosts) if isinstance(hosts, Sequence) else []


def _render_wire_bytes(outcome: LabOutcome) -> list[str]:
    """Compare the bytes of the ledgers with those of the kernel."""
    share = (FRAME_BYTES - PAYLOAD_BYTES) / FRAME_BYTES
    headers = FRAME_BYTES - PAYLOAD_BYTES
    about = (
        f"Ethernet, IP and TCP headers are {headers} of the {FRAME_BYTES} bytes of a full frame ({share:.1%})"
    )
    hosts = [outcome.traffic[name] for name in outcome.exit_codes if name in outcome.traffic]
    if outcome.ledger_bytes is None or not hosts:
        return [f"bytes are counted on the wire by the kernel: {about}"]
    wire = sum(traffic.up.num_bytes for traffic in hosts)
    ledger = outcome.ledger_bytes
    more = f"the wire has {wire / ledger - 1:.1%} more" if ledger else "the ledger is empty"
    return [
        f"wire: {_size(wire)} sent by all hosts; byte ledger: {_size(ledger)} ({more})",
        f"  {about}; the remainder is acknowledgements, the store and connections",
    ]


def render_event(event: Mapping[str, object]) -> str:
    """Return one line for an event of the fault plan."""
    hosts = ",".join(str(host) for host in _event_hosts(event))
    details = " ".join(
        f"{key}={value}" for key, value in event.items() if key not in ("fault", "hosts", "when")
    )
    return f"{event['fault']} {hosts} at {event['when']}" + (f" ({details})" if details else "")


def _size(num_bytes: float) -> str:
    return format_bytes(num_bytes, decimal=True)
