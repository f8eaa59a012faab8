"""The comparison of codecs on one task with steps that are run at three bandwidths in the lab, without torch.

For each bandwidth, hosts with links of this rate run `paceline bench comm --recipe` as one job. The times are
those of its training steps; beside them is what `codec=auto` expects from its measurements on the same link.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.errors import LabError
from paceline.lab.topology import Links
from paceline.lab.virtual_cluster import Lab

BANDWIDTHS = (1e9, 1e8, 1e7)
"""Bits per second of the links."""

CodecRows = Sequence[Mapping[str, Any]]
"""The records of a comparison, one for each codec, see `CodecComparison.record`."""


def compare_codecs_in_lab(
    command: Sequence[str], num_hosts: int, log: Callable[[str], object] = lambda text: None
) -> dict[float, CodecRows]:
    """Run a comparison on hosts with links of each of `BANDWIDTHS`, one after the other.

    Args:
        command: a `paceline bench comm --recipe` with `--json`, as a user types it on one machine.
        num_hosts: number of hosts, each with an equal part of the processes.
        log: receives each line of the hosts that is not a result.
    Returns:
        By bandwidth the rows of the comparison.
    Raises:
        LabError: the system allows no lab, or the job failed.
    """
    found: dict[float, CodecRows] = {}
    for bandwidth in BANDWIDTHS:
        with Lab(hosts=num_hosts, links=Links(rate=f"{bandwidth / 1e6:.0f}mbit")) as lab:
            outcome = lab.run(command)
            first = outcome.output[lab.hosts[0]]
        if outcome.exit_code:
            raise LabError(
                f"the comparison failed at {bandwidth / 1e6:.0f} Mbit/s: exit code {outcome.exit_code}",
                next_step="read the lines of the hosts: " + " | ".join(first[-5:]),
            )
        found[bandwidth] = _parse_rows(first)
        log(f"{bandwidth / 1e6:.0f} Mbit/s: {outcome.seconds:.0f} s")
    return found


def _parse_rows(lines: Sequence[str]) -> CodecRows:
    """Return the JSON array among the lines of a host."""
    begin, end = lines.index("["), len(lines) - lines[::-1].index("]")
    rows: CodecRows = json.loads("\n".join(lines[begin:end]))
    return rows


def render_lab_table(found: Mapping[float, CodecRows]) -> Iterator[str]:
    """Yield the lines of a table: for each codec the measured and expected step at each bandwidth."""
    tables = [{row["codec"]: row for row in rows} for rows in found.values()]
    yield f"{'':<18}{'':>8}{'':>9}" + "".join(f"{f'ms at {bits / 1e6:.0f} Mbit/s':>22}" for bits in found)
    yield f"{'codec':<18}{'ratio':>8}{'gap':>9}" + f"{'measured':>12}{'expected':>10}" * len(tables)
    for codec, first in tables[0].items():
        times = "".join(
            f"{table[codec]['measured_seconds'] * 1e3:>12.1f}{table[codec]['expected_seconds'] * 1e3:>10.1f}"
            for table in tables
        )
        yield f"{codec:<18}{first['ratio']:>8.1f}{first['gap']:>+9.2%}{times}"
