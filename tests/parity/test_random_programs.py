"""Random programs end where a plain loop ends, or are refused before their first step.

A failure prints the number and the text of the program; `draw(number, processes)` repeats it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.marks import soak_param
from tests.parity.random_program_runs import Verdict, judge, report
from tests.parity.random_programs import Program, draw

_A_SLICE = 10
_IN_SOAK = 100
_NUM_LAUNCHES = int(os.environ.get("RANDOM_PROGRAM_LAUNCHES", "10"))  # of soak, for each number of processes

_POINTS = Program(
    number=7,
    processes=2,
    strategy="replicas=1 tensor=2",
    takes_tokens=False,
    width=12,
    blocks=("linear", "mlp tanh dropout"),
    head=("pre-layer", "scale"),
    plan=(("2.up", "column"), ("2.down", "row"), ("3.layer", "vocabulary")),
    loss="gradient-penalty",
    optimizer="rmsprop",
    lr=0.1,
    clip_norm=None,
    size=3,
    shards=1,
    num_samples=5,
    steps=3,
)
_TOKENS = replace(
    _POINTS,
    takes_tokens=True,
    blocks=("attention qk-layer temperature", "mlp gelu"),
    head=("scale",),
    plan=(("1", "heads"),),
    loss="sums",
)
_MASKED = replace(
    _POINTS,
    number=1244,
    blocks=("mlp prelu dropout pre-layer", "scale", "scale", "norm rms"),
    head=("pre-layer", "no-bias", "masked_fill_"),
    plan=(("1.up", "column"), ("1.down", "row"), ("5.layer", "vocabulary")),
    loss="sums",
    size=12,
    shards=5,
    num_samples=14,
)
FOUND = {
    "gradient penalty, split logits": _POINTS,
    "gradient penalty": replace(_POINTS, plan=_POINTS.plan[:2]),
    "gradient penalty, gathered features": replace(_POINTS, plan=(("1", "gathered"),)),
    "bias of a norm of keys": _TOKENS,
    # Of the first two samples, and of the first four.
    "masked samples": _MASKED,
    "more masked samples": replace(_MASKED, number=16),
}
"""Programs that once trained something else or were refused, though they can be made right."""


def require_right(verdicts: dict[Program, Verdict]) -> None:
    """Require that no program fails, and that most of them train."""
    assert not any(verdict.is_failure for verdict in verdicts.values()), report(verdicts)
    refused = [program for program, verdict in verdicts.items() if verdict.kind == "refused"]
    assert 3 * len(refused) <= len(verdicts), [(p.number, verdicts[p].text) for p in refused]


@pytest.mark.capability("A2", "A11", "C3", "C4", "C5", "Z2")
@pytest.mark.parametrize("processes", [*map(soak_param, (1, 2, 3)), 4])
def test_random_programs_train_what_a_plain_loop_trains(processes: int, tmp_path: Path) -> None:
    require_right(judge([draw(number, processes) for number in range(_A_SLICE)], tmp_path))


@pytest.mark.capability("C3")
def test_programs_that_were_once_wrong_are_right(tmp_path: Path) -> None:
    verdicts = judge([*FOUND.values()], tmp_path)
    assert {name: verdicts[program].kind for name, program in FOUND.items()} == dict.fromkeys(
        FOUND, "equal"
    ), (
        report(verdicts),
        verdicts,
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.capability("A2", "A11", "C3", "C4", "C5", "Z2")
@pytest.mark.parametrize("launch", range(_NUM_LAUNCHES))
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_thousands_of_random_programs_train_what_a_plain_loop_trains(
    processes: int, launch: int, tmp_path: Path
) -> None:
    first = 1000 + launch * _IN_SOAK
    require_right(judge([draw(first + k, processes) for k in range(_IN_SOAK)], tmp_path))


def test_a_partial_gradient_that_is_not_summed_is_found(tmp_path: Path) -> None:
    """The mutation twin: without the check of the first step, a norm of queries is summed by no rank."""
    drawn = (draw(number, 2) for number in range(200))
    partial = [p for p in drawn if any("qk-" in block for block in p.blocks) and "tensor=2" in p.strategy][:6]
    verdicts = judge(partial, tmp_path, checks=False)
    wrong = [program for program, verdict in verdicts.items() if verdict.kind in ("differs", "drifts")]
    assert wrong and f"draw({wrong[0].number}, 2): d" in report(verdicts)
    assert all(not verdict.is_failure for verdict in judge(wrong, tmp_path).values())
