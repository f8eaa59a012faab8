"""Traces of some steps: the request, the window in which a rank records spans, and the file for Perfetto.

`paceline trace RUN --steps 10:13` writes a request into the run folder. Each rank looks for one at most once
a second, between two rounds, records the spans of the steps that it names, and writes them to a file of its
own. `merge_spans` makes one file of all ranks, in the Trace Event format.

Ranks of one host share a clock. The clocks of two hosts are aligned by the collectives of all ranks in the
trace: none can end on a rank before it has begun on every other, which bounds the difference from both sides.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.observe.file_writing import create_draft, publish_json, read_regular_file
from paceline.observe.rank_activity import RankActivity, SpanRecorder, boot_id
from paceline.observe.step_stats import PHASES

FOLDER = "trace"
MAX_BYTES = 100 * 10**6
MAX_SPANS = 100_000
_MAX_SPANS_OF_JOB = 2_000_000
_REQUEST = "request.json"
_CHECK_SECONDS = 1.0
_MAX_REQUEST_BYTES = 2**16
_MAX_RANK_BYTES = 2**28
_TRACKS = ("steps", "buckets", "collectives")

_SendEvent = Callable[[str, Mapping[str, Any]], object]
StageRows = Callable[[], Sequence[Sequence[Any]]]
"""Returns what the stages of this rank did in the last round: rows of a `MeasuredSchedule`."""


@dataclass(frozen=True)
class TraceRequest:
    """A request to trace steps.

    Args:
        key: names the request; the files of the ranks repeat it.
        first, end: the first step and the one after the last, counted from 0.
        max_spans: the most spans that each rank keeps.
    """

    key: str
    first: int
    end: int
    max_spans: int = MAX_SPANS

    def write(self, run_dir: Path) -> None:
        """Write the request into a run folder, where the ranks find it.

        Raises:
            OSError: it cannot be written.
        """
        publish_json(run_dir / FOLDER / _REQUEST, vars(self))

    @staticmethod
    def withdraw(run_dir: Path) -> None:
        """Remove the request: ranks that have not begun to record it never will."""
        with suppress(OSError):
            (run_dir / FOLDER / _REQUEST).unlink(missing_ok=True)

    @staticmethod
    def read(run_dir: Path) -> TraceRequest | None:
        """Return the request of a run folder; None if there is none, or it is not one."""
        try:
            values = json.loads(read_regular_file(run_dir / FOLDER / _REQUEST, _MAX_REQUEST_BYTES))
            limit = max(1, min(int(values["max_spans"]), MAX_SPANS))
            request = TraceRequest(str(values["key"]), int(values["first"]), int(values["end"]), limit)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        return request if 0 <= request.first < request.end else None


class TraceWindow:
    """The window of steps of one rank in which spans are recorded.

    A round that has several steps is recorded as a whole, and the steps outside of the window are left out.

    Args:
        run_dir: the folder of the run.
        rank, num_ranks: of the run.
        activity: gets the recorder.
        recipe_steps: the window of the recipe, if it has one.
        stage_rows: what pipeline stages did in the last round; empty without stages.
        send_event: receives the event `trace` when the file is written, or `warning` if it cannot be.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        num_ranks: int,
        *,
        activity: RankActivity,
        recipe_steps: tuple[int, int] | None,
        stage_rows: StageRows,
        send_event: _SendEvent,
    ) -> None:
        self._run_dir, self._rank, self._num_ranks = run_dir, rank, num_ranks
        self._activity, self._stage_rows, self._send_event = activity, stage_rows, send_event
        self._request: TraceRequest | None = None
        self._recorder: SpanRecorder | None = None
        self._answered = ""
        self._next_check = 0.0
        self._before, self._longest_round = -1, 1
        if recipe_steps is not None:
            self._request = TraceRequest("recipe", *recipe_steps, max_spans=_spans_per_rank(num_ranks))

    def before_step(self, step: int) -> bool:
        """Begin or end the recording, if it is time to.

        Args:
            step: index of the step that comes next.
        Returns:
            Whether something was done whose time does not belong to that step.
        """
        if self._before >= 0 and step - self._before > self._longest_round:
            self._longest_round = step - self._before
        has_gone_back, self._before = step <= self._before, step
        if self._recorder is not None:
            self._add_stages(self._recorder)
            if step < self._request_end and not has_gone_back:
                return False
            self._write(step)
            return True
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            self._look()
        request = self._request
        if request is None or step + self._longest_round <= request.first:
            return False
        if step > request.first:
            if request.key == "recipe":  # a run that was resumed after the window
                self._request = None
                return False
            self._refuse(request, f"rank {self._rank} was at step {step} when it saw the request")
            return True
        self._recorder = self._activity.recorder = SpanRecorder(request.max_spans)
        return False

    def close(self) -> None:
        """Write what was recorded, if the run ends inside of the window."""
        if self._recorder is not None:
            self._write(self._activity.step + 1)
        elif self._request is not None:
            self._refuse(self._request, f"the run has ended after step {self._activity.step}")

    @property
    def _request_end(self) -> int:
        return 0 if self._request is None else self._request.end

    def _look(self) -> None:
        """Look for a request, and forget one that was withdrawn."""
        if self._request is not None and self._request.key == "recipe":
            return
        path = self._run_dir / FOLDER / _REQUEST
        # One system call, unless there is a request.
        request = TraceRequest.read(self._run_dir) if os.path.lexists(path) else None
        self._request = None if request is None or request.key == self._answered else request

    def _add_stages(self, recorder: SpanRecorder) -> None:
        for time_, stage, kind, micro_batch, chunk, part, seconds in self._stage_rows():
            word = {"F": "forward", "B": "backward", "W": "backward of weights"}.get(kind, kind)
            values = {"micro_batch": micro_batch, "chunk": chunk, "part": part}
            step = self._activity.step
            recorder.add(f"stage {stage}", f"{word} {micro_batch}", time_, time_ + seconds, step, values)

    def _refuse(self, request: TraceRequest, why: str) -> None:
        self._publish(request, {"error": why})

    def _write(self, step: int) -> None:
        """End the recording and write the file of this rank.

        Args:
            step: index of the step that comes next.
        """
        request, recorder = self._request, self._recorder
        self._recorder = self._activity.recorder = None
        if request is None or recorder is None:
            return
        spans = [span for span in recorder.spans if request.first <= span[4] < request.end]
        end = min(step, request.end)
        record = {"first": request.first, "end": end, "spans": spans, "dropped": recorder.num_dropped}
        if self._publish(request, record) and spans:
            place = str(self._run_dir / FOLDER)
            shown = {"step": request.first, "end": end, "spans": len(spans), "dropped": recorder.num_dropped}
            self._send_event("trace", {**shown, "path": place})

    def _publish(self, request: TraceRequest, values: Mapping[str, Any]) -> bool:
        self._answered, self._request = request.key, None
        path = self._run_dir / FOLDER / f"rank-{self._rank}.json"
        clock = _read_clock()
        record = {"key": request.key, "rank": self._rank, "ranks": self._num_ranks, **clock, **values}
        try:
            publish_json(path, record)
        except OSError as error:
            self._send_event("warning", {"text": f"the trace cannot be written: {error}"})
            return False
        return True


def _spans_per_rank(num_ranks: int) -> int:
    return max(1000, min(MAX_SPANS, _MAX_SPANS_OF_JOB // max(1, num_ranks)))


def new_request(first: int, end: int, num_ranks: int, max_spans: int | None) -> TraceRequest:
    """Return a request with a key of its own; a job of many ranks records fewer spans on each."""
    limit = _spans_per_rank(num_ranks) if max_spans is None else max_spans
    return TraceRequest(f"{time.time_ns():x}-{os.getpid()}", first, end, limit)


def _read_clock() -> dict[str, Any]:
    """Return which clock the times of this process are of, and what the wall clock showed."""
    before = time.perf_counter()
    wall = time.time()
    after = time.perf_counter()
    clock = {"monotonic": (before + after) / 2, "wall": wall}
    return {"host": socket.gethostname(), "boot": boot_id(), "pid": os.getpid(), "clock": clock}


@dataclass
class RankSpans:
    """The spans of one rank, as its file has them.

    Args:
        key: of the request.
        rank, num_ranks: global rank and number of ranks.
        host, boot, pid: its process; times of one boot are of one clock.
        wall_offset: wall time minus the clock of the spans, in seconds.
        first, end: the steps that were recorded.
        spans: track, name, begin, end, step and values of each.
        num_dropped: spans that were not kept.
        error: why there are none; empty if there are.
    """

    key: str
    rank: int
    num_ranks: int
    host: str
    boot: str
    pid: int
    wall_offset: float
    first: int = 0
    end: int = 0
    spans: list[list[Any]] = field(default_factory=list)
    num_dropped: int = 0
    error: str = ""


def read_spans(run_dir: Path) -> list[RankSpans]:
    """Return what the ranks have written for the newest request, by rank; files that are damaged are not."""
    dated = []
    for path in (run_dir / FOLDER).glob("rank-*.json"):
        with suppress(OSError):
            if (read := _read_rank(path)) is not None:
                dated.append((path.stat().st_mtime_ns, read))
    if not dated:
        return []
    newest = max(dated, key=lambda entry: entry[0])[1].key
    return sorted((read for _, read in dated if read.key == newest), key=lambda read: read.rank)


def _read_rank(path: Path) -> RankSpans | None:
    try:
        values = json.loads(read_regular_file(path, _MAX_RANK_BYTES))
        clock = values["clock"]
        read = RankSpans(
            key=str(values["key"]),
            rank=int(values["rank"]),
            num_ranks=int(values["ranks"]),
            host=str(values["host"]),
            boot=str(values["boot"]),
            pid=int(values["pid"]),
            wall_offset=float(clock["wall"]) - float(clock["monotonic"]),
            first=int(values.get("first", 0)),
            end=int(values.get("end", 0)),
            spans=[span for span in values.get("spans", []) if _is_span(span)],
            num_dropped=int(values.get("dropped", 0)),
            error=str(values.get("error", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return read


def _is_span(span: Any) -> bool:
    if type(span) is not list or len(span) != 6:
        return False
    track, name, began, ended, step, values = span
    times = all(type(x) in (int, float) and math.isfinite(x) for x in (began, ended))
    is_named = type(track) is str and type(name) is str and type(step) is int
    return times and is_named and began <= ended and (values is None or type(values) is dict)


# ---------------------------------------------------------------------------------------------- clocks


@dataclass(frozen=True)
class ClockAlignment:
    """The clock of a rank against that of the first rank.

    Args:
        offset: seconds to add to its times.
        uncertainty: the true offset is at most this far away; 0 on the host of the first rank, infinite if
            the trace has no collective of all ranks to tell it.
    """

    offset: float
    uncertainty: float


def align_clocks(ranks: Sequence[RankSpans]) -> list[ClockAlignment]:
    """Return the alignment of each rank's clock to that of the first one.

    The wall clocks decide where the collectives allow it; otherwise the middle of what they allow.
    """
    first, found = ranks[0], dict[str, ClockAlignment]()
    for rank in ranks:
        clock = rank.boot or f"{rank.host} {rank.pid}"
        if clock not in found:
            # All ranks of a host together: each collective that any of them took part in narrows it.
            same = [other for other in ranks if (other.boot or f"{other.host} {other.pid}") == clock]
            here = [other for other in ranks if first.boot and other.boot == first.boot] or [first]
            is_here = rank is first or bool(first.boot and rank.boot == first.boot)
            found[clock] = ClockAlignment(0.0, 0.0) if is_here else _align(here, same)
    return [found[rank.boot or f"{rank.host} {rank.pid}"] for rank in ranks]


def _align(here: Sequence[RankSpans], there: Sequence[RankSpans]) -> ClockAlignment:
    low, high = -math.inf, math.inf
    calls_here = [_calls_of_all(rank) for rank in here]
    for rank in there:
        calls = _calls_of_all(rank)
        for others in calls_here:
            for key in calls.keys() & others.keys():
                (began, ended), (other_began, other_ended) = calls[key], others[key]
                low, high = max(low, other_began - ended), min(high, other_ended - began)
    by_wall = there[0].wall_offset - here[0].wall_offset
    if low <= by_wall <= high:
        offset = by_wall
    elif math.isfinite(low) and math.isfinite(high):
        offset = (low + high) / 2
    else:
        offset = by_wall
    return ClockAlignment(offset, max(high - offset, offset - low))


def _calls_of_all(rank: RankSpans) -> dict[tuple[int, str, int], tuple[float, float]]:
    """Return begin and end of collectives in which all ranks wait for all, by step, name and number."""
    calls: dict[tuple[int, str, int], tuple[float, float]] = {}
    count: dict[tuple[int, str], int] = {}
    for track, name, began, ended, step, values in sorted(rank.spans, key=lambda span: span[2]):
        waits_for_all = name.startswith(
            ("all_reduce", "all_gather", "reduce_scatter", "barrier", "all_to_all")
        )
        if track == "collectives" and waits_for_all and (values or {}).get("ranks") == rank.num_ranks:
            number = count[step, name] = count.get((step, name), -1) + 1
            calls[step, name, number] = began, ended
    return calls


# ------------------------------------------------------------------------------------- the merged file


@dataclass(frozen=True)
class TraceSummary:
    """What a merged file has.

    Args:
        num_spans: in the file.
        num_dropped: that ranks did not keep, or that did not fit into the file.
        num_bytes: of the file.
        alignments: of the clock of each rank.
    """

    num_spans: int
    num_dropped: int
    num_bytes: int
    alignments: Sequence[ClockAlignment]


class _LimitedGzip:
    """A gzip file that refuses text beyond a limit of bytes.

    Args:
        path: of the file, which is replaced.
        max_bytes: of the file, with its end.
    """

    _END_BYTES = 4096  # what is left for the end of the text and of the file
    _CHUNK_CHARACTERS = 2**16

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._file = create_draft(path)
        # No time in the header: equal spans are equal files.
        self._gzip = gzip.GzipFile(filename="", mode="wb", fileobj=self._file, mtime=0)
        self._max_bytes = max_bytes
        self._pending: list[str] = []
        self._num_pending = 0

    def add(self, text: str) -> bool:
        """Add text if it fits, counting text that is not compressed yet in full; return whether it did."""
        if self._num_pending + len(text) > self._CHUNK_CHARACTERS:
            self._flush()
        if self._file.tell() + self._num_pending + len(text) + self._END_BYTES > self._max_bytes:
            self._flush()
            if self._file.tell() + len(text) + self._END_BYTES > self._max_bytes:
                return False
        self.write(text)
        return True

    def write(self, text: str) -> None:
        """Add text, whether it fits or not."""
        self._pending.append(text)
        self._num_pending += len(text)

    def close(self, end: str) -> int:
        """Write the end of the text; return the bytes of the file."""
        self.write(end)
        self._flush()
        self._gzip.close()
        num_bytes = self._file.tell()
        self._file.close()
        return num_bytes

    def _flush(self) -> None:
        self._gzip.write("".join(self._pending).encode())
        self._gzip.flush()
        self._pending, self._num_pending = [], 0


def merge_spans(ranks: Sequence[RankSpans], output: Path, max_bytes: int = MAX_BYTES) -> TraceSummary:
    """Write the spans of all ranks into one gzip file in the Trace Event format.

    A rank is a process there, and its tracks are threads. Spans are written in the order of time; those that
    do not fit are counted.

    Args:
        ranks: at least one, of the same request.
    Raises:
        DataError: the file cannot be written.
    """
    alignments = align_clocks(ranks)
    events = [_events_of_rank(rank, clock.offset) for rank, clock in zip(ranks, alignments, strict=True)]
    origin = min((spans[0]["ts"] for _, spans in events if spans), default=0)
    draft = output.with_name(f"{output.name}.writing")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        file = _LimitedGzip(draft, max_bytes)
        names = [name for rank_names, _ in events for name in rank_names]
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(map(json.dumps, names)))
        num_written = num_left_out = 0
        for event in heapq.merge(*(spans for _, spans in events), key=lambda event: event["ts"]):
            shown = event | {"ts": (event["ts"] - origin) / 1000, "dur": event["dur"] / 1000}
            if num_left_out or not file.add(",\n" + json.dumps(shown, separators=(",", ":"))):
                num_left_out += 1
            else:
                num_written += 1
        num_dropped = num_left_out + sum(rank.num_dropped for rank in ranks)
        facts = _facts(ranks, alignments, num_dropped)
        num_bytes = file.close(f'\n],"otherData":{json.dumps(facts)}}}\n')
        draft.rename(output)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise DataError(
            f"the trace cannot be written: {error.strerror or error}",
            where=str(output),
            next_step="choose another --output",
        ) from error
    return TraceSummary(num_written, num_dropped, num_bytes, alignments)


def _facts(
    ranks: Sequence[RankSpans], alignments: Sequence[ClockAlignment], num_dropped: int
) -> dict[str, Any]:
    """Return what a reader of the file should know about it."""
    uncertain = [clock.uncertainty for clock in alignments if math.isfinite(clock.uncertainty)]
    return {
        "steps": f"{ranks[0].first}:{max(rank.end for rank in ranks)}",
        "ranks": len(ranks),
        "spans_dropped": num_dropped,
        "clock_uncertainty_seconds": max(uncertain, default=0.0) if len(uncertain) == len(alignments) else -1,
    }


def _events_of_rank(rank: RankSpans, offset: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the names of the tracks of a rank, and its spans in the order of time; times in nanoseconds.

    Whole numbers, so that spans which are nested stay nested.
    """
    lanes = _Lanes()
    spans = sorted([*rank.spans, *_step_spans(rank.spans)], key=lambda span: (span[2], -span[3]))
    events = []
    for track, name, began, ended, step, values in spans:
        begin_ns, end_ns = round(1e9 * (began + offset)), round(1e9 * (ended + offset))
        event = {
            "name": name,
            "cat": track,
            "ph": "X",
            "ts": begin_ns,
            "dur": end_ns - begin_ns,
            "pid": rank.rank,
            "tid": lanes.number_of(track, began, ended),
            "args": {"step": step, **(values or {})},
        }
        events.append(event)
    title = f"rank {rank.rank} ({rank.host}, process {rank.pid})"
    names = [
        {"name": "process_name", "ph": "M", "pid": rank.rank, "args": {"name": title}},
        {"name": "process_sort_index", "ph": "M", "pid": rank.rank, "args": {"sort_index": rank.rank}},
    ]
    for number, track in lanes.tracks:
        about = {"pid": rank.rank, "tid": number}
        names += [
            {"name": "thread_name", "ph": "M", **about, "args": {"name": track}},
            {"name": "thread_sort_index", "ph": "M", **about, "args": {"sort_index": number}},
        ]
    return names, events


def _step_spans(spans: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    """Yield a span around the phases of each step."""
    steps: dict[int, tuple[float, float]] = {}
    for track, name, began, ended, step, _ in spans:
        if track == "steps" and name in PHASES:
            first, last = steps.get(step, (began, ended))
            steps[step] = min(first, began), max(last, ended)
    for step, (began, ended) in steps.items():
        yield ["steps", f"step {step}", began, ended, step, None]


class _Lanes:
    """Threads of the file: a track has as many as it takes for spans that overlap without being nested."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[tuple[int, list[float]]]] = {}
        self.tracks: list[tuple[int, str]] = []

    def number_of(self, track: str, began: float, ended: float) -> int:
        """Return the thread of a span; spans come in the order of their begin, enclosing ones first."""
        lanes = self._numbers.setdefault(track, [])
        for number, open_until in lanes:
            while open_until and open_until[-1] <= began:
                open_until.pop()
            if not open_until or (track == "steps" and ended <= open_until[-1]):
                open_until.append(ended)
                return number
        others = [name for name in self._numbers if name not in _TRACKS]
        place = _TRACKS.index(track) if track in _TRACKS else len(_TRACKS) + others.index(track)
        number = 1000 * place + len(lanes)
        lanes.append((number, [ended]))
        self.tracks.append((number, track if len(lanes) == 1 else f"{track} {len(lanes)}"))
        return number
