"""Schedules whose stages run micro-batches in parts: what is proven of them, written and drawn."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import schedule_show
from paceline.errors import RecipeError, StrategyError
from paceline.parallel.pipeline.strategy_schedule import build_checked_table
from paceline.pipeline_schedule import (
    PipelineAction,
    ScheduleTable,
    gpipe,
    one_f_one_b,
    overlapping_parts,
    part_samples,
    parts_divide_evenly,
    read_schedule_csv,
    render_text,
    simulate_schedule,
    write_schedule_csv,
    zero_bubble,
)
from paceline.recipe import Recipe, Strategy, support

VALUES: dict[str, Any] = {
    "task": "sum",
    "steps": 1,
    "batch": {"size": 4},
    "optimizer": {"name": "sgd", "lr": 0.1},
}
NUMBERS = [
    parts for p in (1, 2, 3) for parts in product((1, 2, 3, 4, 12), repeat=p) if parts_divide_evenly(parts)
]


@pytest.mark.capability("D9")
@pytest.mark.parametrize("m", [1, 3, 8])
def test_parts_never_store_more_nor_wait_longer(m: int) -> None:
    for parts in NUMBERS:
        p = len(parts)
        whole, found = simulate_schedule(one_f_one_b(p, m), m), simulate_schedule(one_f_one_b(p, m, parts), m)
        assert all(a <= b for a, b in zip(found.in_flight, whole.in_flight, strict=True)), parts
        assert found.in_flight[-1] == pytest.approx(1 / parts[-1])  # the last stage keeps one part
        assert found.bubble <= whole.bubble + 1e-9, parts
        assert simulate_schedule(gpipe(p, m, parts), m).in_flight == [m] * p


@pytest.mark.capability("D9", "D7")
def test_a_backward_in_halves_has_parts_too() -> None:
    """No stage keeps more than with whole micro-batches, and the bubble is that of halves."""
    for m in (1, 3, 8):
        for parts in NUMBERS:
            whole, found = (
                simulate_schedule(zero_bubble(len(parts), m), m),
                simulate_schedule(zero_bubble(len(parts), m, parts), m),
            )
            assert all(a <= b for a, b in zip(found.in_flight, whole.in_flight, strict=True)), parts
    for parts, kept in (((1, 2), [2, 1.5]), ((2, 1), [2, 2]), ((1, 2, 4), [3, 2, 2.25])):
        found = simulate_schedule(zero_bubble(len(parts), 8, parts), 8)
        assert found.in_flight == kept
        assert found.bubble < 0.6 * simulate_schedule(one_f_one_b(len(parts), 8, parts), 8).bubble


@pytest.mark.capability("D9")
def test_parts_of_neighbours_have_the_same_samples() -> None:
    for own, theirs, samples in product((1, 2, 4, 12), (1, 2, 4, 12), (1, 3, 5, 24)):
        for part in range(own):
            span = part_samples(samples, own, part)
            there = [part_samples(samples, theirs, k) for k in overlapping_parts(part, own, theirs)]
            assert there[0].start <= span.start and span.stop <= there[-1].stop
            if theirs >= own:
                assert [i for one in there for i in one] == [*span]
        assert [i for k in range(own) for i in part_samples(samples, own, k)] == [*range(samples)]
        assert part_samples(samples, own, own - 1)  # the last part is never empty


F, B = (lambda *place, kind=kind: PipelineAction(kind, place[0], 0, place[1]) for kind in "FB")
WHOLE = [PipelineAction("F", 0), PipelineAction("F", 1), PipelineAction("B", 0), PipelineAction("B", 1)]


@pytest.mark.capability("D9", "D11")
@pytest.mark.parametrize(
    "second, says",
    [
        ([F(0, 0), F(0, 1), B(0, 0), B(0, 1), F(1, 0), B(1, 0), B(1, 1)], "once in each of 2 parts"),
        (
            [F(0, 1), F(0, 0), B(0, 0), B(0, 1), F(1, 0), F(1, 1), B(1, 0), B(1, 1)],
            "forward passes out of order",
        ),
        ([F(0, 0), F(0, 1), F(1, 0), F(1, 1), B(0, 0), B(1, 0), B(0, 1), B(1, 1)], "interleaves the"),
        ([F(0, 0), F(0, 1), F(1, 0), F(1, 1), B(0, 1), B(0, 0), B(1, 0), B(1, 1)], "interleaves the"),
    ],
    ids=["incomplete", "forwards", "mixed", "backwards"],
)
def test_parts_that_cannot_be_run_are_refused(second: list[PipelineAction], says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        simulate_schedule(ScheduleTable([WHOLE, second]), 2)


@pytest.mark.capability("D9", "D11")
def test_stages_that_wait_for_parts_of_each_other_are_refused() -> None:
    """The second stage would go backward with the first half before the third has seen the other."""
    halves = [F(0, 0), B(0, 0), F(0, 1), B(0, 1)]
    ends = [PipelineAction("F", 0), PipelineAction("B", 0)]
    with pytest.raises(StrategyError, match=r"stage 1 at B0.0 of chunk 0, stage 2 at F0 of chunk 0"):
        simulate_schedule(ScheduleTable([ends, halves, ends]), 1)
    assert simulate_schedule(ScheduleTable([ends, halves]), 1).in_flight == [1, 0.5]
    with pytest.raises(StrategyError, match="2, 3 parts"):
        simulate_schedule(gpipe(2, 1, (2, 3)), 1)


@pytest.mark.capability("D9", "D11")
def test_parts_are_written_read_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table = tmp_path / "rows.csv", one_f_one_b(2, 2, (1, 2))
    write_schedule_csv(simulate_schedule(table, 2), path)
    assert path.read_text().splitlines()[:2] == ["time,stage,operation,micro_batch,chunk,part", "0,0,F,0,0,0"]
    assert read_schedule_csv(path) == table
    assert list(render_text(simulate_schedule(table, 2))) == [
        "stage 0  F0   -    F1   -    .    .    .    .    B0   -    -    -    .    .    B1   -    -    -",
        "stage 1  .    .    F0.0 B0.0 -    F0.1 B0.1 -    F1.0 B1.0 -    F1.1 B1.1 -    .    .    .    .",
    ]
    schedule_show.show("1f1b", stages=2, micro=2, rechunk="1,2")
    assert "micro-batches in flight, by stage: 2, 0.5" in capsys.readouterr().out
    path.write_text("time,stage,operation,micro_batch,chunk,part\n0,0,F,0,0,-1\n")
    with pytest.raises(StrategyError, match="an invalid row"):
        read_schedule_csv(path)


@pytest.mark.capability("D9")
@pytest.mark.parametrize(
    "text, says",
    [
        ("pipeline=2 rechunk=1,2,4", "that divides its neighbours' or is divided by them"),
        ("pipeline=2 rechunk=2,3", "that divides its neighbours' or is divided by them"),
        ("rechunk=1,2", "that divides its neighbours' or is divided by them"),
        ("pipeline=2 schedule=interleaved:2 rechunk=1,2", "rechunk makes a gpipe, 1f1b or zero-bubble"),
        ("pipeline=2 schedule=zero-bubble rechunk=2,3", "that divides its neighbours' or is divided by them"),
        ("pipeline=2 schedule=own.csv rechunk=1,2", "a file names parts itself"),
        ("pipeline=2 lanes=2 rechunk=1,2", "leave out rechunk, or lanes and context"),
        ("pipeline=2 context=2 rechunk=1,2", "leave out rechunk, or lanes and context"),
        ("replicas=1 pipeline=2 sync=pipedream rechunk=1,2", "leave out schedule and rechunk"),
    ],
)
def test_what_rechunk_does_not_go_with_is_said(text: str, says: str) -> None:
    answer = support(Strategy.parse(text), processes=4, shards=8)
    assert not answer.ok and says in answer.reason
    assert support(answer.nearest, processes=4, shards=8).ok


@pytest.mark.capability("D9")
def test_it_is_a_word_of_a_strategy_and_not_of_a_reproducible_run() -> None:
    strategy = Strategy.parse("pipeline=2 schedule=1f1b rechunk=1,2")
    assert Strategy.parse(str(strategy)) == strategy and strategy.rechunk == "1,2"
    for wrong in ("1,x", "0,1", "1,,2"):
        with pytest.raises(RecipeError, match="a number of parts for each stage"):
            Strategy.parse(f"pipeline=2 rechunk={wrong}")
    with pytest.raises(RecipeError, match="summed part by part has other bits"):
        Recipe(**VALUES, strategy=strategy, reproducible=True)


@pytest.mark.capability("D9", "D11")
@pytest.mark.parametrize(
    "text, more",
    [("pipeline=2", {"reproducible": True}), ("pipeline=2 context=2", {})],
    ids=["bits", "context"],
)
def test_a_file_with_parts_is_refused_where_rechunk_is(
    text: str, more: dict[str, Any], tmp_path: Path
) -> None:
    for parts in ((1, 1), (1, 2)):
        write_schedule_csv(simulate_schedule(one_f_one_b(2, 2, parts), 2), tmp_path / f"{parts[1]}.csv")
    whole, divided = (
        Recipe(**VALUES, **more, strategy=Strategy.parse(f"replicas=1 {text} schedule={tmp_path}/{n}.csv"))
        for n in (1, 2)
    )
    assert build_checked_table(whole, 2).parts == [1, 1]
    with pytest.raises(StrategyError, match="runs micro-batches in parts"):
        build_checked_table(divided, 2)


@pytest.mark.capability("D11")
def test_the_order_of_sums_is_looked_at_on_stages_that_split_no_backward_too(tmp_path: Path) -> None:
    """One stage adds in the order 1, 0, 2, and another one has all that makes a backward in halves."""
    mixed = [PipelineAction("F", k) for k in range(3)] + [PipelineAction("B", k) for k in (1, 0, 2)]
    halves = [*mixed, *(PipelineAction("W", k) for k in range(3))]
    write_schedule_csv(simulate_schedule(ScheduleTable([mixed, halves]), 3), tmp_path / "own.csv")
    strategy = Strategy.parse(f"replicas=1 pipeline=2 schedule={tmp_path}/own.csv")
    assert build_checked_table(Recipe(**VALUES, strategy=strategy), 3).splits
    with pytest.raises(StrategyError, match="neither in ascending nor in descending order"):
        build_checked_table(Recipe(**VALUES, strategy=strategy, reproducible=True), 3)
