"""Records of a run: how it was started, and how every rank spends its time.

Every 20 rounds all ranks send their measurements to rank 0, which writes one record for each rank.
Evaluations, checkpoints and the records themselves happen between two rounds and are not part of them.
"""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from paceline._version import VERSION
from paceline.comm.tally import tally_bytes
from paceline.job.mesh import AXES
from paceline.observe.metrics_schema import SCHEMA_VERSION
from paceline.observe.process_info import peak_memory_bytes, process_start_ticks, proportional_memory_bytes
from paceline.observe.sinks import Sink
from paceline.observe.step_stats import PHASES, StepStats, build_rank_records
from paceline.pipeline_schedule.schedule_table import TimelineRow, join_measured
from paceline.session.session import Session, gather_from_all, repeat_until_agreed

_WINDOW_ROUNDS = 20
_MEMORY_SECONDS = 5.0  # the system counts the pages of the whole process, which takes milliseconds
_MAX_ACTIONS = 4096  # of a timeline; more are no picture

_RoundCounters = tuple[float, float, float, float]
"""Seconds of communication in progress, seconds of waiting for it, sent bytes, CPU seconds."""


class RankRecords:
    """Measurements of this rank's rounds, written by rank 0 for all ranks.

    Args:
        sinks: those of rank 0; empty on the other ranks.
        written: the run has a folder; otherwise nothing is measured or sent.
        window: number of rounds in a record.
    Wire: one gather a window, of 8 (window x num_columns) bytes from each rank; in a pipeline after the first
        one the actions of its last step, once.
    """

    def __init__(
        self, session: Session, sinks: Sequence[Sink], *, written: bool, window: int = _WINDOW_ROUNDS
    ) -> None:
        self._session, self._sinks, self._written, self._window = session, sinks, written, window
        self._rounds: list[tuple[StepStats, _RoundCounters, _RoundCounters]] = []
        self._before: _RoundCounters = self._counters()
        self._memory_bytes, self._memory_expires = 0.0, -math.inf
        self._has_timeline = False

    def step(self, stats: StepStats) -> None:
        """Record a round; collective when the window is full."""
        if not self._written:
            return
        before, self._before = self._before, self._counters()
        self._rounds.append((stats, before, self._before))
        if len(self._rounds) >= self._window:
            self.flush()

    def flush(self) -> None:
        """Write the rounds since the last record; collective: all ranks have the same number of rounds."""
        if not self._rounds:
            return
        session, rounds = self._session, self._rounds
        rows = [_round_columns(*measured) for measured in rounds]
        # The peak only grows, so that of the last round is that of the window.
        now = time.monotonic()
        if now >= self._memory_expires:
            self._memory_bytes, self._memory_expires = proportional_memory_bytes(), now + _MEMORY_SECONDS
        rows[-1][-2:] = self._memory_bytes, peak_memory_bytes()
        local = torch.tensor(rows, dtype=torch.float64, device=session.runner.sharded_model.device)
        tables = repeat_until_agreed(session, lambda: session.net.gather(local, session.mesh.world).wait())
        self._rounds = []
        # `tables` is empty on all ranks but the first.
        by_rank = dict(zip(session.mesh.world.ranks, (t.tolist() for t in tables), strict=False))
        for record in build_rank_records(rounds[-1][0].step, by_rank) if by_rank else ():
            for sink in self._sinks:
                sink.event("ranks", record)
        if not self._has_timeline:
            self._has_timeline = True
            timeline = measured_timeline(session, rounds[-1][0].step)
            for sink in self._sinks:
                if timeline is not None:
                    sink.event("timeline", timeline)
        self.begin()

    def begin(self) -> None:
        """Start the measurement of the next round, after work that belongs to no round."""
        self._before = self._counters()

    def _counters(self) -> _RoundCounters:
        return *self._session.net.ledger.totals_so_far(), time.process_time()


def _round_columns(stats: StepStats, before: _RoundCounters, after: _RoundCounters) -> list[float]:
    """Return the columns of a round; the last two, memory, are filled in for the window."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    return [stats.seconds, *[stats.phases[phase] for phase in PHASES], *differences, 0.0, 0.0]


def measured_timeline(session: Session, step: int) -> dict[str, Any] | None:
    """Return the event `timeline` of the last step of a pipeline; collective if stages are processes.

    Hosts have clocks of their own, so the rows of two hosts are as exact as their wall clocks agree.

    Returns:
        None without stages, or with more than `_MAX_ACTIONS`.
    """
    schedule, mesh = session.runner.schedule, session.mesh
    rows = [] if schedule is None else list(schedule.measured)
    if mesh.axes["pipeline"].size > 1:
        is_sample = not any(mesh.coordinate(axis) for axis in AXES if axis != "pipeline")
        offset = time.time() - time.perf_counter()
        local = [[row[0] + offset, *row[1:]] for row in rows] if is_sample else []
        texts = gather_from_all(session, lambda: json.dumps(local))
        rows = [TimelineRow(*row) for text in texts for row in json.loads(text)]
    if schedule is None or not 0 < len(rows) <= _MAX_ACTIONS:
        return None
    measured = join_measured(rows, schedule.planned)
    return {
        "step": step,
        "planned": [[*row] for row in schedule.planned.rows],
        "measured": [[round(row[0], 7), *row[1:-1], round(row[-1], 7)] for row in measured.rows],
        "planned_idle": schedule.planned.bubble,
        "measured_idle": measured.bubble,
    }


def run_record(session: Session) -> dict[str, Any]:
    """Return the event `run`: versions, machine, strategy, and the sizes that traffic is computed from."""
    recipe, runner = session.recipe, session.runner
    slots, types = runner.sharded_model.slots, dict(session.state.model.named_parameters())  # of all ranks
    return {
        "schema": SCHEMA_VERSION,
        "step": session.state.step,
        "num_steps": session.num_steps,
        "task": recipe.task,
        "strategy": str(session.full_strategy),
        "ordered": recipe.is_ordered,
        "ranks": session.cluster.world_size,
        "devices": runner.sharded_model.device.type,
        "precision": recipe.precision.compute,
        "threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": process_start_ticks(os.getpid()),
        "versions": {"paceline": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        "parameters": sum(slot.numel for slot in slots),
        "gradient_bytes": sum(slot.numel * types[slot.name].element_size() for slot in slots),
        "tally_bytes": tally_bytes(
            len(runner.metric_names.names or ()), len(slots), runner.buffers.num_values
        ),
        "tokens_per_sample": session.task.num_tokens_per_sample,
    }
