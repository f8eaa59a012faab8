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
from paceline.observe import PHASES, Sink, Stats
from paceline.observe.process import peak_bytes, process_start
from paceline.observe.ranks import rank_records
from paceline.observe.schema import SCHEMA
from paceline.training.agreed import agreed
from paceline.training.session import Session

_WINDOW_ROUNDS = 20

_Counters = tuple[float, float, float, float]
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
        self._rounds: list[tuple[Stats, _Counters, _Counters]] = []
        self._before: _Counters = self._counters()

    def step(self, stats: Stats) -> None:
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
        rows = [_row(*one) for one in rounds]
        rows[-1][-1] = peak_bytes()  # it only grows, so the last round's is the window's
        mine = torch.tensor(rows, dtype=torch.float64, device=session.placed.holding.device)
        tables = agreed(session, lambda: session.net.gather(mine, session.mesh.world).wait())
        self._rounds = []
        found = dict(zip(session.mesh.world.ranks, (t.tolist() for t in tables), strict=False))
        for record in rank_records(rounds[-1][0].step, found) if found else ():
            for sink in self._sinks:
                sink.event("ranks", record)
        self.begin()

    def begin(self) -> None:
        """A round begins: what evaluations, checkpoints and these records cost belongs to none."""
        self._before = self._counters()

    def _counters(self) -> _Counters:
        return *self._session.net.ledger.spent(), time.process_time()


def _row(stats: Stats, before: _Counters, after: _Counters) -> list[float]:
    """What a round is in the table of a window; the last column is filled in for all of it."""
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return [stats.seconds, *[stats.phases[phase] for phase in PHASES], *spent, 0.0]


def run_record(session: Session) -> dict[str, Any]:
    """How this process takes part, and the sizes from which closed forms follow."""
    recipe, placed = session.recipe, session.placed
    slots, types = placed.holding.slots, dict(session.state.model.named_parameters())  # of all ranks
    return {
        "schema": SCHEMA,
        "step": session.state.step,
        "num_steps": session.num_steps,
        "task": recipe.task,
        "strategy": str(session.whole_strategy),
        "ordered": recipe.is_ordered,
        "ranks": session.cluster.world_size,
        "devices": placed.holding.device.type,
        "precision": recipe.precision.compute,
        "threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": process_start(os.getpid()),
        "versions": {"paceline": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        "parameters": sum(slot.numel for slot in slots),
        "gradient_bytes": sum(slot.numel * types[slot.name].element_size() for slot in slots),
        "tally_bytes": tally_bytes(
            len(placed.metric_names.found or ()), len(slots), placed.buffers.num_values
        ),
        "tokens_per_sample": session.task.num_tokens_per_sample,
    }
