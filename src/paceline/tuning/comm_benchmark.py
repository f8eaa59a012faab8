"""Measure all routes and codecs over buffer sizes for `paceline bench comm`; render a table and a page.

All ranks measure together, one combination after another; a time is the median over repeats of the slowest
rank. The break-even bandwidth of a codec follows from its bytes and its CPU time: on slower links the
codec pays. The page is one HTML file without scripts or external resources. `codec_choice` measures single
combinations with it.
"""

from __future__ import annotations

import html
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from paceline.comm.codecs.strategy_codec import build_coded_collective
from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.net import Net
from paceline.comm.routes.route_context import RouteContext
from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup, duplicate_group
from paceline.recipe.registry import RouteSpec, known_specs
from paceline.recipe.registry.route_specs import NATIVE_ROUTE
from paceline.recipe.strategy import Strategy

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)
CODECS = (
    "bf16",
    "int8",
    "int4",
    "sign",
    "topk:0.01",
    "topk:0.01+int4",
    "randomk:0.01",
    "lowrank:2",
    "lossless",
)
_REPEATS = 5


@dataclass(frozen=True)
class AllReduceTiming:
    """Measured all_reduce of one buffer by one route and codec.

    Args:
        num_bytes: size of the float32 tensor of each rank.
        seconds: of the slowest rank, median over repeats.
        sent_bytes: mean over ranks.
        error: norm of the difference from the float64 sum, relative to the norm of that sum.
        processor_seconds: CPU time of all threads, mean over ranks.
        break_even: bits per second below which the codec pays; 0: it never does.
    """

    route: str
    codec: str
    num_bytes: int
    seconds: float
    sent_bytes: float
    error: float
    processor_seconds: float
    break_even: float = 0.0

    @property
    def is_coded(self) -> bool:
        """Return whether values were encoded."""
        return Strategy(codec=self.codec).is_coded

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth: bits of the tensor per second."""
        return 8 * self.num_bytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bus bandwidth: bits that a rank sends per second."""
        return 8 * self.sent_bytes / self.seconds

    def record(self) -> dict[str, Any]:
        """Return the fields and both bandwidths as plain values."""
        return {**asdict(self), "algbw": self.algbw, "busbw": self.busbw}


def measure_comm(
    cluster: Cluster, net: Net, routes: Sequence[str], codecs: Sequence[str], sizes: Sequence[int]
) -> list[AllReduceTiming]:
    """Measure every route without a codec, and every codec on the native route; collective.

    Returns:
        Timings that are equal on every rank, without routes that do not exist here.
    Raises:
        StrategyError: a route or a codec is not known.
    """
    mesh = Mesh.build(cluster, {"replica": cluster.world_size})
    group, rows = mesh.replica, []
    for route, codec in [*((route, "fp32") for route in routes), *(("native", codec) for codec in codecs)]:
        path_and_closers = _path(cluster, group, net, Strategy(route=route, codec=codec))
        if path_and_closers is not None:
            path, closers = path_and_closers
            rows += [_measure(path, net, group, route, codec, size) for size in sizes]
            for close in closers:
                close()
    mesh.give_back()
    return [*_with_break_even(rows)]


def measure_all_reduce_of(
    cluster: Cluster, group: RankGroup, net: Net, strategy: Strategy, num_bytes: int
) -> AllReduceTiming | None:
    """Measure an all_reduce by the route and codec of a strategy; None if the route does not exist here."""
    path_and_closers = _path(cluster, group, net, strategy)
    if path_and_closers is None:
        return None
    path, closers = path_and_closers
    timing = _measure(path, net, group, strategy.route, strategy.codec, num_bytes)
    for close in closers:
        close()
    return timing


def default_routes() -> list[str]:
    """Return all routes except `auto`, which chooses among them."""
    return [word for word, spec in known_specs(RouteSpec).items() if spec.is_built and not spec.chooses]


def _path(
    cluster: Cluster, group: RankGroup, net: Net, strategy: Strategy
) -> tuple[Collective, list[Callable[[], None]]] | None:
    """Build a collective and the functions that close it; None if the route does not exist here."""
    closers: list[Callable[[], None]] = []
    warnings: list[str] = []

    def add_codec(path: Any) -> Any:
        coded = build_coded_collective(path, strategy, 0)
        closers.append(coded.close)
        return coded

    is_coded = strategy.is_coded
    wrap = add_codec if is_coded else lambda path: path
    site = RouteContext(cluster, group, net, torch.device("cpu"), warnings.append, closers, wrap, is_coded)
    try:
        bench_group = replace(duplicate_group(group, "bench"), name=f"{strategy.route} {strategy.codec}")
        path = strategy.route_spec.load()(bench_group, site)
    except StrategyError:
        return None
    return None if warnings else (path, closers)  # a route that warns has fallen back to another


def _measure(
    path: Collective, net: Net, group: RankGroup, route: str, codec: str, num_bytes: int
) -> AllReduceTiming:
    n = num_bytes // 4
    inputs = [torch.randn(n, generator=torch.Generator().manual_seed(rank)) for rank in range(group.size)]
    exact_sum = torch.stack(inputs).double().sum(0)
    x = path.buffer(n, inputs[0], str(n))
    times: list[float] = []
    error, sent, used = 0.0, 0.0, 0.0
    for repeat in range(_REPEATS + 1):
        x.copy_(inputs[group.rank])
        # Ranks start together, so that a time does not include waiting for a late rank.
        net.barrier(group)
        before, processor, began = net.ledger.total().sent_bytes, time.process_time(), time.perf_counter()
        path.all_reduce(x, str(n)).wait()
        spent = [time.perf_counter() - began, time.process_time() - processor]
        sent = net.ledger.total().sent_bytes - before
        slowest = float(net.all_reduce(torch.tensor([spent[0]], dtype=torch.float64), group, "max").wait())
        # The first repeat warms up connections and buffers; its result is compared with the exact
        # sum.
        if repeat == 0:
            error = float((x.double() - exact_sum).norm() / exact_sum.norm())
        else:
            times.append(slowest)
            used += spent[1]
    mean = net.all_reduce(torch.tensor([sent, used / max(1, len(times))], dtype=torch.float64), group).wait()
    sent, used = (mean / group.size).tolist()
    return AllReduceTiming(route, codec, num_bytes, statistics.median(times), sent, error, used)


def _with_break_even(rows: Sequence[AllReduceTiming]) -> Iterator[AllReduceTiming]:
    plain = {row.num_bytes: row for row in rows if row.route == NATIVE_ROUTE and not row.is_coded}
    for row in rows:
        before = plain.get(row.num_bytes)
        if not row.is_coded or before is None:
            yield row
            continue
        saved, costs = before.sent_bytes - row.sent_bytes, row.processor_seconds - before.processor_seconds
        yield replace(row, break_even=8 * saved / max(costs, 1e-9) if saved > 0 else 0.0)


def render_comm_table(rows: Sequence[AllReduceTiming]) -> Iterator[str]:
    """Yield the lines of a text table."""
    yield (
        f"{'route':<20}{'codec':<16}{'bytes':>10}{'ms':>10}{'algbw Mbit/s':>14}{'busbw Mbit/s':>14}"
        f"{'sent bytes':>12}{'error':>10}{'cpu ms':>9}{'pays below':>14}"
    )
    for row in rows:
        never = "never" if row.is_coded else "-"
        pays = f"{row.break_even / 1e6:.0f} Mbit/s" if row.break_even else never
        yield (
            f"{row.route:<20}{row.codec:<16}{row.num_bytes:>10}{row.seconds * 1e3:>10.3f}"
            f"{row.algbw / 1e6:>14.1f}{row.busbw / 1e6:>14.1f}{row.sent_bytes:>12.0f}{row.error:>10.1e}"
            f"{row.processor_seconds * 1e3:>9.3f}{pays:>14}"
        )


_WIDTH, _HEIGHT, _MARGIN = 760, 380, 56
_COLOURS = ("#1f5fa8", "#b4451f", "#2d7d46", "#7a3e9d", "#8a6d1a", "#0f7c86", "#a3275f", "#555555")
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;max-width:70rem;color:#222;background:#fff}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem .7rem}"
    "td,th{text-align:right;border-bottom:1px solid #ddd}svg text{font:12px sans-serif}"
    "td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}"
)


def render_comm_page(rows: Sequence[AllReduceTiming], title: str) -> str:
    """Return an HTML page with a plot and a table."""
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
    body = "".join(_table_row(row) for row in rows)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>{_plot(rows)}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></html>\n"
    )


def _table_row(row: AllReduceTiming) -> str:
    pays = f"{row.break_even / 1e6:.0f} Mbit/s" if row.break_even else "never" if row.is_coded else ""
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


def _plot(rows: Sequence[AllReduceTiming]) -> str:
    """Return an SVG plot of time against size, both logarithmic, with a line for each route and codec."""
    xs, ys = [math.log10(row.num_bytes) for row in rows], [math.log10(row.seconds) for row in rows]
    low, high = (min(xs), min(ys)), (max(xs), max(ys))

    def place(row: AllReduceTiming) -> str:
        spans = [max(1e-9, high[k] - low[k]) for k in (0, 1)]
        x = _MARGIN + (math.log10(row.num_bytes) - low[0]) / spans[0] * (_WIDTH - 4 * _MARGIN)
        y = _HEIGHT - _MARGIN - (math.log10(row.seconds) - low[1]) / spans[1] * (_HEIGHT - 2 * _MARGIN)
        return f"{x:.1f},{y:.1f}"

    names = list(dict.fromkeys((row.route, row.codec) for row in rows))
    shapes = []
    for number, name in enumerate(names):
        points = " ".join(place(row) for row in rows if (row.route, row.codec) == name)
        colour, dash = (
            _COLOURS[number % len(_COLOURS)],
            ' stroke-dasharray="5 3"' if number >= len(_COLOURS) else "",
        )
        label = html.escape(name[0] if name[1] == "fp32" else name[1])
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        shapes.append(
            f'<text x="{_WIDTH - 2.8 * _MARGIN:.0f}" y="{20 + 18 * number}" fill="{colour}">{label}</text>'
        )
    axes = _axes(10 ** low[0], 10 ** high[0], 1e3 * 10 ** low[1], 1e3 * 10 ** high[1])
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">{axes}{"".join(shapes)}</svg>'


def _axes(least: float, most: float, fastest: float, slowest: float) -> str:
    """Return the labels at the ends of both axes, in bytes and milliseconds."""
    return (
        f'<text x="{_MARGIN}" y="{_HEIGHT - 16}">{least:,.0f} bytes</text>'
        f'<text x="{_WIDTH - 5 * _MARGIN}" y="{_HEIGHT - 16}">{most:,.0f} bytes</text>'
        f'<text x="4" y="{_HEIGHT - _MARGIN}">{fastest:.2f} ms</text>'
        f'<text x="4" y="{_MARGIN}">{slowest:.2f} ms</text>'
    )
