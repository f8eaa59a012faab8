"""`paceline study privacy`: what ways of adding updates cost and hide, and what a sum still reveals.

It also scores rows under CKKS, where TenSEAL is installed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import common_options
from paceline.cli.console import error_output, output, print_json, print_plain
from paceline.errors import RecipeError

Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", help="Only this task: breast-cancer or digits. Repeatable.", show_default=False),
]


def study_privacy(
    tasks: Tasks = None,
    clients: Annotated[int, typer.Option("--clients", min=3, help="Clients, each a process.")] = 5,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of FedAvg.")] = 10,
    inputs: Annotated[int, typer.Option("--inputs", min=1, help="Digits to attack at each point.")] = 50,
    out: common_options.Out = None,
    as_json: common_options.AsJson = False,
) -> None:
    """Train two tasks in six ways of privacy, score encrypted rows, and attack the updates."""
    from paceline.studies.encrypted_scores import measure_inference, render_inference
    from paceline.studies.gradient_inversion import measure_curve
    from paceline.studies.privacy_spectrum import TASKS, render_privacy, run_spectrum

    unknown = sorted(set(tasks or ()) - set(TASKS))
    if unknown:
        raise RecipeError(f"unknown task '{unknown[0]}'", where="--task", next_step="breast-cancer or digits")
    folder = out or Path("studies") / "privacy"
    folder.mkdir(parents=True, exist_ok=True)
    console = error_output() if as_json else output()

    def report(line: str) -> None:
        print_plain(line, console)

    built = [TASKS[name]() for name in tasks or TASKS]
    rows = [
        row for task in built for row in run_spectrum(task, clients=clients, rounds=rounds, report=report)
    ]
    print_plain("inference under CKKS", console)
    inference = [row for task in built for row in measure_inference(task)]
    print_plain("gradient inversion", console)
    points = measure_curve(inputs)
    values = {
        "clients": clients,
        "rounds": rounds,
        "ways": [asdict(row) for row in rows],
        "inference": [asdict(row) for row in inference],
        "inversion": [
            {**asdict(point), "fraction": point.fraction, "epsilon": point.epsilon} for point in points
        ],
    }
    lines = render_privacy(rows, points)
    if inference:
        lines += ["", *render_inference(inference)]
    (folder / "results.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if as_json:
        print_json(values)
    for line in (*lines, f"table: {folder / 'table.md'}"):
        print_plain(line, console)
