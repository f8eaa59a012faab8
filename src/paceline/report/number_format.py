"""Formats numbers for people: counts, bytes, durations and percentages. Pure; all commands share it."""

from __future__ import annotations

import math


def format_number(value: float | None, digits: int = 4) -> str:
    """Return a number with at most `digits` significant digits; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text and abs(value) < 1e15 else text


def format_bytes(value: float, *, decimal: bool = False) -> str:
    """Return a size in the largest unit that does not exceed it.

    Args:
        value: bytes.
        decimal: units are powers of 1,000 (kB, MB, GB), as links are measured, and not of 1,024.
    """
    base, units = (1000, ("B", "kB", "MB", "GB")) if decimal else (1024, ("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if abs(value) < base:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= base
    return f"{value:.3g} {'TB' if decimal else 'TiB'}"


def format_duration(seconds: float | None) -> str:
    """Return a duration such as "12.3 ms", "59 s", "1 min 01 s" or "1 h 02 min"; a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole_seconds:02d} s"


def format_percent(fraction: float) -> str:
    """Return a fraction as a percentage, with one decimal below 10 %."""
    return f"{100 * fraction:.0f} %" if fraction >= 0.1 else f"{100 * fraction:.1f} %"
