"""From what runs wrote to rows, a critical batch, a table and a plot."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.errors import DataError, RecipeError
from paceline.studies import (
    MetricTarget,
    RunMeasurements,
    SweepCell,
    build_cells,
    find_critical_batch,
    parse_axis,
    read_measurements,
    recommend,
    render_plot,
    render_table,
    summarize_sweep,
)
from paceline.studies.sweep_summary import EvaluationPoint, MeanAndDeviation, SweepRow, SweepSummary
from tests.unit.report.runs import evaluation, start, steps, write

pytestmark = pytest.mark.capability("A14")


def run(batch: int, steps: int, loss: float = 0.5, speed: float = 100.0) -> RunMeasurements:
    """A run that reaches the target loss of 0.5 at a step."""
    points = (
        EvaluationPoint(steps // 2, steps * batch // 2, {"loss": 0.9}),
        EvaluationPoint(steps, steps * batch, {"loss": loss}),
    )
    return RunMeasurements(2 * steps, 2 * steps * batch, speed, 1.0, points)


def cell(**values: object) -> SweepCell:
    return SweepCell({word: str(value) for word, value in values.items()})


def test_the_critical_batch_of_the_model_is_found() -> None:
    """Steps that follow S = 40 (1 + 100 / B) to the letter."""
    exact = {b: 40 * (1 + 100 / b) for b in (25, 50, 100, 200, 400)}
    found = find_critical_batch(exact)
    assert found is not None and found.batch == pytest.approx(100) and found.fewest_steps == pytest.approx(40)
    ratios = [ratio for _, _, ratio in found.savings]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] == pytest.approx(200 / 120)


def test_perfect_scaling_has_no_critical_batch_and_no_scaling_has_none_above_zero() -> None:
    perfect = find_critical_batch({b: 6400 / b for b in (16, 32, 64)})
    assert perfect is not None and (perfect.batch is None or perfect.batch > 1e6)
    flat = find_critical_batch({16: 100, 32: 100, 64: 100})
    assert flat is not None and flat.batch == 0
    assert find_critical_batch({16: 100, 32: 50}) is None


def test_seeds_are_one_row_with_their_spread() -> None:
    done = [(cell(batch=8, seed=s), run(8, steps)) for s, steps in ((1, 10), (2, 14))]
    summary = summarize_sweep(done, {}, MetricTarget("loss", 0.5, upward=False))
    (row,) = summary.rows
    assert row.values == {"batch": "8"} and row.runs == 2
    assert row.numbers["steps to target"].mean == 12
    assert row.numbers["steps to target"].deviation == pytest.approx(8**0.5)
    assert "12 ±3" in "\n".join(render_table(summary))


def test_without_a_target_it_is_the_loss_that_all_reach() -> None:
    summary = summarize_sweep([(cell(batch=8), run(8, 10, 0.2)), (cell(batch=16), run(16, 10, 0.4))], {})
    assert summary.target == MetricTarget("loss", 0.4, upward=False)
    assert all("steps to target" in row.numbers for row in summary.rows)
    strict = summarize_sweep([(cell(batch=8), run(8, 10, 0.2))], {}, MetricTarget("loss", 0.1, upward=False))
    assert "steps to target" not in strict.rows[0].numbers


def test_the_table_says_what_a_larger_batch_saves_and_what_failed() -> None:
    done = [
        (cell(batch=b, replicas=r), run(b, round(40 * (1 + 100 / b))))
        for b in (25, 50, 100, 200)
        for r in (1, 2)
    ]
    lines = render_table(summarize_sweep(done, {"batch=400 replicas=1": "out of memory"}))
    assert lines[0].split()[:2] == ["batch", "replicas"] and len(lines) == 1 + 8 + 1 + 2 * 2 + 1
    assert sum("critical batch: about 100 samples" in line for line in lines) == 2
    assert "25 to 50: 1.67 of 2" in "\n".join(lines)
    assert lines[-1] == "failed: batch=400 replicas=1: out of memory"
    assert render_table(summarize_sweep([], {"batch=1": "no"})) == ["failed: batch=1: no"]


def test_the_plot_has_a_point_for_every_row_in_every_panel() -> None:
    done = [
        (cell(batch=b, replicas=r, seed=s), run(b, 1000 // b + s))
        for b in (8, 16, 32)
        for r in (1, 2)
        for s in (1, 2)
    ]
    svg = ElementTree.fromstring(render_plot(summarize_sweep(done, {})))
    names = [element.tag.rpartition("}")[2] for element in svg.iter()]
    assert names.count("circle") == 3 * 6 and names.count("polyline") == 3 * 2
    texts = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert {"steps to target", "samples to target", "samples/s", "batch", "replicas=1"} <= set(texts)
    assert render_plot(summarize_sweep(done, {})).count("stroke-dasharray") == 0  # steps fall as 1 / batch
    curved = [(cell(batch=b), run(b, round(40 + 4000 / b))) for b in (25, 50, 200)]
    assert render_plot(summarize_sweep(curved, {})).count("stroke-dasharray") == 1
    ElementTree.fromstring(render_plot(summarize_sweep([], {"batch=1": "no <result>"})))
    words = [(cell(strategy="<a>"), run(8, 9)), (cell(strategy="b"), run(8, 9))]
    assert "&lt;a&gt;" in render_plot(summarize_sweep(words, {}))


def test_a_plot_says_what_it_shows_and_is_as_wide_as_its_words() -> None:
    long = "replicas=all shard=2 zero=3 sync=every-step route=recursive-doubling codec=topk:0.01+int4 lanes=2"
    done = [(cell(batch=b, strategy=long), run(b, 1000 // b)) for b in (8, 16, 32)]
    svg = ElementTree.fromstring(render_plot(summarize_sweep(done, {})))
    texts = [element for element in svg.iter() if element.tag.endswith("}text")]
    assert svg[0].tag.endswith("}title") and svg[0].text == texts[0].text
    assert str(svg[0].text).endswith("by batch")
    for text in texts:
        if text.get("text-anchor") == "start":
            assert float(text.get("x", 0)) + 7 * len(str(text.text)) <= float(svg.get("width", 0))
    top = min(float(text.get("y", 0)) for text in texts if text.text in ("samples/s", "steps to target"))
    assert top > max(float(text.get("y", 0)) for text in texts[:2]) + 10


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    """Also where the earlier ones are in a file that was full, and a crash cut a line short."""
    folder = tmp_path / "run"
    found_run = write(
        folder,
        ("run", start()),
        *steps(0, 2),
        ("run", start(step=1)),
        *steps(1, 3),
        ("evaluation", {**evaluation(3, math.nan)[1], "metrics": {"accuracy": 0.5}}),
    )
    assert len(found_run.of("step")) == 4
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.0001.jsonl").write_text("".join(lines[:2]))
    (folder / "metrics.jsonl").write_text("".join([*lines[2:], lines[-1][:20]]))
    found = read_measurements(folder)
    samples = found_run.steps[0]["num_samples"]
    assert (found.steps, found.num_samples, found.points[0].samples) == (3, 3 * samples, 3 * samples)
    assert found.points[0].values["accuracy"] == 0.5
    assert not MetricTarget("loss", 1.0, upward=False).met(found.points[0])


def test_a_folder_without_steps_has_no_measurements(tmp_path: Path) -> None:
    write(tmp_path, ("run", start()))
    with pytest.raises(DataError, match="no steps"):
        read_measurements(tmp_path)
    with pytest.raises(DataError, match="is not a run folder"):
        read_measurements(tmp_path / "nowhere")


def test_cells_are_all_combinations_in_order() -> None:
    cells = build_cells([parse_axis("batch=32,64"), parse_axis("replicas=1,2")])
    assert [cell.label for cell in cells] == [
        "batch=32 replicas=1",
        "batch=32 replicas=2",
        "batch=64 replicas=1",
        "batch=64 replicas=2",
    ]
    assert cells[1].overrides == ["batch.size=32", "strategy.replicas=2"]
    assert len({cell.folder for cell in cells}) == 4 and cells[0].folder == "batch=32_replicas=1"


def test_any_key_is_an_axis_and_values_may_be_lists() -> None:
    (first, second) = build_cells([parse_axis("options.hidden=[8, 8],[16]"), parse_axis("accumulation=4")])
    assert first.overrides == ["options.hidden=[8, 8]"] and first.accumulation == 4
    assert second.overrides == ["options.hidden=[16]"]
    assert parse_axis('strategy="sync=local:8",ddp').values == ('"sync=local:8"', "ddp")


@pytest.mark.parametrize("text", ["batch", "batch=", "=3", "batch=1,1"])
def test_what_is_no_axis_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="expected WORD=VALUE"):
        parse_axis(text)


def test_an_axis_stands_once_under_any_name() -> None:
    with pytest.raises(RecipeError, match="two axes change the same key"):
        build_cells([parse_axis("batch=1"), parse_axis("batch.size=2")])
    with pytest.raises(RecipeError, match="accumulation: expected"):
        build_cells([parse_axis("accumulation=none")])[0].accumulation


def test_targets() -> None:
    assert MetricTarget.parse("accuracy>=0.95") == MetricTarget("accuracy", 0.95, upward=True)
    point = EvaluationPoint(1, 8, {"loss": 0.3, "accuracy": 0.9})
    assert MetricTarget.parse("loss <= 0.3").met(point) and not MetricTarget.parse("loss<=0.29").met(point)
    assert not MetricTarget.parse("accuracy>=0.91").met(point) and not MetricTarget.parse("other>=0").met(
        point
    )
    with pytest.raises(RecipeError, match="NAME<=VALUE"):
        MetricTarget.parse("accuracy")


def _row(optimizer: str, mean: float, deviation: float, seconds: float, runs: int = 3) -> SweepRow:
    numbers = {"seconds": MeanAndDeviation(seconds, 0.1), "final loss": MeanAndDeviation(mean, deviation)}
    return SweepRow({"optimizer.name": optimizer}, runs, numbers)


@pytest.mark.capability("J21")
def test_every_sentence_of_a_recommendation_cites_rows() -> None:
    """Rows within a deviation of the best are not told apart, and the fastest of them is recommended."""
    rows = [_row("sgd", 0.5, 0.01, 1.0), _row("adam", 0.20, 0.01, 3.0), _row("lamb", 0.21, 0.02, 2.0)]
    lines = recommend(SweepSummary(None, rows, [], {}))
    assert lines == [
        "the lowest final loss is that of row 2 (optimizer.name=adam): 0.2 ±0.01",
        "row 3 (optimizer.name=lamb) is not told apart from row 2: 0.21 ±0.02",
        "recommended: row 3, which takes the least time of these: 2 ±0.1 s",
    ]
    assert recommend(SweepSummary(None, rows[:2], [], {}))[1:] == [
        "row 1 (optimizer.name=sgd) is next: 0.5 ±0.01",
        "recommended: row 2, which no other row equals within its deviation",
    ]
    # Two seeds say nothing about the deviation.
    assert recommend(SweepSummary(None, [*rows[:2], _row("lars", 0.1, 0.0, 1.0, runs=2)], [], {})) == []
