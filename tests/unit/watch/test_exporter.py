"""A scrape is valid for the client's parser, and has what the records say; the exporter ends with the job."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from paceline.errors import RecipeError
from paceline.recipe import Recipe
from paceline.session.companion_processes import MetricsExporter
from paceline.watch.metric_catalog import METRICS_BY_NAME
from tests.unit.watch.records import append, rank_records, run_record, step_record

pytest.importorskip("prometheus_client", reason="needs paceline[prometheus]")
from prometheus_client.parser import text_string_to_metric_families

SECONDS = 60.0
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(address: str) -> Series:
    """Return values by name and labels."""
    expires = time.monotonic() + SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=SECONDS) as answer:
                text = answer.read().decode()
            break
        except OSError:  # it is still importing
            assert time.monotonic() < expires
            time.sleep(0.1)
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found and sample.name in METRICS_BY_NAME
            found[key] = sample.value
    return found


@pytest.mark.capability("P3")
def test_a_scrape_has_the_values_of_the_records(tmp_path: Path) -> None:
    """Counters never fall: not by a resume, nor by a new exporter; every rank has its series."""
    run = tmp_path / 'a "run"\\'
    run.mkdir()
    (run / "recipe.toml").write_text('task = "digits"\n')
    append(run, run_record(ranks=2), *(step_record(k, loss=2.0 / (k + 1), f1=0.5) for k in range(4)))
    append(run, *rank_records(3, (1.0, 2.0)))
    exporter = MetricsExporter(run, "127.0.0.1:0")
    label = ("run", run.name)
    try:
        first = scrape(exporter.address)
        assert first["paceline_samples_total", (label,)] == 32 and first["paceline_loss", (label,)] == 0.5
        assert first["paceline_metric", (("metric", "f1"), label)] == 0.5
        assert first["paceline_rank_seconds_total", (("rank", "1"), label)] == 4.0
        assert first["paceline_status", (label, ("status", "unknown"))] == 1
        ranks = [labels for _, labels in first if ("rank", "1") in labels]
        assert 8 <= len(ranks) <= 200
        append(run, run_record(step=2), step_record(2, loss="nan"))
        second = scrape(exporter.address)
        assert second["paceline_samples_total", (label,)] == 40
        assert math.isnan(second["paceline_loss", (label,)])
    finally:
        exporter.close()
    again = MetricsExporter(run, exporter.address)  # the same port, at once
    try:
        third = scrape(again.address)
    finally:
        again.close()
    for key, value in first.items():
        if key[0].endswith("_total"):
            assert value <= second[key] <= third[key]
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{again.address}/metrics", timeout=SECONDS)


def test_an_exporter_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from paceline.session.companion_processes import MetricsExporter\n"
        "e = MetricsExporter(Path(sys.argv[1]), '127.0.0.1:0'); print(e._process.pid, flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    expires = time.monotonic() + SECONDS
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < expires
        time.sleep(0.1)


def test_a_wrong_address_or_a_port_in_use_is_named(tmp_path: Path) -> None:
    for text in ("9400", "host", "host:", ":9400", "host:99999", "host:x", "host:-1"):
        with pytest.raises(RecipeError, match="expected HOST:PORT"):
            Recipe(task="digits", steps=1, log={"prometheus": text})
    exporter = MetricsExporter(tmp_path, "127.0.0.1:0")
    try:
        with pytest.raises(RecipeError, match=r"cannot listen at 127\.0\.0\.1") as caught:
            MetricsExporter(tmp_path, exporter.address)
        assert "port 0" in caught.value.next_step
    finally:
        exporter.close()
