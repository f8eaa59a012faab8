"""Pipeline schedules are data: their order is that of the papers, and they never wait for each other."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.errors import StrategyError
from paceline.pipeline_schedule import (
    PipelineAction,
    ScheduleFactory,
    ScheduleTable,
    count_messages_by_source,
    gpipe,
    interleaved,
    next_chunk,
    one_f_one_b,
    pipedream_2bw,
    previous_chunk,
    read_schedule_csv,
    render_svg,
    render_text,
    simulate_schedule,
    write_schedule_csv,
    zero_bubble,
)

GRID = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 7, 16)]


def text(order: object) -> str:
    return " ".join(f"{a.kind}{a.micro_batch}" for a in order)


@pytest.mark.capability("D3")
@pytest.mark.parametrize("p, m", GRID)
def test_gpipe_runs_all_forwards_and_then_all_backwards(p: int, m: int) -> None:
    table = gpipe(p, m)
    right = " ".join([f"F{k}" for k in range(m)] + [f"B{k}" for k in reversed(range(m))])
    assert [text(order) for order in table.orders] == [right] * p
    proof = simulate_schedule(table, m)
    assert list(proof.in_flight) == [m] * p  # activations of all micro-batches are stored
    assert proof.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.capability("D4", "D6", "D7")
@pytest.mark.parametrize("p, m", GRID)
def test_1f1b_stores_no_more_than_there_are_stages(p: int, m: int) -> None:
    proof = simulate_schedule(one_f_one_b(p, m), m)
    assert list(proof.in_flight) == [min(p - s, m) for s in range(p)]
    assert proof.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.capability("D6")
def test_1f1b_alternates_once_it_is_full() -> None:
    first, last = one_f_one_b(2, 4).orders
    assert text(first) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text(last) == "F0 B0 F1 B1 F2 B2 F3 B3"


@pytest.mark.capability("D6", "D7")
@pytest.mark.parametrize("p, m", [(p, m) for p, m in GRID if m >= p - 1])
def test_two_buffers_of_weights_cost_no_time_where_a_step_fills_the_pipeline(p: int, m: int) -> None:
    counts = [m, m + 2, m, m]
    assert pipedream_2bw(p, counts).orders == one_f_one_b(p, sum(counts)).orders


@pytest.mark.capability("D6")
@pytest.mark.parametrize("counts", [[1] * 7, [2, 1, 3, 1], [4, 4]])
def test_no_step_goes_forward_before_the_update_of_two_steps_before(counts: list[int]) -> None:
    steps = [step for step, n in enumerate(counts) for _ in range(n)]
    table = pipedream_2bw(4, counts)
    simulate_schedule(table, len(steps))
    for order in table.orders:
        for place, action in enumerate(order):
            needed = [k for k, step in enumerate(steps) if step < steps[action.micro_batch] - 1]
            done = [a.micro_batch for a in order[:place] if a.kind == "B"]
            assert action.kind == "B" or done[: len(needed)] == needed


@pytest.mark.capability("D5", "D7")
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("p, m", GRID)
def test_chunks_make_the_bubble_a_part_of_what_it_was(p: int, m: int, chunks: int) -> None:
    proof = simulate_schedule(interleaved(p, m, chunks), m)
    if m % p == 0:
        assert proof.bubble == pytest.approx((p - 1) / (chunks * m + p - 1))
        assert max(proof.in_flight) <= p + (p - 1) / chunks + 1e-9
    assert proof.total >= 3 * m - 1e-9


@pytest.mark.capability("D7")
@pytest.mark.parametrize("p, m", [(p, m) for p, m in GRID if m >= p > 1])
def test_halves_of_backwards_fill_the_bubble_and_store_no_more(p: int, m: int) -> None:
    """The closed form of ZB-H1: p - 1 beside 3 m."""
    proof = simulate_schedule(zero_bubble(p, m), m)
    assert proof.total == 3 * m + p - 1
    assert max(proof.in_flight) <= p
    assert proof.total < simulate_schedule(one_f_one_b(p, m), m).total


@pytest.mark.capability("D1", "D11")
@pytest.mark.parametrize(
    "first, second, says",
    [
        ("F0", "F0 B0", "forward and backward once"),
        ("F0 B0 F0 B0", "F0 B0", "forward and backward once"),
        ("B0 F0", "F0 B0", "backward before forward"),
        ("F0 W0 B0", "F0 B0", "before those of the inputs"),
        ("F1 F0 B0 B1", "F0 F1 B0 B1", "out of order"),
        ("F0 B0 F1 B1", "F0 F1 B0 B1", "stage 0 at B0 of chunk 0, stage 1 at F1 of chunk 0"),
    ],
    ids=["incomplete", "twice", "backward first", "halves", "order", "deadlock"],
)
def test_a_schedule_that_cannot_run_is_refused_before_it_does(first: str, second: str, says: str) -> None:
    orders = [[PipelineAction(word[0], int(word[1:])) for word in text.split()] for text in (first, second)]
    with pytest.raises(StrategyError, match=says):
        simulate_schedule(ScheduleTable(orders), 1 + max(a.micro_batch for a in orders[1]))


@pytest.mark.capability("D11")
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, interleaved, zero_bubble])
def test_what_is_written_is_read_back_and_less_of_it_runs_too(make: object, tmp_path: Path) -> None:
    table, path = make(3, 6), tmp_path / "rows.csv"
    write_schedule_csv(simulate_schedule(table, 6), path)
    found = read_schedule_csv(path)
    assert [list(order) for order in found.orders] == [list(order) for order in table.orders]
    assert found.chunks == table.chunks
    for m in range(1, 6):
        assert simulate_schedule(found.first(m), m).total < simulate_schedule(found, 6).total


@pytest.mark.capability("D11")
@pytest.mark.parametrize("row", ["0,0,X,0,0", "0,-1,F,0,0", "soon,0,F,0,0", "0,0,F", "0,0,F,0.5,0"], ids=str)
def test_a_row_that_is_none_is_named_by_its_line(row: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"time,stage,operation,micro_batch,chunk\n0,0,F,0,0\n{row}\n")
    with pytest.raises(StrategyError) as caught:
        read_schedule_csv(path)
    assert caught.value.where == f"{path}, line 3"
    for content in ("", "time,stage,operation,micro_batch,chunk\n"):
        path.write_text(content)
        with pytest.raises(StrategyError, match="no rows"):
            read_schedule_csv(path)
    with pytest.raises(StrategyError, match="cannot be read"):
        read_schedule_csv(tmp_path / "none.csv")


@pytest.mark.capability("D11")
def test_it_is_drawn_as_text_and_as_a_picture() -> None:
    proof = simulate_schedule(zero_bubble(2, 2), 2)
    assert list(render_text(proof)) == ["stage 0  F0 F1 .  B0 W0 B1 W1", "stage 1  .  F0 B0 F1 B1 W0 W1"]
    assert list(render_text(simulate_schedule(one_f_one_b(2, 2), 2))) == [
        "stage 0  F0 F1 .  .  B0 -  .  B1 -",
        "stage 1  .  F0 B0 -  F1 B1 -  .  .",
    ]
    picture = ElementTree.fromstring(render_svg(proof, "two <stages>"))
    boxes = picture.findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == len(proof.rows) == 12


@pytest.mark.capability("D1")
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zero_bubble, interleaved])
def test_what_arrives_at_a_stage_is_what_its_neighbours_send(make: ScheduleFactory) -> None:
    for p, m in ((2, 1), (2, 5), (3, 4), (4, 8)):
        table = make(p, m)
        sent = dict.fromkeys(range(p), 0)
        for stage, order in enumerate(table.orders):
            own = [a for a in order if a.kind != "W"]
            forward = [a for a in own if a.kind == "F" and next_chunk(stage, a, p, table.chunks)]
            sent[stage] = len(forward) + sum(
                a.kind == "B" and previous_chunk(stage, a, p) is not None for a in own
            )
        assert sum(sent.values()) == sum(
            sum(count_messages_by_source(table, stage).values()) for stage in range(p)
        )
        assert all(
            abs(source - stage) in (1, p - 1)
            for stage in range(p)
            for source in count_messages_by_source(table, stage)
        )
    assert count_messages_by_source(gpipe(3, 4), 1) == {0: 4, 2: 4}
    assert count_messages_by_source(interleaved(2, 4), 0) == {1: 12}
    assert count_messages_by_source(gpipe(2, 4, (2, 1)), 1) == {}  # a part may be empty
