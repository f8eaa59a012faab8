"""The pytest plugin of the test kit: `-p paceline.testing.plugin`.

It adds a fixture for every test that fails it by name if it leaves something behind, and cleans up for the
next one; the fixture `lab` (a cluster on this machine); the marks `capability(*ids)`, `gpu` (skipped without
an NVIDIA GPU) and `soak` (deselected without `--soak`); and `--capability-report=PATH`.

The report maps rows of the capability list to the tests that prove them, with their outcomes. A collected
test is in the report even if it never ran, and counts as failed if its set-up, call or tear-down failed. With
pytest-xdist the workers collect the marks, and the controller receives the outcomes and writes the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from paceline.testing.lab_fixture import lab, lab_obstacle
from paceline.testing.leaks import ResourceSnapshot, clean_up, find_leaks, take_snapshot

OutcomeName = Literal["not run", "passed", "skipped", "failed"]
_CAPABILITY_ROWS = "paceline-capabilities"
_OUTCOME_ORDER: dict[OutcomeName, int] = {"not run": 0, "passed": 1, "skipped": 2, "failed": 3}


class CapabilityReport:
    """A pytest plugin object that collects the `capability` marks and the outcomes of a run.

    Args:
        path: the JSON file to write: {"O1": [{"test": "tests/...::test_x", "outcome": "passed"}, ...], ...},
            sorted, with the outcomes "passed", "failed", "skipped" and "not run".
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, tuple[str, ...]] = {}
        self._outcomes: dict[str, OutcomeName] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the marks of every selected test."""
        for item in session.items:
            marks = item.iter_markers("capability")
            self._rows[item.nodeid] = tuple(sorted({str(row) for mark in marks for row in mark.args}))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receive the marks from a worker of pytest-xdist; each has collected all tests."""
        self._rows |= getattr(node, "workeroutput", {}).get(_CAPABILITY_ROWS, {})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of the set-up, call or tear-down of a test."""
        before = self._outcomes.get(report.nodeid, "not run")
        self._outcomes[report.nodeid] = max(before, report.outcome, key=_OUTCOME_ORDER.__getitem__)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file, or send the marks to the process that does."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_CAPABILITY_ROWS] = self._rows
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.render(), indent=1) + "\n", encoding="utf-8")

    def render(self) -> dict[str, list[dict[str, str]]]:
        """Return the content of the file."""
        return {
            row: list(self._tests(row))
            for row in sorted({row for rows in self._rows.values() for row in rows})
        }

    def _tests(self, row: str) -> Iterable[dict[str, str]]:
        for test in sorted(test for test, rows in self._rows.items() if row in rows):
            yield {"test": test, "outcome": self._outcomes.get(test, "not run")}


__all__ = ["lab", "lab_obstacle", "no_leaks"]

_MARKS = (
    "capability(*ids): the rows of the capability list that this test proves",
    "gpu: needs an NVIDIA GPU",
    "soak: long; runs only with --soak",
)

_LAST_SNAPSHOT = pytest.StashKey[ResourceSnapshot]()  # the state before the last test


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("paceline")
    group.addoption("--soak", action="store_true", help="run the tests with the mark soak as well")
    group.addoption("--capability-report", metavar="PATH", help="write which tests prove which capability")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks and the report."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)
    path = config.getoption("--capability-report")
    if path:
        config.pluginmanager.register(CapabilityReport(Path(path)), "paceline-capabilities")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is long, skip what needs a GPU that is not there."""
    if not config.getoption("--soak"):
        long = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
        if long:
            config.hook.pytest_deselected(items=long)
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _has_gpu():
        for item in gpu_tests:
            item.add_marker(
                pytest.mark.skip(reason="needs an NVIDIA GPU, torch.cuda.is_available() is False")
            )


def _has_gpu() -> bool:
    """Return whether PyTorch can use an NVIDIA GPU; without a driver torch is not imported."""
    drivers = ("nvidia*", "nvhost*", "nvgpu*", "dxg")  # the last one is for WSL
    if sys.platform == "linux" and not any(any(Path("/dev").glob(name)) for name in drivers):
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves behind a variable, a thread, a process, shared memory or a process group."""
    last = request.config.stash.get(_LAST_SNAPSHOT, None)
    before = request.config.stash[_LAST_SNAPSHOT] = take_snapshot(last)
    yield
    leaks = find_leaks(before)
    if leaks:
        clean_up(before)
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)
