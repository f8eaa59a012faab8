"""Task files that SkyPilot's own library reads, and our commands, which its own command line parses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.main import build_app

sky = pytest.importorskip("sky", reason="needs SkyPilot: pip install skypilot, in an environment of its own")

pytestmark = pytest.mark.soak

KEY = "0123456789abcdef"
RECIPE = (
    'task = "sum"\nsteps = 4\n[batch]\nsize = 8\nshards = 8\n[runtime]\ndevice = "{device}"\nthreads = 2\n'
)


def submit(folder: Path, *more: str, device: str = "cpu") -> str:
    """Run `paceline submit --on sky` for two nodes of two processes; returns what it printed."""
    (folder / "sum.toml").write_text(RECIPE.format(device=device))
    words = ["submit", "sum.toml", "--on", "sky", "--name", "sum-1", "--nodes", "2", "-n", "2"]
    words += ["--strategy", "replicas=4", "--option", "bucket=my-runs", *more]
    done = CliRunner().invoke(build_app(), words)
    assert done.exit_code == 0, done.output
    return done.output


def task_of(text: str) -> Any:
    """The task as SkyPilot reads it, with the key that `paceline submit` gives to it."""
    return sky.Task.from_yaml_config(yaml.safe_load(text), secrets_overrides=[("PACELINE_TOKEN", KEY)])


@pytest.mark.capability("O8")
def test_skypilot_accepts_the_task_file_and_finds_mistakes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    submit(tmp_path, "--render", "cpu")
    file = Path("cpu/sum-1.yaml")
    assert sky.Task.from_yaml(str(file)).name == "sum-1"
    task = task_of(file.read_text())
    assert task.num_nodes == 2 and set(task.storage_mounts) == {"/runs"}
    (resources,) = task.resources
    assert resources.cpus == "4+" and not resources.use_spot and not resources.accelerators
    assert "--auto-resume" in task.run and "replicas=4" in task.run
    assert [*task.secrets] == ["PACELINE_TOKEN"]
    constants = sky.skylet.constants
    variables = {constants.SKYPILOT_NUM_NODES, constants.SKYPILOT_NODE_RANK, constants.SKYPILOT_NODE_IPS}
    assert set(re.findall(r"SKYPILOT_\w+", task.run)) == variables

    options = ("gpu=A100", "spot=yes", "infra=gcp/us-central1")
    more = [word for option in options for word in ("--option", option)]
    submit(tmp_path, *more, "--render", "gpu", device="cuda")
    text = Path("gpu/sum-1.yaml").read_text()
    (resources,) = task_of(text).resources
    assert resources.use_spot and resources.accelerators == {"A100": 2}
    assert (str(resources.cloud), resources.region) == ("GCP", "us-central1")
    assert resources.job_recovery["max_restarts_on_errors"] == 3
    for right, wrong in (
        ("num_nodes: 2", "num_node: 2"),
        ("cpus:", "cpu:"),
        ("mode:", "mod:"),
        ('infra: "gcp', 'infra: "gpc'),
        ("num_nodes: 2", 'num_nodes: "two"'),
    ):
        assert right in text
        with pytest.raises(sky.exceptions.InvalidSkyPilotConfigError):
            task_of(text.replace(right, wrong))


@pytest.mark.capability("O8")
def test_skypilot_parses_the_commands_with_which_a_job_is_started_and_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sky.client.cli import command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_TOKEN", KEY)
    printed = submit(tmp_path, "--dry-run")
    words = re.findall(r"^command: (.*)$", printed, re.MULTILINE)[-1].split()
    assert words[:3] == ["sky", "jobs", "launch"]
    launch = command.jobs_launch.make_context("launch", words[3:]).params
    assert launch["yes"] and launch["detach_run"] and launch["secret"] == (("PACELINE_TOKEN", KEY),)
    assert launch["entrypoint"] == ("submissions/sum-1/sum-1.yaml",)

    program = tmp_path / "sky"  # the real one would start its server
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > called\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    done = CliRunner().invoke(build_app(), ["submit", "--on", "sky", "--cancel", "sum-1"])
    assert done.exit_code == 0, done.output
    jobs, verb, *words = Path("called").read_text().splitlines()
    assert (jobs, verb) == ("jobs", "cancel")
    cancel = command.jobs_cancel.make_context("cancel", words).params
    assert cancel["yes"] and cancel["name"] == "sum-1"
