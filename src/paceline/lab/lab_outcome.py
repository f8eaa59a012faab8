"""What `lab run` prints at the end. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.lab.network import FRAME_BYTES, PAYLOAD_BYTES
from paceline.lab.utilization import LinkTraffic


@dataclass(frozen=True)
class LabOutcome:
    """What became of a job in the lab.

    Args:
        exit_codes: by host; negative: the signal that ended its command.
        seconds: from the start of the commands to the end of the last one.
        traffic: by host and rack, what went over its link while the job ran.
        output: by host, the lines that its command wrote.
        events: what the fault plan did, in order; see `FaultPlan`.
        remarks: what the summary says besides.
        ledger_bytes: what all ranks sent in collectives, by their own count; None: the job wrote no metrics.
        forced: hosts whose command had to be ended.
    """

    exit_codes: Mapping[str, int]
    seconds: float
    traffic: Mapping[str, LinkTraffic]
    output: Mapping[str, Sequence[str]]
    events: Sequence[Mapping[str, object]] = ()
    remarks: Sequence[str] = ()
    ledger_bytes: float | None = None
    forced: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """0 if all went well; else that of the first host, in their order, that failed; 128 + signal."""
        codes = [code if code >= 0 else 128 - code for code in self.exit_codes.values()]
        return next((code for code in codes if code), 0)

    @property
    def summary(self) -> str:
        """For people, with a line end."""
        return "".join(f"{line}\n" for line in render_outcome(self))


def render_outcome(found: LabOutcome) -> list[str]:
    """The lines of the summary."""
    killed = {str(host) for event in found.events if event["fault"] == "kill" for host in _event_hosts(event)}
    lines = [
        f"lab: {len(found.exit_codes)} hosts, {found.seconds:.1f} s",
        f"{'link':<10}{'exit':>6}{'up':>14}{'down':>14}{'dropped':>9}",
    ]
    for name, traffic in found.traffic.items():
        code = found.exit_codes.get(name)
        note = "  killed by the fault plan" if name in killed else ""
        note += "  did not end and was killed" if name in found.forced else ""
        lines.append(
            f"{name:<10}{'' if code is None else code:>6}{format_size(traffic.up.num_bytes):>14}"
            f"{format_size(traffic.down.num_bytes):>14}{traffic.up.dropped + traffic.down.dropped:>9}{note}"
        )
    lines += _render_wire_bytes(found)
    lines += [f"fault: {render_event(event)}" for event in found.events]
    return [*lines, *found.remarks]


def _event_hosts(event: Mapping[str, object]) -> list[object]:
    hosts = event["hosts"]
    return list(hosts) if isinstance(hosts, Sequence) else []


def _render_wire_bytes(found: LabOutcome) -> list[str]:
    """The ledger's own count beside the kernel's."""
    share = (FRAME_BYTES - PAYLOAD_BYTES) / FRAME_BYTES
    headers = FRAME_BYTES - PAYLOAD_BYTES
    about = f"Ethernet, IP and TCP headers are {headers} of {FRAME_BYTES} bytes of a full frame ({share:.1%})"
    hosts = [found.traffic[name] for name in found.exit_codes if name in found.traffic]
    if found.ledger_bytes is None or not hosts:
        return [f"bytes are the kernel's, on the wire: {about}"]
    wire = sum(traffic.up.num_bytes for traffic in hosts)
    ledger = found.ledger_bytes
    more = f"{wire / ledger - 1:.1%} more" if ledger else "the ledger has none"
    return [
        f"wire: {format_size(wire)} up in all, the byte ledger {format_size(ledger)} ({more})",
        f"  {about}; the rest is acknowledgements, the store and the connections",
    ]


def render_event(event: Mapping[str, object]) -> str:
    """One line for an event of the fault plan."""
    hosts = ",".join(str(host) for host in _event_hosts(event))
    rest = " ".join(f"{key}={value}" for key, value in event.items() if key not in ("fault", "hosts", "when"))
    return f"{event['fault']} {hosts} at {event['when']}" + (f" ({rest})" if rest else "")


def format_size(num_bytes: float) -> str:
    """Bytes for people, in powers of 1,000."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
