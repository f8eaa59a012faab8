"""A report of a machine has what the system says, names each slow path, and is compared with another one."""

from __future__ import annotations

import copy
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli.main import build_app
from paceline.errors import DataError
from paceline.tuning.machine_benchmark import (
    MachineNumber,
    MachineReport,
    load_report,
    measure_machine,
    render_comparison,
    render_report,
)
from paceline.tuning.machine_facts import describe_machine, find_slow_paths

FAST: Mapping[str, Any] = {
    "cpu": {
        "architecture": "x86_64",
        "machine_cores": 8,
        "usable_cores": 8,
        "why": "8 cores",
        "throttled_periods": 0,
        "threads": 8,
        "load": 0.5,
        "governor": "performance",
        "kernels": "AVX512",
    },
    "memory": {"huge_pages": "madvise", "shm_bytes": 2**33},
    "number_formats": {"cpu": {"bf16": True}},
    "libraries": {"mkl": "MKL", "onednn": "oneDNN"},
    "has_nvidia_driver": False,
    "gpus": [],
}
FAST_NUMBERS = {
    "matmul.cpu.fp32": 800.0,
    "matmul.cpu.fp32.one_thread": 110.0,
    "matmul.cpu.bf16": 2000.0,
    "disk.write": 1.5,
    "disk.sync": 90.0,
}


@pytest.mark.capability("K6", "U4")
def test_the_facts_are_those_of_the_system(tmp_path: Path) -> None:
    facts = describe_machine(tmp_path)
    assert json.loads(json.dumps(facts)) == facts
    flags = Path("/proc/cpuinfo").read_text("utf-8").split()
    assert set(facts["cpu"]["features"]) <= set(flags)
    assert facts["cpu"]["machine_cores"] == os.cpu_count()
    assert facts["cpu"]["usable_cores"] <= len(os.sched_getaffinity(0))
    assert facts["cpu"]["threads"] == torch.get_num_threads()
    libraries = facts["libraries"]
    assert libraries["torch"] == torch.__version__ and libraries["gloo"]
    assert bool(libraries["mkl"]) == torch.backends.mkl.is_available()
    assert bool(libraries["onednn"]) == torch.backends.mkldnn.is_available()
    assert f"BLAS_INFO={libraries['blas']}" in torch.__config__.show()
    formats = facts["number_formats"]["cpu"]
    assert set(formats) == {"bf16", "fp16", "int8"}
    assert formats["bf16"] == any(name in flags for name in ("avx512_bf16", "amx_bf16", "bf16"))
    assert facts["kernels"]["fused AdamW (cpu)"] is True
    assert len(facts["gpus"]) == torch.cuda.device_count()
    find_slow_paths(facts, {})


@pytest.mark.parametrize(
    ("group", "key", "value", "words"),
    [
        ("cpu", "usable_cores", 2, "2 of 8 cores can be used"),
        ("cpu", "throttled_periods", 7, "stopped in 7 periods"),
        ("cpu", "threads", 1, "PyTorch uses 1 of 8 cores"),
        ("cpu", "load", 30.0, "load average is 30.0"),
        ("cpu", "governor", "powersave", "governor is powersave"),
        ("cpu", "kernels", "DEFAULT", "without AVX2"),
        ("memory", "huge_pages", "never", "huge pages are off"),
        ("memory", "shm_bytes", 2**26, "/dev/shm has 64 MiB"),
        ("libraries", "mkl", "", "without MKL"),
        ("libraries", "onednn", "", "without oneDNN"),
        ("number_formats", "cpu", {"bf16": False}, "takes 0.4 times as long as in fp32"),
        ("has_nvidia_driver", "", True, "PyTorch uses no GPU"),
        ("", "disk.write", 0.02, "writes 20 MB a second"),
        ("", "disk.sync", 80_000.0, "takes 80 ms to sync"),
        ("", "matmul.cpu.fp32", 200.0, "8 threads are 1.8 times as fast as one"),
    ],
)
def test_each_slow_path_is_named_and_nothing_else(group: str, key: str, value: Any, words: str) -> None:
    facts, numbers = copy.deepcopy(dict(FAST)), dict(FAST_NUMBERS)
    assert find_slow_paths(facts, numbers) == []
    if not group:
        numbers[key] = value
    elif not key:
        facts[group] = value
    else:
        facts[group][key] = value
    found = find_slow_paths(facts, numbers)
    assert any(words in text for text in found), found
    # The kernels of a limited processor and a limited number of cores have no further consequence here.
    assert len(found) == 1


@pytest.mark.capability("P14", clause="one process")
def test_a_machine_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    lines: list[str] = []

    def fail() -> Mapping[str, MachineNumber]:
        raise RuntimeError("no second process")

    report = measure_machine(tmp_path, fail, lines.append)
    assert list(tmp_path.iterdir()) == [] and any("matrix products on cpu" in line for line in lines)
    parts = {name.split(".")[0] for name in report.measured}
    assert parts <= {"matmul", "memory", "disk"} and "matmul" in parts
    assert all(number.value > 0 for number in report.measured.values())
    assert "no second process" in report.not_measured["collectives of two processes"] or any(
        "busy" in why for why in report.not_measured.values()
    )
    console = Console(width=200, record=True, file=io.StringIO())
    for part in render_report(report):
        console.print(part)
    text = console.export_text()
    assert torch.__version__ in text and "matmul.cpu.fp32" in text
    path = tmp_path / "a.json"
    path.write_text(json.dumps(report.record()), "utf-8")
    assert load_report(path) == report


def report_of(host: str, **numbers: MachineNumber) -> MachineReport:
    facts = {"cpu": {"model": host, "load": len(host)}, "gpus": [], "memory": {"total_bytes": 2**30}}
    return MachineReport(host, 1.0, facts, numbers, [], {})


def test_two_reports_are_compared_by_how_fast_they_are(tmp_path: Path) -> None:
    """A rate that doubles and a time that halves are both twice as fast."""
    rate, latency = MachineNumber(10.0, "GB/s"), MachineNumber(50.0, "us", is_rate=False)
    first = report_of("old", copy=rate, latency=latency, only_here=rate)
    second = report_of("newer", copy=MachineNumber(20.0, "GB/s"), latency=MachineNumber(25.0, "us", False))
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(report.record()), "utf-8")
    words = ["bench", "machine", *map(str, paths)]
    done = CliRunner().invoke(build_app(words), [*words, "--json"])
    assert done.exit_code == 0
    assert json.loads(done.output) == {
        "times_as_fast": {"copy": 2.0, "latency": 2.0},
        "facts": {"cpu.model": ["old", "newer"]},
    }
    assert len(list(render_comparison(first, second))) == 2
    done = CliRunner().invoke(build_app(words), words)
    assert done.exit_code == 0 and "2.00" in done.output


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    good = report_of("a", copy=MachineNumber(1.0, "GB/s")).record()
    path = tmp_path / "report.json"
    for text in (
        "",
        "[]",
        "{}",
        json.dumps({**good, "schema": 99}),
        json.dumps({**good, "measured": {"copy": {"value": 0.0, "unit": "GB/s", "is_rate": True}}}),
        json.dumps({**good, "unknown": 1}),
    ):
        path.write_text(text, "utf-8")
        with pytest.raises(DataError, match=r"report\.json' is no report of a machine"):
            load_report(path)
    words = ["bench", "machine", str(path)]
    done = CliRunner().invoke(build_app(words), words)
    assert isinstance(done.exception, DataError) and "two" in str(done.exception)
