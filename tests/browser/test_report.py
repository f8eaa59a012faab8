"""The page of a real run in a real browser: what is drawn is what the rows say, and it fits every screen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.report import read_run, render_page, summarize_run
from paceline.report.number_format import format_number
from paceline.report.rank_balance import rank_times
from tests.conftest import EVERY, STEPS, Trained
from tests.marks import soak_param

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

TITLES = ["Loss", "Accuracy", "Throughput", "Gradient norm", "Learning rate", "Step time"]
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

# Where the last line of a chart ends, in pixels of the window.
END_OF_LINE = """plot => {
    const line = [...plot.querySelectorAll("path.line:not(.faint)")].at(-1);
    const end = line.getPointAtLength(line.getTotalLength()).matrixTransform(line.getScreenCTM());
    return [end.x, end.y];
}"""


@contextmanager
def shown(browser: Browser, path: Path, **options: Any) -> Iterator[Page]:
    """Open a page; a mistake in it, or a look for anything beside it, fails the test."""
    wrong: list[str] = []
    context = browser.new_context(viewport=options.pop("viewport", WIDE), offline=True, **options)
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    yield page
    context.close()
    assert [text for text in wrong if not text.startswith("data:")] == []


@pytest.mark.capability("P1")
def test_the_curves_end_where_the_rows_end(browser: Browser, trained: Trained) -> None:
    steps = trained.of("step")
    last = {
        "Loss": format_number(steps[-1]["loss"], 5),
        "Throughput": format_number(steps[-1]["samples_per_second"], 5),
        "Gradient norm": format_number(steps[-1]["grad_norm"], 5),
        "Learning rate": format_number(steps[-1]["lr"], 5),
    }
    with shown(browser, trained.folder / "report.html") as page:
        assert page.locator("figure h3").all_inner_texts() == TITLES
        for title, value in last.items():
            plot = page.locator("figure", has=page.locator("h3", has_text=title)).locator(".plot")
            point_at(plot, 1.0)
            said = page.locator("#tip").inner_text()
            assert f"step {STEPS}" in said and value in said, title
        assert_the_spot_is_on_the_line(page, "Learning rate")


def point_at(plot: Locator, share: float) -> None:
    """Move the pointer to a place between the left and the right end of a plot."""
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None and box["width"] > 200 and box["height"] > 100
    plot.hover(position={"x": max(1.0, share * box["width"] - 1), "y": box["height"] / 2})


def assert_the_spot_is_on_the_line(page: Page, title: str) -> None:
    """Line and spot come from two drawings of the same numbers."""
    plot = page.locator("figure", has=page.locator("h3", has_text=title)).locator(".plot")
    point_at(plot, 1.0)
    x, y = plot.evaluate(END_OF_LINE)
    spot = plot.locator(".spot").bounding_box()
    assert spot is not None
    assert spot["x"] + spot["width"] / 2 == pytest.approx(x, abs=1.5)
    assert spot["y"] + spot["height"] / 2 == pytest.approx(y, abs=1.5)


@pytest.mark.capability("P1")
def test_held_out_values_are_marked_where_they_were_measured(browser: Browser, trained: Trained) -> None:
    held_out = trained.of("evaluation")
    with shown(browser, trained.folder / "report.html") as page:
        plot = page.locator(".plot").first
        assert plot.locator("path.dot").count() == len(held_out)
        point_at(plot, (EVERY - 1) / (STEPS - 1))
        said = page.locator("#tip").inner_text()
        assert f"step {EVERY}" in said and format_number(held_out[0]["loss"], 5) in said


@pytest.mark.capability("P10")
def test_the_bars_are_as_wide_as_the_shares_of_the_ranks(browser: Browser, trained: Trained) -> None:
    ranks = rank_times(read_run(trained.folder))
    with shown(browser, trained.folder / "report.html") as page:
        bars = page.locator(".bars .bar > div")
        assert bars.count() == len(ranks) == 2
        for bar, rank in zip(bars.all(), ranks, strict=True):
            whole = bar.bounding_box()
            assert whole is not None
            for piece in bar.locator("b").all():
                box, part = piece.bounding_box(), str(piece.get_attribute("data-tip")).split(":")[0]
                assert box is not None and box["width"] / whole["width"] == pytest.approx(
                    rank.share(part), abs=0.02
                )
        bars.first.locator("b.light").first.hover()
        assert "waiting" in page.locator("#tip").inner_text()


@pytest.mark.capability("P1", "P2")
def test_words_bytes_recipe_and_events_can_be_read(browser: Browser, trained: Trained) -> None:
    with shown(browser, trained.folder / "report.html") as page:
        said = page.locator(".words").first.locator("p")
        assert said.all_inner_texts() == summarize_run(read_run(trained.folder))
        assert page.locator(".ok", has_text="equal").count() == 2
        assert not page.get_by_text('decay = "cosine"').is_visible()
        page.get_by_text("Recipe", exact=True).click()
        assert page.get_by_text('decay = "cosine"').is_visible()


@pytest.mark.capability("P1")
def test_two_runs_are_told_apart(
    browser: Browser, trained: Trained, trained_alone: Trained, tmp_path: Path
) -> None:
    path = tmp_path / "both.html"
    path.write_text(render_page([read_run(run.folder) for run in (trained, trained_alone)]), encoding="utf-8")
    with shown(browser, path) as page:
        names = {trained.folder.name, trained_alone.folder.name}
        legend = page.locator("figure").first.locator(".legend")
        assert names <= set(legend.locator("span").all_inner_texts())
        colors = legend.locator("i").evaluate_all(
            "keys => keys.map(k => getComputedStyle(k).backgroundColor)"
        )
        assert len(colors) == len(set(colors)) == 2
        lines = page.locator("figure").first.locator("path.line:not(.faint)")
        drawn = lines.evaluate_all("lines => lines.map(line => getComputedStyle(line).stroke)")
        assert set(drawn) == set(colors)


def labels_of(plot: Locator) -> list[str]:
    return plot.locator(".x:not(.left)").all_inner_texts()


@pytest.mark.capability("P1")
def test_a_stretch_that_is_dragged_over_is_shown_by_all_charts(browser: Browser, trained: Trained) -> None:
    with shown(browser, trained.folder / "report.html") as page:
        first, last = page.locator(".plot").first, page.locator(".plot").last
        before = labels_of(last)
        first.scroll_into_view_if_needed()
        box = first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.98 * box["width"], box["y"] + 60, steps=4)
        page.mouse.up()
        point_at(last, 0.0)
        said = page.locator("#tip b").inner_text()
        assert 0.4 * STEPS < int(said.split()[1]) < 0.7 * STEPS and labels_of(last) != before
        page.get_by_role("button", name="Whole run").click()
        assert labels_of(last) == before and not page.get_by_role("button", name="Whole run").is_visible()


@pytest.mark.capability("P1")
def test_the_axis_and_the_smoothing_can_be_chosen(browser: Browser, trained: Trained) -> None:
    samples = sum(step["num_samples"] for step in trained.of("step"))
    with shown(browser, trained.folder / "report.html") as page:
        plot = page.locator("figure", has=page.locator("h3", has_text="Step time")).locator(".plot")
        mean = plot.locator("path.line:not(.faint)")
        as_it_came = mean.get_attribute("d")
        page.locator(".controls input").fill("50")
        smoother = mean.get_attribute("d")
        assert spread(str(smoother)) < 0.7 * spread(str(as_it_came))
        page.get_by_label("Over").select_option("samples")
        point_at(plot, 1.0)
        said = page.locator("#tip b").inner_text()
        assert said == f"step {STEPS} · {samples:,}"
        page.get_by_label("Over").select_option("time")
        assert any(text.endswith(" s") for text in labels_of(plot))


def spread(path: str) -> float:
    """How far a drawn line goes up and down."""
    heights = [float(point.split()[1]) for point in path.removeprefix("M").split(" L")]
    return max(heights) - min(heights)


@pytest.mark.capability("P1")
def test_a_curve_can_be_switched_off_by_pointer_and_by_key(browser: Browser, trained: Trained) -> None:
    with shown(browser, trained.folder / "report.html") as page:
        figure = page.locator("figure").first
        key = figure.get_by_role("button", name="held-out")
        assert figure.locator("path.dot").count() > 0
        key.click()
        assert figure.locator("path.dot").count() == 0 and key.get_attribute("aria-pressed") == "false"
        key.press("Enter")
        assert figure.locator("path.dot").count() > 0


@pytest.mark.capability("P1")
def test_checkpoints_that_are_there_are_linked(browser: Browser, trained: Trained) -> None:
    there = sorted(path.name for path in (trained.folder / "checkpoints").glob("step-*"))
    with shown(browser, trained.folder / "report.html") as page:
        links = page.locator("a[href*='checkpoints/']")
        assert sorted(links.all_text_contents()) == there != []
        for link in links.all():
            place = (trained.folder / str(link.get_attribute("href"))).resolve()
            assert place.is_dir() and place.name in there


@pytest.mark.capability("P1")
def test_the_table_of_compared_runs_is_not_cut(
    browser: Browser, trained: Trained, trained_alone: Trained, tmp_path: Path
) -> None:
    path = tmp_path / "four.html"
    path.write_text(
        render_page([read_run(run.folder) for run in (trained, trained_alone)] * 2), encoding="utf-8"
    )
    with shown(browser, path) as page:
        assert page.locator(".facts").evaluate("t => t.scrollWidth <= t.clientWidth")


@pytest.mark.parametrize(
    ("scheme", "viewport"),
    [("light", WIDE), ("dark", PHONE), soak_param("light", PHONE), soak_param("dark", WIDE)],
    ids=["light-wide", "dark-phone", "light-phone", "dark-wide"],
)
def test_it_fits_the_screen_and_can_be_read_in_light_and_dark(
    browser: Browser, trained: Trained, viewport: dict[str, int], scheme: str
) -> None:
    options = {"viewport": viewport, "color_scheme": scheme}
    with shown(browser, trained.folder / "report.html", **options) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        paper, ink = (
            page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color")
        )
        assert (brightness(paper) > brightness(ink)) == (scheme == "light")
        assert abs(brightness(paper) - brightness(ink)) > 150
        for tile in page.locator(".tile").all():
            assert tile.evaluate("tile => tile.scrollWidth <= tile.clientWidth")


def brightness(color: str) -> float:
    """Of "rgb(r, g, b)", 0 to 255."""
    return sum(map(float, color.removeprefix("rgb(").removesuffix(")").split(","))) / 3
