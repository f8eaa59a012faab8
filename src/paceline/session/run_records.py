"""What a run says of itself: how it began, and where the time of every rank goes.

Every so many rounds all ranks send their numbers to rank 0, which writes one record for each rank.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from paceline._version import VERSION
from paceline.comm.tally import tally_bytes
from paceline.observe.metrics_schema import SCHEMA_VERSION
from paceline.observe.process_info import peak_memory_bytes, process_start_ticks
from paceline.observe.sinks import Sink
from paceline.observe.step_stats import PHASES, StepStats, build_rank_records
from paceline.session.session import Session, repeat_until_agreed

_WINDOW_ROUNDS = 20

_RoundCounters = tuple[float, float, float, float]
"""Seconds of communication that was under way and that was waited for, bytes sent, processor seconds."""


class RankRecords:
    """Measures this rank's rounds, and lets rank 0 write those of all.

    Args:
        sinks: of rank 0; empty on the others.
        written: whether the run has a folder; without one nothing is measured or sent.
        window: rounds in a record.
    Wire: one gather a window, of 8 (window x num_columns) bytes from each rank.
    """

    def __init__(
        self, session: Session, sinks: Sequence[Sink], *, written: bool, window: int = _WINDOW_ROUNDS
    ) -> None:
        self._session, self._sinks, self._written, self._window = session, sinks, written, window
        self._rounds: list[tuple[StepStats, _RoundCounters, _RoundCounters]] = []
        self._before: _RoundCounters = self._counters()

    def step(self, stats: StepStats) -> None:
        """After every round; collective when the window is full."""
        if not self._written:
            return
        before, self._before = self._before, self._counters()
        self._rounds.append((stats, before, self._before))
        if len(self._rounds) >= self._window:
            self.flush()

    def flush(self) -> None:
        """Write what the window holds; collective. All ranks have made the same number of rounds."""
        if not self._rounds:
            return
        session, rounds = self._session, self._rounds
        rows = [_round_columns(*one) for one in rounds]
        rows[-1][-1] = peak_memory_bytes()  # it only grows, so the last round's is the window's
        mine = torch.tensor(rows, dtype=torch.float64, device=session.runner.sharded_model.device)
        tables = repeat_until_agreed(session, lambda: session.net.gather(mine, session.mesh.world).wait())
        self._rounds = []
        found = dict(zip(session.mesh.world.ranks, (t.tolist() for t in tables), strict=False))
        for record in build_rank_records(rounds[-1][0].step, found) if found else ():
            for sink in self._sinks:
                sink.event("ranks", record)
        self.begin()

    def begin(self) -> None:
        """A round begins: what evaluations, checkpoints and these records cost belongs to none."""
        self._before = self._counters()

    def _counters(self) -> _RoundCounters:
        return *self._session.net.ledger.spent(), time.process_time()


def _round_columns(stats: StepStats, before: _RoundCounters, after: _RoundCounters) -> list[float]:
    """What a round is in the table of a window; the last column is filled in for all of it."""
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return [stats.seconds, *[stats.phases[phase] for phase in PHASES], *spent, 0.0]


def run_record(session: Session) -> dict[str, Any]:
    """How this process takes part, and the sizes from which closed forms follow."""
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
            len(runner.metric_names.found or ()), len(slots), runner.buffers.num_values
        ),
        "tokens_per_sample": session.task.num_tokens_per_sample,
    }
