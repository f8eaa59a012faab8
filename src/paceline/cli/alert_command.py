"""`paceline alerts`: the alerts of runs and the diagnosis, from their folders, and their delivery."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import error_output, print_json, print_plain
from paceline.errors import DataError

if TYPE_CHECKING:
    from paceline.watch.alert_rules import AlertRule
    from paceline.watch.alerts import Alert, AlertTarget
    from paceline.watch.run_watch import RunWatch

_LOOK_SECONDS = 1.0
_CLOSE_SECONDS = 15.0


def alerts(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or folders that contain some. Default: runs/.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until Ctrl-C; print each change.")] = False,
    webhook: Annotated[
        str | None, typer.Option(help="URL that alerts are posted to, as JSON.", show_default=False)
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help="Command that runs for each alert, which is its input.", show_default=False),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="TOML file of changed and further rules.", show_default=False)
    ] = None,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print the rules for Prometheus and exit.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; with --follow one alert a line.")
    ] = False,
) -> None:
    """Print alerts about runs and why a run is slow; deliver them to a webhook or a command."""
    from paceline.watch.alert_rules import SHIPPED_RULES, read_rules

    chosen = read_rules(rules) if rules is not None else SHIPPED_RULES
    runs = _Runs(folders, chosen)
    if prometheus:
        from paceline.watch.promql import render_prometheus

        sys.stdout.write(render_prometheus(chosen, _step_seconds(runs.find()) or 1.0))
        return
    targets = _targets(webhook, command)
    try:
        if not follow:
            _print_runs(runs.find(), targets, as_json=as_json)
            return
        _follow(runs, targets, as_json=as_json)
    finally:
        for target in targets:
            target.close(_CLOSE_SECONDS)


class _Runs:
    """The runs in some folders, read up to now.

    Args:
        folders: as the user names them; None: runs/, which need not exist yet.
        rules: what is judged.
    """

    def __init__(self, folders: list[Path] | None, rules: Sequence[AlertRule]) -> None:
        self._folders, self._rules = folders, rules
        self._runs: dict[Path, RunWatch] = {}

    def find(self) -> list[RunWatch]:
        """Find the runs, and read all that is new."""
        from paceline.report.run_files import RUNS, find_runs
        from paceline.watch.run_watch import RunWatch

        for path in find_runs(self._folders or ([RUNS] if RUNS.is_dir() else [])):
            self._runs.setdefault(path, RunWatch(path, self._rules))
        for run in self._runs.values():
            run.update()
            while not run.is_complete:
                run.update()
        return list(self._runs.values())


def _print_runs(runs: Sequence[RunWatch], targets: Sequence[AlertTarget], *, as_json: bool) -> None:
    rows = []
    for run in runs:
        findings, firing = _diagnose(run), run.alerts.firing
        past = [alert for alert in run.alerts.drain() if alert.state == "resolved"]
        for target in targets:
            for alert in firing:
                target.send(_record(run, alert))
        rows.append(
            {
                "run": str(run.folder),
                "status": run.status,
                "alerts": [_record(run, alert) for alert in (*firing, *past)],
                "diagnosis": [{**finding._asdict(), "sentence": finding.sentence} for finding in findings],
            }
        )
        if as_json:
            continue
        print_plain(f"{run.folder} ({run.status}): {len(firing)} firing, {len(past)} resolved")
        for alert in (*firing, *past):
            print_plain(f"  {_line(alert)}")
        for finding in findings:
            print_plain(f"  diagnosis: {finding.sentence}")
    if as_json:
        print_json(rows)
    elif not runs:
        print_plain("no runs")


def _follow(runs: _Runs, targets: Sequence[AlertTarget], *, as_json: bool) -> None:
    known: set[Path] = set()
    with suppress(KeyboardInterrupt):
        while True:
            for run in runs.find():
                changes = run.alerts.drain()
                if run.folder not in known:  # its past is no news
                    known.add(run.folder)
                    changes = run.alerts.firing
                _send([(run, alert) for alert in changes], targets, as_json=as_json)
            sys.stdout.flush()
            time.sleep(_LOOK_SECONDS)


def _send(
    changes: Sequence[tuple[RunWatch, Alert]], targets: Sequence[AlertTarget], *, as_json: bool
) -> None:
    for run, alert in changes:
        record = _record(run, alert)
        if as_json:
            print_plain(json.dumps(record))
        else:
            print_plain(f"{run.folder.resolve().name}: {_line(alert)}")
        for target in targets:
            target.send(record)


def _record(run: RunWatch, alert: Alert) -> dict[str, Any]:
    return {"run": run.folder.resolve().name, **alert.record()}


def _line(alert: Alert) -> str:
    moment = f"{datetime.fromtimestamp(alert.time):%Y-%m-%d %H:%M:%S}"
    advice = f"; {alert.rule.advice}" if alert.state == "firing" and alert.rule.advice else ""
    severity = alert.rule.severity if alert.state == "firing" else alert.state
    return f"{moment}  {severity}  {alert.rule.name} at step {alert.step}: {alert.text}{advice}"


def _diagnose(run: RunWatch) -> list[Any]:
    from paceline.report.run_reader import read_run
    from paceline.watch.alerts import read_host
    from paceline.watch.bottlenecks import diagnose, read_host_facts

    recorded = read_run(run.folder)
    records = list(recorded.last_training_records)
    if run.status == "running":
        records.append(read_host(run.folder, with_memory=True))
    return diagnose(records, read_host_facts(recorded.start))


def _step_seconds(runs: Sequence[RunWatch]) -> float | None:
    """Return the seconds of a step of the newest run that has taken one."""
    found = [seconds for run in runs if (seconds := run.values.value("paceline_step_seconds"))]
    return found[-1] if found else None


def _targets(url: str | None, words: str | None) -> list[AlertTarget]:
    """Return the targets that the user names.

    Raises:
        DataError: one of them cannot be used.
    """
    from paceline.watch.alerts import AlertTarget, command, webhook

    def report(text: str) -> None:
        print_plain(text, error_output())

    if url is not None and not url.startswith(("http://", "https://")):
        raise DataError(f"'{url}' is no URL of a webhook", next_step="write --webhook https://HOST/PATH")
    try:
        split = shlex.split(words) if words is not None else []
    except ValueError as error:
        raise DataError(
            f"cannot split the command: {error}", next_step="close the quotes of --command"
        ) from error
    if words is not None and not split:
        raise DataError("the command is empty", next_step='write --command "PROGRAM ARGUMENTS"')
    targets = []
    if url is not None:
        targets.append(AlertTarget("the webhook", webhook(url), report))
    if split:
        targets.append(AlertTarget("the command", command(split), report, retries=0))
    return targets
