"""The slow rank and the cause are named by local work and arrival, and nobody is blamed in balanced runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from paceline.observe.step_stats import PHASES, RANK_COLUMNS, build_rank_records
from paceline.watch.bottlenecks import Finding, HostFacts, diagnose
from tests.unit.watch.records import run_record

RANKS, ROUNDS, WINDOWS = 4, 20, 8
USUAL: Mapping[str, float] = {"data": 2e-3, "forward": 12e-3, "backward": 22e-3, "optimizer": 4e-3}
TRANSFER = 5e-3
Delays = Mapping[tuple[int, str], float]


def records(
    seed: int,
    delays: Delays,
    usual: Mapping[str, float] = USUAL,
    cpu_of_delay: float = 0.0,
    transfer: float = TRANSFER,
) -> Iterator[dict[str, Any]]:
    """Yield records of ranks that meet in a collective each round: whoever arrives first waits for the last.

    Args:
        delays: further seconds of a round, by rank and phase; "communication" is work of the rank in this
            phase, before its collective begins. The optimizer delays the collective of the next round.
        usual: seconds of each phase, which get the noise of a busy machine.
        cpu_of_delay: fraction of a delay that uses the CPU.
    """
    draw = random.Random(seed)
    yield run_record(ranks=RANKS, num_steps=WINDOWS * ROUNDS) | {"threads": 1}
    late = [0.0] * RANKS  # of the optimizer of the round before
    for window in range(WINDOWS):
        rows: dict[int, list[list[float]]] = {rank: [] for rank in range(RANKS)}
        for _ in range(ROUNDS):
            spent = [
                {name: s * draw.lognormvariate(0.0, 0.25) for name, s in usual.items()} for _ in range(RANKS)
            ]
            for rank in range(RANKS):
                if draw.random() < 0.05:  # another process had the core
                    spent[rank][draw.choice(["forward", "backward"])] += draw.uniform(0.01, 0.06)
                for (slow, phase), seconds in delays.items():
                    if slow == rank:
                        spent[rank][phase] = spent[rank].get(phase, 0.0) + seconds * draw.uniform(0.8, 1.2)
            before = [late[r] + sum(s for n, s in spent[r].items() if n != "optimizer") for r in range(RANKS)]
            end = max(before) + transfer * draw.uniform(0.9, 1.3)
            for rank, own in enumerate(spent):
                exposed = end - before[rank]
                own["communication"] = own.get("communication", 0.0) + exposed
                delayed = sum(s for (slow, _), s in delays.items() if slow == rank)
                values = {phase: own[phase] for phase in PHASES} | {
                    "seconds": sum(own.values()) + 5e-4,
                    "busy_seconds": exposed,
                    "exposed_seconds": exposed,
                    "sent_bytes": 1e6,
                    "cpu_seconds": sum(own.values()) - exposed - (1 - cpu_of_delay) * delayed,
                    "proportional_bytes": 9e7,
                    "peak_bytes": 1e8,
                }
                rows[rank].append([values[name] for name in RANK_COLUMNS])
            late = [own["optimizer"] for own in spent]
            late = [seconds - min(late) for seconds in late]
        step = (window + 1) * ROUNDS - 1
        yield from ({"event": "ranks", "time": 1000.0, **r} for r in build_rank_records(step, rows))


def blamed(found: list[Finding]) -> list[tuple[int, str]]:
    return [(finding.rank, finding.phase) for finding in found if finding.rank is not None]


@pytest.mark.capability("P11")
def test_the_slow_rank_and_the_phase_are_named_and_balanced_runs_blame_nobody() -> None:
    """Five phases by four ranks; with delays that use the CPU and such that do not."""
    num_right_ranks = num_right_causes = 0
    for number, phase in enumerate(PHASES):
        for rank in range(RANKS):
            wanted = "encoding" if phase == "communication" else phase
            delay = {(rank, phase): 15e-3 * (1 + rank // 2)}  # the links are not blamed for a long one
            found = diagnose(list(records(10 * number + rank, delay, cpu_of_delay=rank % 2)))
            assert found and f"Rank {rank} is slow" in found[0].sentence, (rank, phase, found)
            num_right_ranks += [finding.rank for finding in found] == [rank]
            num_right_causes += blamed(found) == [(rank, wanted)]
            # The first window has compilation and is left out.
            assert (found[0].first_step, found[0].last_step) == (ROUNDS, WINDOWS * ROUNDS - 1)
            assert "records of steps 20 to 159" in found[0].sentence
    assert num_right_ranks == 20 and num_right_causes >= 18
    assert [seed for seed in range(20) if diagnose(list(records(100 + seed, {})))] == []


@pytest.mark.capability("P11")
def test_each_of_eight_bottlenecks_is_named_with_advice() -> None:
    host = HostFacts(4, frozenset({"avx2", "avx512_bf16"}))
    usual, slow = list(records(1, {})), list(records(1, {}, transfer=30e-3))
    fast_round = {"data": 1e-4, "forward": 5e-4, "backward": 1e-3, "optimizer": 1e-3}
    trips = [
        {
            "event": "process",
            "rank": rank,
            "link_round_trip_seconds": {str(peer): 0.02 if 2 in (rank, peer) else 1e-4},
        }
        for rank in range(4)
        for peer in ((rank + 1) % 4, (rank + 3) % 4)
    ]
    pressure = {"event": "system", "memory_bytes": {"total": 100, "available": 2}, "seconds": 1.0}
    cases: dict[str, tuple[list[Any], int | None]] = {
        "slow disk": (list(records(2, {(3, "data"): 20e-3})), 3),
        "slow link": ([*slow, *trips], 2),
        "straggler": (list(records(3, {(1, "backward"): 20e-3}, cpu_of_delay=1.0)), 1),
        "small batch": (list(records(4, {}, usual=fast_round, transfer=6e-3)), None),
        "lock": (list(records(5, {(0, "forward"): 20e-3})), 0),
        "memory pressure": ([*usual, pressure], None),
        "wrong thread count": ([usual[0] | {"threads": 4}, *usual[1:]], None),
        "precision without CPU support": ([usual[0] | {"precision": "fp16"}, *usual[1:]], None),
    }
    for name, (rows, rank) in cases.items():
        found = diagnose(rows, host)
        matching = [finding for finding in found if finding.bottleneck == name]
        assert len(matching) == 1 and matching[0].rank == rank and matching[0].advice, (name, found)
        assert found[0] is matching[0] or name in (
            "memory pressure",
            "precision without CPU support",
            "small batch",
        )
    assert (
        diagnose(usual, host) == [] and diagnose([usual[0] | {"precision": "bf16"}, *usual[1:]], host) == []
    )
    shared = diagnose(list(records(6, {(rank, "data"): 40e-3 for rank in range(4)})))
    assert [(finding.bottleneck, finding.rank) for finding in shared] == [("slow disk", None)]
    assert [finding.rank for finding in diagnose(slow)] == [None]


def test_few_records_and_those_of_older_versions_are_no_reason_to_guess() -> None:
    """Without the field, an own part of communication is not known; the other phases are."""
    whole = list(records(7, {(2, "backward"): 20e-3}))
    assert diagnose([]) == [] and diagnose(whole[:1]) == [] and diagnose(whole[:9]) == []
    older = [{name: value for name, value in row.items() if name != "exposed_seconds"} for row in whole]
    assert blamed(diagnose(older)) == [(2, "backward")]
    resumed = [*whole, run_record(step=160, ranks=4)]
    assert diagnose(resumed) == []
