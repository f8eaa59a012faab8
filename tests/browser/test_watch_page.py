"""The live page in a real browser: what it draws, that it follows a run, and how it is used."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.observe.rank_activity import RankActivity
from tests.marks import soak_param
from tests.unit.watch.records import append, rank_records, run_record, step_record
from tests.unit.watch.serving import TOKEN, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
# How many pixels of a chart are painted, and the hash of them.
PAINTED = """canvas => {
    const {width, height} = canvas, data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
    let painted = 0, hash = 0;
    for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3]) { painted += 1; hash = (hash * 31 + i + data[i]) | 0; }
    }
    return [painted, hash];
}"""


@contextmanager
def opened(browser: Browser, address: str, link: str = "", **options: Any) -> Iterator[Page]:
    """Open the page; an error in it, or a request to another origin, fails the test."""
    wrong: list[str] = []
    context = browser.new_context(viewport=options.pop("viewport", WIDE), **options)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on(
        "request",
        lambda one: None if one.url.startswith((address, "data:", "blob:")) else wrong.append(one.url),
    )
    page.goto(f"{address}/?token={TOKEN}{link}")
    page.locator("#runs li").first.wait_for()
    yield page
    context.close()
    assert wrong == []


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, rate in (("first", 1.0), ("second", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.toml").write_text('task = "digits"\nsteps = 100\n')
        steps = [step_record(k, loss=rate / (k + 1), accuracy=0.5) for k in range(40)]
        append(folder, run_record(ranks=2), *steps, *rank_records(39, (1.0, 3.0)))
        append(folder, {"event": "warning", "level": "warning", "rank": 0, "time": 9.0, "text": "<i>x</i>"})
    return tmp_path


def painted(page: Page, name: str = "loss") -> list[int]:
    return page.locator(f'figure[data-name="{name}"] canvas').evaluate(PAINTED)


def wait_for_change(page: Page, before: list[int], name: str = "loss") -> list[int]:
    expires = time.monotonic() + 60
    while (now := painted(page, name)) == before:
        assert time.monotonic() < expires
        page.wait_for_timeout(50)
    return now


@pytest.mark.capability("P17", clause="a page in a browser")
def test_a_run_is_drawn_and_followed(browser: Browser, runs: Path) -> None:
    with served(runs) as address, opened(browser, address) as page:
        assert sorted(page.locator("#runs button").all_inner_texts()) == ["first", "second"]
        before = wait_for_change(page, [0, 0])
        assert before[0] > 500
        page.get_by_role("button", name="first").click()
        assert "40 of 100" in page.locator("#facts").inner_text()
        rows = page.locator("#ranks tbody tr")
        assert [row.locator("td").nth(2).inner_text() for row in rows.all()] == ["1000", "3000"]
        assert (
            rows.nth(1)
            .locator("svg")
            .get_attribute("aria-label")
            .startswith("data 0 %, forward 0 %, backward 50 %")
        )
        rank = RankActivity()
        rank.step = 40
        rank.open(runs / "first", 1, 2, 100)
        rank.enter("forward", time.perf_counter() - 30)
        rows.nth(1).get_by_text("forward of step 40, for 3").wait_for()
        rank.close()
        assert "warning: rank 0 text <i>x</i>" in page.locator("#events").inner_text()
        append(runs / "first", *(step_record(k, loss=5.0) for k in range(40, 60)))
        wait_for_change(page, before)
        page.get_by_text("60 of 100").wait_for()
        page.locator("#search").fill("no such")
        page.locator("#events li").first.wait_for(state="detached")


@pytest.mark.capability("P17", clause="samples, alerts, checkpoints, certificate, links and lost ranks")
def test_all_that_is_known_about_a_run_is_shown(browser: Browser, runs: Path) -> None:
    folder = runs / "first"
    append(
        folder,
        *(step_record(k, loss=1.0) for k in range(40, 59)),
        *(step_record(k, loss=50.0) for k in (59, 60)),
    )
    append(
        folder,
        *(step_record(k, loss=1.0) for k in range(61, 79)),
        *(step_record(k, loss="nan") for k in (79, 80)),
    )
    append(folder, {"event": "checkpoint", "time": 1080.0, "step": 80, "path": "checkpoints/step-80"})
    append(folder, {"event": "lost", "level": "warning", "rank": 1, "time": 1080.0, "reason": "killed"})
    append(folder, {"event": "lost", "level": "warning", "rank": 7, "time": 1080.0, "reason": "early"})
    (folder / "certificate.json").write_text('{"conclusion": "equal to the oracle"}')
    process = {"event": "process", "rank": 0, "seconds": 2.0, "cpu_seconds": {"user": 3.0, "system": 1.0}}
    process |= {"memory_bytes": {"rss": 2**30}, "link_sent_bytes": {"1": 2**21}, "link_retransmits": {"1": 3}}
    process |= {"link_received_bytes": {"1": 2**11}, "link_round_trip_seconds": {"1": 0.0125}}
    host = {"event": "system", "rank": 0, "host": "node-a", "seconds": 2.0, "cores": 2}
    host |= {"cpu_seconds": {"user": 3.0, "idle": 1.0}, "memory_bytes": {"total": 2**31, "available": 2**30}}
    host |= {"network_sent_bytes": {"lo": 2**21}, "network_received_bytes": {"lo": 0}}
    host |= {"disk_read_bytes": {}, "disk_written_bytes": {"vda": 2**11}, "gpu_utilization": {}}
    host |= {"unavailable": {"energy": "only root may read it", "gpu": "NVML finds no GPU"}}
    samples = [{**one, "time": 1000.0 + 10 * k} for k in range(9) for one in (process, host)]
    (folder / "system.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    with served(runs) as address, opened(browser, address, "#curves=rank.0.cpu_cores") as page:
        page.get_by_role("button", name="first").click()
        page.get_by_text("Alerts: 1 firing, 1 resolved").click()
        assert wait_for_change(page, [0, 0], "rank.0.cpu_cores")[0] > 500
        page.locator("#names summary").click()
        for name in ("memory_fraction", "network_bytes_per_second", "disk_bytes_per_second"):
            page.locator(f'input[value="host.node-a.{name}"]').check()
            wait_for_change(page, [0, 0], f"host.node-a.{name}")
        cpu = page.locator('figure[data-name="rank.0.cpu_cores"] canvas').get_attribute("aria-label")
        assert cpu == "Curves of rank.0.cpu_cores. Last values: first 2"
        firing = page.locator("#alerts li").all_inner_texts()
        assert len(firing) == 1 and firing[0].startswith("loss-spike since step 79")
        history = page.locator("#alert-list li").all_inner_texts()
        assert [text.partition(" at step ")[0].split()[-2:] for text in history] == [
            [state, "loss-spike"] for state in ("firing", "resolved", "firing")
        ]
        cells = page.locator("#hosts tbody td").all_inner_texts()
        assert cells[:5] == ["node-a", "75 %", "50 %", "1 MiB/s", "1 KiB/s"]
        assert cells[5:] == ["unavailable: NVML finds no GPU", "unavailable: only root may read it"]
        assert page.locator("#links tbody td").all_inner_texts() == [
            "0 to 1",
            "1 MiB/s",
            "1 KiB/s",
            "3",
            "12.5",
        ]
        assert "step 80: checkpoints/step-80" in page.locator("#checkpoints").inner_text()
        facts = page.locator("#facts").inner_text()
        assert "equal to the oracle" in facts and "step 80" in facts
        rows = page.locator("#ranks tbody tr")
        assert [rows.nth(n).locator("td").nth(7).inner_text() for n in (1, 2)] == [
            "lost: killed",
            "lost: early",
        ]
        page.locator("#level").select_option("warning")
        page.locator("#search").fill("killed")
        page.locator("#events li").nth(1).wait_for(state="detached")
        assert "reason killed" in page.locator("#events li").inner_text()


def test_a_view_is_changed_by_pointer_and_keys_and_restored_by_its_link(browser: Browser, runs: Path) -> None:
    with served(runs) as address:
        with opened(browser, address) as page:
            whole = wait_for_change(page, [0, 0])
            canvas = page.locator('figure[data-name="loss"] canvas')
            box = canvas.bounding_box()
            assert box is not None
            page.mouse.move(box["x"] + 120, box["y"] + 90)
            page.mouse.down()
            page.mouse.move(box["x"] + 260, box["y"] + 90, steps=4)
            page.mouse.up()
            page.wait_for_function("location.hash.includes('first=')")
            zoomed = wait_for_change(page, whole)
            canvas.focus()
            page.keyboard.press("ArrowRight")
            wait_for_change(page, zoomed)
            page.keyboard.press("0")
            page.wait_for_function("!location.hash.includes('first=')")
            page.locator("#names summary").click()
            page.locator('input[value="metrics.accuracy"]').check()
            page.locator('figure[data-name="metrics.accuracy"]').wait_for()
            page.get_by_label("Log scale").check()
            page.get_by_label("Draw first").uncheck()
            page.wait_for_function("location.hash.includes('runs=') && location.hash.includes('log=1')")
            link = page.evaluate("location.hash")
            with page.expect_download() as saved:
                page.locator('figure[data-name="loss"] button').click()
            assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")
            with page.expect_download() as saved:
                page.locator("#csv").click()
            text = Path(saved.value.path()).read_text()
            assert text.count("second,loss,") == 40 and "first,loss" not in text and "accuracy" in text
        with opened(browser, address, link) as page:
            page.locator('figure[data-name="metrics.accuracy"]').wait_for()
            assert page.get_by_label("Log scale").is_checked()
            assert not page.get_by_label("Draw first").is_checked()
            assert page.get_by_label("Draw second").is_checked()


@pytest.mark.parametrize(
    ("viewport", "scheme"), [soak_param(PHONE, "dark"), (PHONE, "light"), (WIDE, "dark")]
)
def test_it_fits_a_phone_and_has_a_dark_mode(
    browser: Browser, runs: Path, viewport: Any, scheme: Any
) -> None:
    look = {"viewport": viewport, "color_scheme": scheme}
    with served(runs) as address, opened(browser, address, **look) as page:
        wait_for_change(page, [0, 0])
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 16, 20)"
        assert dark == (scheme == "dark")


def test_a_server_that_ends_is_seen(browser: Browser, runs: Path) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        with served(runs) as address:
            page.goto(f"{address}/?token={TOKEN}")
            page.get_by_text("live", exact=True).wait_for(timeout=60_000)
        page.get_by_text("disconnected").wait_for(timeout=60_000)
