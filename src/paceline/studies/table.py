"""A sweep as text."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.studies.critical_batch import CriticalBatch
from paceline.studies.summary import Row, Spread, Summary


def render_table(summary: Summary) -> list[str]:
    """The rows in columns, then what they show, then what failed."""
    rows = summary.rows
    words = list(rows[0].values) if rows else []
    names = list(dict.fromkeys(name for row in rows for name in row.numbers))
    cells = [[*words, *(["runs"] if any(row.runs > 1 for row in rows) else []), *names]]
    cells += [_cells(row, words, names, "runs" in cells[0]) for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))] if rows else []
    lines = ["  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in cells if rows]
    if summary.target is not None:
        lines.append(f"target: {summary.target}, looked at whenever a run was evaluated")
    for values, found in summary.critical:
        lines += _about(values, found)
    return lines + [f"failed: {label}: {why}" for label, why in summary.failed.items()]


def _cells(row: Row, words: list[str], names: list[str], runs: bool) -> list[str]:
    numbers = [_number(row.numbers.get(name), name) for name in names]
    return [*(row.values[word] for word in words), *([str(row.runs)] if runs else []), *numbers]


def _number(found: Spread | None, name: str) -> str:
    if found is None:
        return "-"
    whole = name == "steps" or "to target" in name or abs(found.mean) >= 1000
    spell = "{:.0f}".format if whole else "{:.4g}".format
    spread = f" ±{found.deviation:.0f}" if whole else f" ±{found.deviation:.2g}"
    return spell(found.mean) + (spread if found.deviation else "")


def _about(values: Mapping[str, str], found: CriticalBatch) -> list[str]:
    where = " ".join(f"{word}={value}" for word, value in values.items())
    saved = ", ".join(f"{a} to {b}: {ratio:.2f} of {b / a:.2g}" for a, b, ratio in found.savings)
    lines = [f"steps saved by larger batches{' with ' + where if where else ''}: {saved}"]
    if found.batch is None:
        return [*lines, "  critical batch: beyond the largest one; steps fall as fast as the batch grows"]
    low = f"fewest steps {found.fewest_steps:.0f}"
    return [*lines, f"  critical batch: about {found.batch:.0f} samples ({low}); beyond it returns diminish"]
