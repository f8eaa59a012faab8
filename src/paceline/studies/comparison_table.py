"""A comparison as tables of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.studies.comparison import Compared, Comparison, nine_rows
from paceline.studies.summary import Spread

Column = tuple[str, str, Callable[[float], str]]


def _bytes(value: float) -> str:
    units = ("B", "kB", "MB", "GB", "TB")
    for unit in units:
        if abs(value) < 1000 or unit == units[-1]:
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def _plain(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


_COSTS: tuple[Column, ...] = (
    ("samples/s", "samples/s", _plain(3)),
    ("s a step", "ms a step", lambda value: f"{1000 * value:.3g}"),
    ("idle", "idle", lambda value: f"{100 * value:.0f} %"),
    ("bytes a sample", "bytes/sample", _bytes),
    ("staleness", "staleness", _plain(2)),
    ("oldest", "oldest", _plain(3)),
    ("memory", "memory", _bytes),
)
_TARGETS: tuple[Column, ...] = (
    ("samples to target", "samples to target", _plain(3)),
    ("s to target", "seconds", _plain(3)),
    ("bytes to target", "bytes", _bytes),
)


def learned(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Head and rows: what held-out samples say at the end, and what the target took."""
    finals = dict.fromkeys(name for row in found.rows for name in row.numbers if name.startswith("final "))
    columns = [(name, name.removeprefix("final "), _plain(4)) for name in finals]
    return _table(found, [*columns, *(_TARGETS if found.target is not None else ())])


def costs(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Head and rows: speed, idle share, bytes, staleness, memory, and recovery after a kill."""
    head, rows = _table(found, _COSTS)
    return [*head, "after a kill"], [
        [*cells, _after_kill(row)] for cells, row in zip(rows, found.rows, strict=True)
    ]


def nine(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the nine rows, one strategy a line."""
    base = found.rows[0].numbers.get("samples/s") if found.rows else None
    each = [nine_rows(row, base) for row in found.rows]
    head = ["strategy", *(each[0] if each else ())]
    return head, [[row.name, *cells.values()] for row, cells in zip(found.rows, each, strict=True)]


def render(found: Comparison) -> list[str]:
    """For a terminal: what was learned, what it cost, and what failed; means, ± over the seeds."""
    lines = [*_columns(*learned(found)), *_notes(found), "", *_columns(*costs(found))]
    for row in found.rows:
        lines += [f"failed: {row.name}: {why}" for why in row.failed]
    return lines


def _notes(found: Comparison) -> list[str]:
    runs = sorted({row.runs for row in found.rows})
    counts = " or ".join(map(str, runs))
    about = f"means of {counts} run{'s' if runs != [1] else ''} each, ± their standard deviation"
    if found.target is None:
        return [about]
    return [f"{about}; target: {found.target}, looked at whenever a run was evaluated"]


def _table(found: Comparison, columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    shown = [column for column in columns if any(column[0] in row.numbers for row in found.rows)]
    rows = [[row.name, *(_cell(row.numbers.get(name), say) for name, _, say in shown)] for row in found.rows]
    return ["strategy", *(title for _, title, _ in shown)], rows


def _cell(found: Spread | None, say: Callable[[float], str]) -> str:
    if found is None:
        return "-"
    return say(found.mean) + (f" ±{say(found.deviation)}" if found.deviation else "")


def _after_kill(row: Compared) -> str:
    if not row.recovery:
        return "-"
    seconds, again = row.recovery_seconds, max(one.steps_again for one in row.recovery)
    took = "" if seconds is None else " " + _cell(seconds, lambda value: f"{value:.1f}") + " s"
    return f"{row.recovery[0].how}{took}" + (f", {again} steps again" if again else "")


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
