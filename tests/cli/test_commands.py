"""The commands as a user types them: real processes, real files, exit codes."""

import json
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from paceline.checkpoint.catalog import checkpoint_name
from paceline.checkpoint.checkpoint_reader import load_checkpoint
from paceline.checkpoint.storage import StorageFolder
from paceline.cli.main import COMMANDS
from paceline.cli.main import load as load_command
from paceline.report import read_run
from tests.commands import run
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "recipes" / "digits.toml")
SMALL = [
    "--set",
    "options.hidden=[32]",
    "--set",
    "checkpoint.every_steps=5",
    "--set",
    "schedule.warmup_steps=2",
]


def paceline(*arguments: object, cwd: Path = ROOT, anew: bool = False) -> subprocess.CompletedProcess[str]:
    return run(cwd, *arguments, anew=anew)


def train(run_dir: Path, *arguments: object, steps: int, processes: int = 1, anew: bool = False) -> str:
    length = ["--set", "epochs=", "--set", f"steps={steps}", "--set", f"run_dir={run_dir}"]
    done = paceline("train", DIGITS, "-n", processes, *SMALL, *length, *arguments, anew=anew)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tensors(run_dir: Path, step: int) -> dict[str, object]:
    return dict(load_checkpoint(StorageFolder(str(run_dir / "checkpoints")), checkpoint_name(step)).tensors)


def equal(a: dict[str, object], b: dict[str, object]) -> bool:
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


@pytest.mark.capability("N1")
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path: Path, processes: int) -> None:
    """The schedule is constant here, so that a longer run starts as the shorter one does."""
    constant = ["--set", "schedule.decay=constant"]
    whole = train(tmp_path / "whole", *constant, steps=20, processes=processes)
    train(tmp_path / "half", *constant, steps=10, processes=processes)
    longer = paceline("train", "--resume", tmp_path / "half", "-n", processes, "--set", "steps=20")
    assert longer.returncode == 0, longer.stderr
    assert equal(tensors(tmp_path / "whole", 20), tensors(tmp_path / "half", 20))
    assert not equal(tensors(tmp_path / "whole", 20), tensors(tmp_path / "whole", 15))
    assert f"paceline train --resume {tmp_path / 'whole'} -n {processes}" in whole
    steps = [json.loads(line) for line in (tmp_path / "half" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if record["event"] == "step"] == list(range(20))


@pytest.mark.capability("A1", "N1")
def test_what_a_run_prints_and_keeps(tmp_path: Path) -> None:
    printed = train(
        tmp_path / "run", "--set", "evaluate.every_steps=4", "--set", "checkpoint.keep=2", steps=12, anew=True
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(record for record in lines if record["event"] == "step")
    assert {"loss", "grad_norm", "lr", "samples_per_second", "phases", "sent_bytes"} <= first.keys()
    assert [r["step"] for r in lines if r["event"] == "evaluation"] == [4, 8, 12]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-00000010", "step-00000012"]
    for word in ("loss", "samples/s", "left", "data", "forward", "backward", "communication", "optimizer"):
        assert word in printed
    assert str(tmp_path / "run" / "metrics.jsonl") in printed


def test_the_recipe_of_a_run_is_complete(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=2)
    shown = paceline("recipe", "show", tmp_path / "run" / "recipe.toml")
    kept = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert shown.returncode == 0 and tomllib.loads(shown.stdout) == kept


@pytest.mark.capability("B1")
def test_a_strategy_that_cannot_run_is_refused_before_any_process_starts() -> None:
    refused = paceline("train", DIGITS, "-n", 2, "--strategy", "route=server")
    assert refused.returncode == 2 and "not built yet" in refused.stderr and "nearest" in refused.stderr
    many = paceline("train", DIGITS, "-n", 9, "--set", "batch.shards=8")
    assert many.returncode == 2 and "batch.shards" in many.stderr
    listed = json.loads(paceline("strategies", "--json").stdout)
    assert {row["name"] for row in listed} >= {"ddp", "fsdp", "diloco", "gpipe", "hogwild"}
    assert {row["name"]: row["supported"] for row in listed}["ddp"] is True


@pytest.mark.soak
@pytest.mark.capability("Q2")
def test_federated_rounds_are_a_run_like_any_other(tmp_path: Path) -> None:
    """Keys of the file about a global batch are taken out by the strategy that is typed."""
    run = tmp_path / "run"
    trained = paceline(
        *("train", "recipes/digits.toml", "-n", 2, "--strategy", "sync=federated:1"),
        *("--set", "epochs=0.5", "--set", f"run_dir={run}"),
    )
    assert trained.returncode == 0 and "step 5/5" in trained.stdout, trained.stderr
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    assert (
        recipe["batch"]["size"] == 32 and recipe["outer"]["lr"] == 1.0 and recipe["federated"]["cohort"] == 10
    )
    assert "100 clients" in (run / "report.html").read_text()


def test_errors_name_the_key_and_the_line(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.toml"
    recipe.write_text('task = "digits"\nsteps = 3\n\n[optimizer]\nname = "adam"\nlearning = 1e-3\n')
    found = paceline("train", recipe, anew=True)
    assert found.returncode == 2
    assert "bad.toml, line 6" in found.stderr and "optimizer.learning" in found.stderr


def test_sigterm_saves_the_step_and_resume_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "paceline", "train", DIGITS, "-n", "2", *SMALL]
    length = ["--set", "epochs=", "--set", "steps=100000", "--set", f"run_dir={run_dir}"]
    with subprocess.Popen(
        [*command, *length], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        metrics = run_dir / "metrics.jsonl"
        expires = time.monotonic() + 240
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 5):
            assert time.monotonic() < expires and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 143
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    stopped = max(record["step"] for record in steps if record["event"] == "step")
    assert tensors(run_dir, stopped + 1), "the last step was not saved"
    assert read_run(run_dir).status == "stopped"
    more = paceline("train", "--resume", run_dir, "-n", 2, "--set", f"steps={stopped + 3}")
    assert more.returncode == 0, more.stderr
    assert tensors(run_dir, stopped + 3)
    run = read_run(run_dir)
    assert (run.status, len(run.starts), len(run.steps)) == ("finished", 2, stopped + 3)


@pytest.mark.soak  # its variables are recorded in tests/unit/job/engine_environments.json
@pytest.mark.capability("A2")
def test_torchrun_starts_the_same_job(tmp_path: Path) -> None:
    train(tmp_path / "ours", steps=4, processes=2)
    agent = ["torch.distributed.run", "--master-port", str(free_port()), "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *agent, "-m", "paceline", "train"]
    length = ["--set", "epochs=", "--set", "steps=4", "--set", f"run_dir={tmp_path / 'theirs'}"]
    done = subprocess.run(
        [*command, DIGITS, *SMALL, *length], capture_output=True, timeout=360, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert equal(tensors(tmp_path / "ours", 4), tensors(tmp_path / "theirs", 4))


@pytest.mark.capability("Z2")
def test_verify_says_yes_and_no(tmp_path: Path) -> None:
    right = paceline("verify", DIGITS, "-n", 2, "--steps", 2, *SMALL, anew=True)
    assert right.returncode == 0 and "verified: 2 steps" in right.stdout, right.stderr
    kept = tmp_path / "certificate.json"
    wrong = paceline(
        "verify", DIGITS, "-n", 2, "--plant", "same-data", "--json", "--certificate", kept, *SMALL
    )
    assert wrong.returncode == 1
    found = json.loads(wrong.stdout)
    assert found["cause"] == "same data on every rank" and found == json.loads(kept.read_text())


@pytest.mark.capability("B1")
def test_the_examples_run_on_any_number_of_processes(tmp_path: Path) -> None:
    """The README shows both."""
    done = paceline(
        "train",
        ROOT / "examples" / "own_model.toml",
        "-n",
        2,
        "--set",
        f"run_dir={tmp_path}",
        "--set",
        "steps=60",
    )
    assert done.returncode == 0 and "accuracy" in done.stdout, done.stderr
    loops = [paceline("run", "-n", n, ROOT / "examples" / "own_loop.py", cwd=tmp_path) for n in (1, 2)]
    assert [loop.returncode for loop in loops] == [0, 0], loops[1].stderr
    one, two = (loop.stdout.splitlines() for loop in loops)
    assert one[:-1] == two[:-1] and "accuracy 1.000" in one[-2] and one[-1].startswith("120 steps, runs/")


@pytest.mark.capability("P1")
@pytest.mark.parametrize(
    "words, loaded",
    [
        (["--help"], set()),
        (["runs", "-h"], {"runs"}),
        (["recipe", "show", "-h"], {"recipe_show", "common_options"}),
        (["verify", "-h"], {"verify", "common_options"}),
    ],
)
def test_a_command_loads_itself_alone(words: list[str], loaded: set[str]) -> None:
    """Help costs what typer costs: not even rich is there, nor what a command does, nor another command."""
    code = (
        f"import sys; sys.argv[1:] = {words}\n"
        "from paceline.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "names = [m for m in sys.modules if m.startswith('paceline.cli.') or m in ('rich', 'torch')]\n"
        "print('LOADED', *names)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    found = {name.removeprefix("paceline.cli.") for name in done.stdout.split("LOADED")[1].split()}
    assert found - {"main", "console"} == loaded


def test_what_help_says_of_a_command_is_what_the_command_says() -> None:
    for command in COMMANDS:
        said = (load_command(command).__doc__ or "").partition("\n\n")[0]
        assert " ".join(said.split()) == command.about
