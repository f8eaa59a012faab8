"""What the launcher knows of a failure goes into the folder of the run: the workers may be gone."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.console import output
from paceline.errors import RunFolderError
from paceline.launch import Outcome
from paceline.observe import JsonLines, TextLog
from paceline.report import write_report
from paceline.report.folder import LOG, METRICS, is_run


def record_failure(run_dir: Path, outcome: Outcome) -> None:
    """Write every failure, the cause first, to the metrics and the log, and the page of the run anew.

    Nothing is written where the run had no folder yet. A folder that cannot be written takes nothing from
    the report on the terminal, which has been shown.
    """
    if not is_run(run_dir):
        return
    try:
        _write(run_dir, outcome)
    except (OSError, RunFolderError) as error:
        output().print(f"the failure cannot be recorded in {run_dir}: {error}", markup=False, highlight=False)


def _write(run_dir: Path, outcome: Outcome) -> None:
    def say(text: str) -> None:
        output().print(f"the failure cannot be recorded in {run_dir}: {text}", markup=False, highlight=False)

    metrics, log = JsonLines(run_dir / METRICS, say=say), TextLog(run_dir / LOG, say=say)
    for failure in outcome.failures:
        text = f"rank {failure.global_rank} {failure.headline}"
        record = {"text": text, "kind": failure.kind, "exit_code": failure.exit_code}
        metrics.event("error", {"rank": failure.global_rank, **record})
    log.write("error", outcome.report)
    metrics.close()
    log.close()
    write_report(run_dir)
