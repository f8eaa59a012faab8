"""What `paceline bench comm` measured, as one page that needs nothing else: a plot and the table."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from paceline.training.comm_benchmark import Row

_WIDTH, _HEIGHT, _MARGIN = 760, 380, 56
_COLOURS = ("#1f5fa8", "#b4451f", "#2d7d46", "#7a3e9d", "#8a6d1a", "#0f7c86", "#a3275f", "#555555")
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;max-width:70rem;color:#222;background:#fff}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem .7rem}"
    "td,th{text-align:right;border-bottom:1px solid #ddd}svg text{font:12px sans-serif}"
    "td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}"
)


def render_page(rows: Sequence[Row], title: str) -> str:
    """The page as HTML."""
    heads = (
        "route",
        "codec",
        "bytes",
        "ms",
        "algbw Mbit/s",
        "busbw Mbit/s",
        "sent bytes",
        "error",
        "cpu ms",
        "pays below",
    )
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(_line(row) for row in rows)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>{_plot(rows)}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></html>\n"
    )


def _line(row: Row) -> str:
    pays = f"{row.break_even / 1e6:.0f} Mbit/s" if row.break_even else "" if row.codec == "fp32" else "never"
    cells = (
        html.escape(row.route),
        html.escape(row.codec),
        f"{row.num_bytes:,}",
        f"{row.seconds * 1e3:.3f}",
        f"{row.algbw / 1e6:.1f}",
        f"{row.busbw / 1e6:.1f}",
        f"{row.sent_bytes:,.0f}",
        f"{row.error:.1e}",
        f"{row.processor_seconds * 1e3:.3f}",
        pays,
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _plot(rows: Sequence[Row]) -> str:
    """Time against size, both by powers of ten; a line for each route and codec."""
    xs, ys = [math.log10(row.num_bytes) for row in rows], [math.log10(row.seconds) for row in rows]
    low, high = (min(xs), min(ys)), (max(xs), max(ys))

    def place(row: Row) -> str:
        spans = [max(1e-9, high[k] - low[k]) for k in (0, 1)]
        x = _MARGIN + (math.log10(row.num_bytes) - low[0]) / spans[0] * (_WIDTH - 4 * _MARGIN)
        y = _HEIGHT - _MARGIN - (math.log10(row.seconds) - low[1]) / spans[1] * (_HEIGHT - 2 * _MARGIN)
        return f"{x:.1f},{y:.1f}"

    names = list(dict.fromkeys((row.route, row.codec) for row in rows))
    parts = []
    for number, name in enumerate(names):
        points = " ".join(place(row) for row in rows if (row.route, row.codec) == name)
        colour, dash = (
            _COLOURS[number % len(_COLOURS)],
            ' stroke-dasharray="5 3"' if number >= len(_COLOURS) else "",
        )
        label = html.escape(name[0] if name[1] == "fp32" else name[1])
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(
            f'<text x="{_WIDTH - 2.8 * _MARGIN:.0f}" y="{20 + 18 * number}" fill="{colour}">{label}</text>'
        )
    axes = _axes(10 ** low[0], 10 ** high[0], 1e3 * 10 ** low[1], 1e3 * 10 ** high[1])
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">{axes}{"".join(parts)}</svg>'


def _axes(least: float, most: float, fastest: float, slowest: float) -> str:
    """The ends of both axes, in bytes and milliseconds."""
    return (
        f'<text x="{_MARGIN}" y="{_HEIGHT - 16}">{least:,.0f} bytes</text>'
        f'<text x="{_WIDTH - 5 * _MARGIN}" y="{_HEIGHT - 16}">{most:,.0f} bytes</text>'
        f'<text x="4" y="{_HEIGHT - _MARGIN}">{fastest:.2f} ms</text>'
        f'<text x="4" y="{_MARGIN}">{slowest:.2f} ms</text>'
    )
