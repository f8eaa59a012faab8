"""The profile of some steps of a run: its request, what each rank answers, tables, and a flame graph as SVG.

A request is a file of the run folder, `profile/request.json`. Each rank looks for it between two rounds, at
most once a second, profiles the steps that it names, and writes `profile/rank-N.operations.json`: its
operations, measured by `torch.profiler`, and its Python stacks, sampled. Nothing is sent between ranks.

Invariant: files appear by a rename, so a reader sees a whole one or none; what is no valid one is ignored.
Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from paceline.observe.file_writing import explain_os_errors, publish_json, read_regular_file
from paceline.report.number_format import format_duration, format_percent

FOLDER = "profile"
FLAME_GRAPH = "flame.svg"
MAX_STEPS = 10_000
_REQUEST = "request.json"
_MAX_REQUEST_BYTES = 2**16
_OPERATIONS = re.compile(r"rank-(\d+)\.operations\.json")

Stack = tuple[str, ...]
"""Names of functions, the outermost first."""


class ProfileRequest(NamedTuple):
    """A request to profile a running job.

    Args:
        id: differs from that of any other request.
        first_step: the step with which to begin, so that all ranks profile the same; later if it has passed.
        num_steps: how many steps, 1 to `MAX_STEPS`.
        ranks: global ranks; empty: all.
        process: host, pid and process_start of the process that waits for the answers.
    """

    id: str
    first_step: int
    num_steps: int
    ranks: tuple[int, ...]
    process: Mapping[str, Any]

    def includes(self, rank: int) -> bool:
        """Return whether a rank is asked for its profile."""
        return not self.ranks or rank in self.ranks


class OperationTime(NamedTuple):
    """The calls of an operation of PyTorch.

    Args:
        self_cpu_seconds: without the operations that it calls; a wait counts too.
        self_cuda_seconds: of the kernels that it has launched; 0 without a GPU.
    """

    name: str
    calls: int
    self_cpu_seconds: float
    self_cuda_seconds: float = 0.0


class RankProfile(NamedTuple):
    """The profile of a rank.

    Args:
        request_id: of the request; empty if the recipe has asked for it (`runtime.profile`).
        first_step, end_step: its steps, and the one after the last.
        seconds: wall time of these steps.
        num_samples: how often its stacks were sampled.
        operations: in any order.
        stacks: seconds by stack.
    """

    request_id: str
    rank: int
    first_step: int
    end_step: int
    seconds: float
    num_samples: int
    operations: tuple[OperationTime, ...]
    stacks: Mapping[Stack, float]


def write_request(run_dir: Path, request: ProfileRequest) -> None:
    """Write a request, in place of an older one.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    with explain_os_errors(run_dir):
        publish_json(run_dir / FOLDER / _REQUEST, request._asdict())


def read_request(run_dir: Path) -> ProfileRequest | None:
    """Return the request in a run folder; None if there is no valid one."""
    try:
        values = json.loads(read_regular_file(run_dir / FOLDER / _REQUEST, _MAX_REQUEST_BYTES))
        request = ProfileRequest(
            str(values["id"]),
            int(values["first_step"]),
            int(values["num_steps"]),
            tuple(map(int, values["ranks"])),
            dict(values["process"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return request if 1 <= request.num_steps <= MAX_STEPS else None


def remove_request(run_dir: Path, request: ProfileRequest) -> None:
    """Remove a request if it is still there; one that has replaced it stays."""
    found = read_request(run_dir)
    if found is not None and found.id == request.id:
        with suppress(OSError):
            (run_dir / FOLDER / _REQUEST).unlink()


def write_rank_profile(run_dir: Path, profile: RankProfile) -> None:
    """Write the profile of a rank, in place of an older one.

    Raises:
        OSError: it cannot be written.
    """
    names = {name: i for i, name in enumerate(dict.fromkeys(n for stack in profile.stacks for n in stack))}
    stacks = [
        [[names[name] for name in stack], round(seconds, 6)] for stack, seconds in profile.stacks.items()
    ]
    publish_json(
        run_dir / FOLDER / f"rank-{profile.rank}.operations.json",
        {**profile._asdict(), "functions": list(names), "stacks": stacks},
    )


def read_rank_profiles(run_dir: Path) -> list[RankProfile]:
    """Return the newest profile of each rank, by rank; empty if there are none."""
    found = []
    with suppress(OSError):
        for path in (run_dir / FOLDER).iterdir():
            if _OPERATIONS.fullmatch(path.name):
                with suppress(OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
                    found.append(_parse_rank_profile(json.loads(path.read_text("utf-8", "replace"))))
    return sorted(found, key=lambda profile: profile.rank)


def _parse_rank_profile(values: Mapping[str, Any]) -> RankProfile:
    functions = [str(name) for name in values["functions"]]
    return RankProfile(
        str(values["request_id"]),
        int(values["rank"]),
        int(values["first_step"]),
        int(values["end_step"]),
        float(values["seconds"]),
        int(values["num_samples"]),
        tuple(
            OperationTime(str(name), int(calls), float(cpu), float(cuda))
            for name, calls, cpu, cuda in values["operations"]
        ),
        {tuple(functions[i] for i in stack): float(seconds) for stack, seconds in values["stacks"]},
    )


# Tables


def sum_operations(profiles: Sequence[RankProfile]) -> list[OperationTime]:
    """Return each operation summed over ranks, that with the largest time (self CPU and CUDA) first."""
    sums: dict[str, OperationTime] = {}
    for operation in (operation for profile in profiles for operation in profile.operations):
        total = sums.get(operation.name, OperationTime(operation.name, 0, 0.0))
        sums[operation.name] = OperationTime(
            operation.name,
            total.calls + operation.calls,
            total.self_cpu_seconds + operation.self_cpu_seconds,
            total.self_cuda_seconds + operation.self_cuda_seconds,
        )
    return sorted(sums.values(), key=lambda row: -(row.self_cpu_seconds + row.self_cuda_seconds))


def sum_functions(profiles: Sequence[RankProfile]) -> list[tuple[str, float]]:
    """Return the seconds of each Python function without those that it calls, the largest first."""
    seconds: dict[str, float] = defaultdict(float)
    for profile in profiles:
        for stack, own in profile.stacks.items():
            seconds[stack[-1]] += own
    return sorted(seconds.items(), key=lambda row: -row[1])


# Flame graph

_MAX_RANKS = 8  # beside each other; more are merged
_MIN_SHARE = 5e-4  # of the width; narrower frames cannot be seen
_WIDTH, _ROW, _TOP, _BOTTOM = 1200.0, 18, 48, 26
_CHARACTER = 6.6  # width in pixels at 11 px
_INVALID_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COLORS: tuple[tuple[str, str, str], ...] = (
    ("torch", "torch/", "#f2b46d"),
    ("paceline", "paceline/", "#8db8e8"),
    ("Python", "python/", "#c9c9c9"),
)
"""Kinds of code: label, beginning of the file in the name of a function, and colour."""
_OWN_COLOR, _RANK_COLOR = "#e8795a", "#d9dee3"

_SCRIPT = """
const svg = document.documentElement, W = %d, frames = [...svg.querySelectorAll('g.f')];
function show(x, w) {
  for (const g of frames) {
    const left = (g.dataset.x - x) / w * W, right = left + g.dataset.w / w * W;
    const a = Math.max(0, left), b = Math.min(W, right), [rect, text] = [g.children[1], g.children[2]];
    g.style.display = b - a < 0.4 ? 'none' : '';
    rect.setAttribute('x', a); rect.setAttribute('width', Math.max(0, b - a));
    text.setAttribute('x', a + 3);
    const n = Math.floor((b - a - 6) / %s), name = g.dataset.name;
    text.textContent = n < 3 ? '' : name.length > n ? name.slice(0, n - 1) + '\\u2026' : name;
  }
}
function find(words) {
  let spans = [];
  for (const g of frames) {
    const hit = words && g.dataset.name.toLowerCase().includes(words.toLowerCase());
    g.classList.toggle('hit', !!hit);
    if (hit) spans.push([+g.dataset.x, +g.dataset.x + +g.dataset.w]);
  }
  let end = 0, sum = 0;
  for (const [a, b] of spans.sort((p, q) => p[0] - q[0])) {
    sum += Math.max(0, b - Math.max(a, end)); end = Math.max(end, b);
  }
  svg.querySelector('#found').textContent = words ? (100 * sum / W).toFixed(1) + ' %% in ' + words : '';
}
for (const g of frames) g.addEventListener('click', () => show(+g.dataset.x, +g.dataset.w));
svg.querySelector('#reset').addEventListener('click', () => show(0, W));
svg.querySelector('#search').addEventListener('click', () => find(prompt('function or file') || ''));
"""
_STYLE = """
text { font: 11px ui-monospace, monospace; fill: #222; pointer-events: none }
.title { font-size: 14px; font-weight: 600 } .act { pointer-events: auto; cursor: pointer; fill: #1a5fb4 }
g.f { cursor: pointer }
g.f:hover rect, g.hit rect { stroke: #222; stroke-width: 1.2 } g.hit rect { fill: #d65cd6 }
"""


class _FlameFrame:
    """A function in a flame graph, with those that it calls."""

    def __init__(self) -> None:
        self.seconds = self.own_seconds = 0.0
        self.callees: dict[str, _FlameFrame] = {}

    def add(self, stack: Stack, seconds: float) -> None:
        """Add the time of a stack."""
        frame = self
        frame.seconds += seconds
        for name in stack:
            frame = frame.callees.setdefault(name, _FlameFrame())
            frame.seconds += seconds
        frame.own_seconds += seconds

    def walk(self, level: int = 0, begin: float = 0.0) -> Iterator[tuple[str, int, float, _FlameFrame]]:
        """Yield name, level, beginning in seconds, and frame of all below it."""
        for name, frame in sorted(self.callees.items()):
            yield name, level, begin, frame
            yield from frame.walk(level + 1, begin)
            begin += frame.seconds


def render_flame_graph(profiles: Sequence[RankProfile], title: str) -> str:
    """Return a flame graph as an SVG that needs no other file: callees above callers, width is time.

    A click zooms, a tooltip shows the numbers, and functions can be searched. Ranks are beside each other;
    more than eight are merged. Frames below 0.05 % of the width are left out.
    """
    root, by_rank = _FlameFrame(), len(profiles) <= _MAX_RANKS
    for profile in profiles:
        for stack, seconds in profile.stacks.items():
            root.add((f"rank {profile.rank}", *stack) if by_rank else stack, seconds)
    drawn = [entry for entry in root.walk() if entry[3].seconds >= _MIN_SHARE * root.seconds]
    height = _TOP + _BOTTOM + _ROW * (1 + max((level for _, level, _, _ in drawn), default=0))
    frames = "".join(_render_frame(*entry, root.seconds, height) for entry in drawn)
    legend = "".join(
        f'<rect x="{10 + 90 * i}" y="{height - 18}" width="11" height="11" fill="{color}"/>'
        f'<text x="{25 + 90 * i}" y="{height - 9}">{label}</text>'
        for i, (label, color) in enumerate(
            [("your code", _OWN_COLOR), *((label, color) for label, _, color in _COLORS)]
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height}" width="100%">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="title" x="10" y="20">{_escape(title)}</text>'
        '<text class="act" id="reset" x="10" y="38">reset zoom</text>'
        '<text class="act" id="search" x="100" y="38">search</text><text id="found" x="160" y="38"></text>'
        f"{frames}{legend}<script><![CDATA[{_SCRIPT % (_WIDTH, _CHARACTER)}]]></script></svg>\n"
    )


def _render_frame(
    name: str, level: int, begin: float, frame: _FlameFrame, total: float, height: float
) -> str:
    x, width = _WIDTH * begin / total, _WIDTH * frame.seconds / total
    y, characters = height - _BOTTOM - _ROW * (level + 1), int((width - 6) / _CHARACTER)
    shown = "" if characters < 3 else name if len(name) <= characters else f"{name[: characters - 1]}…"
    place = name.rpartition(" (")[2]
    color = next((color for _, begins, color in _COLORS if place.startswith(begins)), _OWN_COLOR)
    color = color if " (" in name else _RANK_COLOR
    tip = (
        f"{name}: {format_duration(frame.seconds)} ({format_percent(frame.seconds / total)}),"
        f" {format_duration(frame.own_seconds)} of it without the functions that it calls"
    )
    return (
        f'<g class="f" data-x="{x:.2f}" data-w="{width:.2f}" data-own="{frame.own_seconds:.6f}"'
        f' data-name="{_escape(name)}"><title>{_escape(tip)}</title>'
        f'<rect x="{x:.2f}" y="{y:.0f}" width="{width:.2f}" height="{_ROW - 1}" fill="{color}" rx="1"/>'
        f'<text x="{x + 3:.2f}" y="{y + 12:.0f}">{_escape(shown)}</text></g>'
    )


def _escape(text: str) -> str:
    return escape(_INVALID_XML.sub("?", text))
