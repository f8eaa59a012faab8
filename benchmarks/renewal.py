"""How long a session takes to go on with other members in the living processes.

A renewal ends the membership, agrees on the next one, makes its process groups, and arranges the session on
them. The membership is measured alone as well. Beside them stands what a process would have to do otherwise,
once it has been started and has its task: build a session. Of the ranks the slowest counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.report import Options, Report, Table, present
from benchmarks.subjects import Subject, byte_gpt, mlp
from paceline.job.cluster import Cluster
from paceline.recipe import Strategy
from paceline.session import Session, build_session
from paceline.session.membership_change import change_members
from paceline.testing import run_ranks

_RANKS = (2, 3)
_SUBJECTS: dict[str, Callable[[Options], Subject]] = {
    "MLP, 17 thousand parameters": lambda options: mlp((128,), batch_size=32, shards=6),
    "byte-gpt, 1.8 million": lambda options: byte_gpt(quick=options.quick, precision="fp32").with_shards(6),
}
_PARTS = ("membership alone", "renewal", "session anew")
_DEADLINE_SECONDS = 100.0


def renewals(name: str, repeats: int, options: Options, cluster: Cluster) -> list[list[float]]:
    """Seconds of `_PARTS`, one entry a repeat; the first of each is a warm-up and left out."""
    torch.set_num_threads(1)
    subject = _SUBJECTS[name](options).changed(strategy=Strategy.parse("replicas=all"))
    device, alone, renewed, anew = torch.device("cpu"), [], [], []
    for _ in range(repeats + 1):
        cluster, seconds = _timed(partial(cluster.renew, _DEADLINE_SECONDS))
        alone.append(seconds)
    session, _ = _timed(partial(build_session, subject.recipe, subject.fresh(), cluster, device))
    for _ in range(repeats + 1):
        _one_step(session)
        renewed.append(_timed(partial(change_members, session, _DEADLINE_SECONDS))[1])
        _one_step(session)
        build = partial(build_session, subject.recipe, subject.fresh(), session.cluster, device)
        other, seconds = _timed(build)
        other.close()
        anew.append(seconds)
    session.close()
    session.cluster.disconnect()
    return [part[1:] for part in (alone, renewed, anew)]


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    found = call()
    return found, time.perf_counter() - began


def _one_step(session: Session) -> None:
    rounds = session.rounds()
    next(rounds)
    rounds.close()


def measure(options: Options) -> Report:
    """Run all models on all numbers of ranks."""
    repeats, rows, data = 2 if options.quick else 15, [], {}
    for name in _SUBJECTS:
        for size in _RANKS:
            ranks = run_ranks(partial(renewals, name, repeats, options), size, deadline=300.0)
            slowest = [[max(one) for one in zip(*part, strict=True)] for part in zip(*ranks, strict=True)]
            data[f"{name}, {size} ranks"] = dict(zip(_PARTS, slowest, strict=True))
            rows.append((name, str(size), *(_milliseconds(part) for part in slowest)))
    columns = ("model", "ranks", *(f"{part}: ms" for part in _PARTS))
    table = Table(f"Median of {repeats} (lowest .. highest), by turns", columns, rows)
    return Report("A session that goes on with other members, beside one that is built anew.", [table], data)


def _milliseconds(seconds: list[float]) -> str:
    low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
    return f"{middle:.1f} ({low:.1f} .. {high:.1f})"


if __name__ == "__main__":
    present(measure, __doc__ or "")
