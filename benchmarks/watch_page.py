"""How fast the live page is: 200 runs overlaid, and one run of ten million steps.

Real files are written (about 2 GB, removed afterwards), `paceline watch` is started on them, and the answers
of the server and the first drawing in headless Chromium are measured: at once after the start, while the
server is still reading the files, and when it has read them. A page is drawn when its chart has a line.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import Options, Report, Table, present

_NUM_RUNS, _NUM_STEPS = 200, 2000
_LONG_STEPS, _LONG_FILE_STEPS = 10_000_000, 400_000
_TOKEN = "benchmark"
_READ_SECONDS = 100.0  # how long a server may read before its rate is taken
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_DRAWN = """
const look = () => {
  const label = document.querySelector("canvas")?.getAttribute("aria-label") ?? "";
  if (/Last values: \\S/.test(label)) window.drawnAt = performance.now();
  else requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
# Shorter than a real record, which has twelve more fields, so that ten million need less than 2 GB.
_LONG_RECORD = (
    '{"event":"step","step":%d,"time":%d,"loss":%.4f,"metrics":{},"num_samples":8,"grad_norm":%.3f,'
    '"lr":0.01,"seconds":0.5,"samples_per_second":16,"applied":true}\n'
)
_START = {
    "event": "run",
    "step": 0,
    "time": 1.7e9,
    "parameters": 10,
    "gradient_bytes": 40,
    "tally_bytes": 8,
    "threads": 1,
    "pid": 0,
    "task": "digits",
    "strategy": "replicas=2",
    "devices": "cpu",
    "ranks": 2,
    "precision": "fp32",
    "host": "elsewhere",
    "versions": {},
    "ordered": True,
}


def write_run(folder: Path, num_steps: int, number: int) -> None:
    """Write a run whose steps have all their fields."""
    phases = dict.fromkeys(("data", "forward", "backward", "communication", "optimizer", "checkpoint"), 0.08)
    step = {
        "event": "step",
        "level": "info",
        "rank": 0,
        "epoch": 0,
        "metrics": {"accuracy": 0.5},
        "num_samples": 64,
        "num_items": 64.0,
        "lr": 0.01,
        "rates": {"0": 0.01},
        "applied": True,
        "loss_scale": 1.0,
        "stops": 0,
        "seconds": 0.5,
        "phases": phases,
        "sent_bytes": 0.0,
        "samples_per_second": 128.0,
    }
    folder.mkdir()
    (folder / "recipe.toml").write_text('task = "digits"\n', "utf-8")
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        file.write(json.dumps({**_START, "num_steps": num_steps}) + "\n")
        for k in range(num_steps):
            loss = (1 + number / 50) / (1 + k / 100) + 0.01 * (k % 7)
            moving = {"step": k, "time": 1.7e9 + k / 2, "loss": loss, "grad_norm": 1 / (1 + k)}
            file.write(json.dumps({**step, **moving}) + "\n")


def write_long_run(folder: Path, num_steps: int) -> None:
    """Write a run of many steps in files of about 64 MiB, with one spike of the loss."""
    folder.mkdir()
    (folder / "recipe.toml").write_text('task = "digits"\n', "utf-8")
    firsts = range(0, num_steps, _LONG_FILE_STEPS)
    for number, first in enumerate(firsts, 1):
        is_last = number == len(firsts)
        path = folder / ("metrics.jsonl" if is_last else f"metrics.{number:04d}.jsonl")
        with path.open("w", encoding="utf-8") as file:
            if first == 0:
                file.write(json.dumps({**_START, "num_steps": num_steps}) + "\n")
            for k in range(first, min(first + _LONG_FILE_STEPS, num_steps)):
                loss = 9.0 if k == num_steps // 3 else 2 / (1 + k / 1e5) + 0.01 * (k % 7)
                file.write(_LONG_RECORD % (k, 1_700_000_000 + k // 2, loss, 0.5))


@contextmanager
def watching(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yield the address of a server, its process, and the seconds until it listened."""
    began = time.monotonic()
    words = ["watch", str(folder), "--port", "0", "--token", _TOKEN]
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("paceline")), *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().rpartition(" at ")[2].partition("/?")[0]
        read(f"{address}/api/runs")
        yield address, process.pid, time.monotonic() - began
    finally:
        process.terminate()
        process.communicate(timeout=60)


def read(address: str) -> Any:
    """Return an answer of the server."""
    mark = "&" if "?" in address else "?"
    with urllib.request.urlopen(f"{address}{mark}token={_TOKEN}", timeout=120) as answer:
        return json.load(answer)


def seconds_of(call: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


def drawn_seconds(browser: Any, address: str, view: str) -> float:
    """Return the seconds from the navigation to the first drawing of a chart, in a new window."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.add_init_script(_DRAWN)
    page.goto(f"{address}/?token={_TOKEN}#{view}")
    expires = time.monotonic() + 120
    while (milliseconds := page.evaluate("window.drawnAt")) is None:
        if time.monotonic() > expires:
            raise TimeoutError("the page has drawn nothing")
        page.wait_for_timeout(20)
    context.close()
    return float(milliseconds) / 1000


def rows_per_second(address: str) -> tuple[float, bool]:
    """Return how many steps a second the server reads, and whether it has come to the end of all files."""
    began, first = time.monotonic(), _num_steps_read(address)
    while True:
        time.sleep(0.5)
        runs = read(f"{address}/api/runs")["runs"]
        is_read, seconds = all(run["read"] == 1 for run in runs), time.monotonic() - began
        if is_read or seconds > _READ_SECONDS:
            return (_num_steps_read(address) - first) / seconds, is_read


def _num_steps_read(address: str) -> int:
    return sum(run["steps_done"] for run in read(f"{address}/api/runs")["runs"])


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def measure_folder(browser: Any, folder: Path, parts: Sequence[tuple[str, str]]) -> dict[str, list[float]]:
    """Measure a server on a folder, with all runs overlaid.

    Args:
        parts: name and steps, as in a query, of parts of the curves that are looked at.
    Returns:
        Seconds by what was measured; and the memory of the server at the end, in bytes.
    """
    found: dict[str, list[float]] = {}
    with watching(folder) as (address, pid, started):
        found["start of the server"] = [started]
        keys = [run["id"] for run in read(f"{address}/api/runs")["runs"]]
        view = "curves=loss&runs=" + ",".join(keys)
        curves = f"{address}/api/curves?name=loss&" + "&".join(f"run={key}" for key in keys)
        points = round(min(800, max(80, 30_000 / len(keys))))

        def look(state: str, repeats: int) -> None:
            found[f"first drawing, {state}"] = [drawn_seconds(browser, address, view) for _ in range(repeats)]
            found[f"list of runs, {state}"] = [
                seconds_of(lambda: read(f"{address}/api/runs")) for _ in range(repeats)
            ]
            for name, steps in parts:
                found[f"{name}, {state}"] = [
                    seconds_of(lambda: read(f"{curves}&points={points}{steps}"))  # noqa: B023, called here
                    for _ in range(repeats)
                ]

        look("while files are read", 3)
        rate, is_read = rows_per_second(address)
        found["thousand rows read per second"] = [rate / 1000]
        look("when all is read" if is_read else f"after {_READ_SECONDS:g} s more", 5)
        found["memory"] = [resident_bytes(pid)]
        print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def _table(title: str, found: dict[str, list[float]]) -> Table:
    rows = [
        (
            name,
            f"{statistics.median(values):.3f}",
            f"{min(values):.3f} .. {max(values):.3f}",
            str(len(values)),
        )
        for name, values in found.items()
        if name != "memory"
    ]
    remark = f"resident memory of the server at the end: {found['memory'][0] / 2**20:.0f} MiB"
    return Table(title, ("what", "median, s", "min .. max", "times"), rows, (remark,))


def measure(options: Options) -> Report:
    """Write the runs and measure both folders."""
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, _CHROMIUM)))
    num_runs = 20 if options.quick else _NUM_RUNS
    long_steps = 100_000 if options.quick else _LONG_STEPS
    tables, data = [], {}
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as name:
        browser = driver.chromium.launch(executable_path=executable, args=["--disable-gpu"])
        folder = Path(name)
        (folder / "many").mkdir()
        (folder / "long").mkdir()
        for number in range(num_runs):
            write_run(folder / "many" / f"run-{number:03d}", _NUM_STEPS, number)
        title = f"{num_runs} runs of {_NUM_STEPS} steps, all overlaid"
        data[title] = measure_folder(browser, folder / "many", [("curves", "")])
        tables.append(_table(title, data[title]))
        shutil.rmtree(folder / "many")
        write_long_run(folder / "long" / "run", long_steps)
        middle = long_steps // 3
        parts = [("curve", ""), ("500 steps", f"&first={middle}&end={middle + 500}")]
        title = f"one run of {long_steps:,} steps"
        data[title] = measure_folder(browser, folder / "long", parts)
        tables.append(_table(title, data[title]))
        browser.close()
    question = (
        "How fast is the live page? Allowed: 200 runs in 2 s, first drawing of ten million rows in 1 s."
    )
    return Report(question, tables, data)


if __name__ == "__main__":
    present(measure, __doc__ or "")
