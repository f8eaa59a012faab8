"""Which tests prove which rows of the capability list, and how they ended; written as JSON.

With pytest-xdist its workers know the marks, and send them; its controller hears the outcomes, and writes.

Invariant: a test that was collected is in the report, also if it never ran; one part that failed (set-up,
call, tear-down) makes the whole test failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pytest

Verdict = Literal["not run", "passed", "skipped", "failed"]
_ROWS = "paceline-capabilities"
_WEIGHT: dict[Verdict, int] = {"not run": 0, "passed": 1, "skipped": 2, "failed": 3}


class CapabilityReport:
    """Collects the `capability` marks of a run; a pytest plugin object.

    Args:
        path: of the JSON file: {"O1": [{"test": "tests/...::test_x", "outcome": "passed"}, ...], ...},
            sorted, with the outcomes "passed", "failed", "skipped" and "not run".
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, tuple[str, ...]] = {}
        self._verdicts: dict[str, Verdict] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the marks of every selected test."""
        for item in session.items:
            marks = item.iter_markers("capability")
            self._rows[item.nodeid] = tuple(sorted({str(row) for mark in marks for row in mark.args}))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the marks from a worker of pytest-xdist; each has collected all tests."""
        self._rows |= getattr(node, "workeroutput", {}).get(_ROWS, {})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how one part of a test ended."""
        before = self._verdicts.get(report.nodeid, "not run")
        self._verdicts[report.nodeid] = max(before, report.outcome, key=_WEIGHT.__getitem__)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file, or tell the process that will."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_ROWS] = self._rows
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.render(), indent=1) + "\n", encoding="utf-8")

    def render(self) -> dict[str, list[dict[str, str]]]:
        """The content of the file."""
        return {
            row: list(self._tests(row))
            for row in sorted({row for rows in self._rows.values() for row in rows})
        }

    def _tests(self, row: str) -> Iterable[dict[str, str]]:
        for test in sorted(test for test, rows in self._rows.items() if row in rows):
            yield {"test": test, "outcome": self._verdicts.get(test, "not run")}
