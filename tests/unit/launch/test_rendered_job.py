"""Files for other engines: the same bytes twice, no secret in any, requests that follow from the strategy."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.main import build_app
from paceline.cli.submit import describe_reason
from paceline.errors import PacelineError, RecipeError
from paceline.launch.cloud_task import describe_cost, read_machines
from paceline.launch.engine_clients import explain_client_error, require_client
from paceline.launch.job_target import JobTarget, plan_resources
from paceline.launch.rendered_job import find_secrets, plan_array_resources, render, render_array
from paceline.recipe import Strategy
from tests.recipes import recipe_of

RECIPE = recipe_of(task="digits", runtime={"device": "cuda", "threads": 2})
TARGET = JobTarget(
    engine="slurm",
    name="digits-1",
    nodes=2,
    processes=4,
    command=("python", "-m", "paceline"),
    recipe_path="/home/ada/my recipes/digits.toml",
    run_dir="/home/ada/runs/digits-1",
    arguments=("--set", "steps=8"),
    hosts=("a", "b"),
    planned_bytes=400 * 2**20,
)
ENGINES = {
    "slurm": (),
    "mpi": (),
    "ssh": (),
    "ray": (("address", "127.0.0.1:6379"),),
    "kubernetes": (("image", "registry.example/paceline:1"),),
    "sky": (("bucket", "runs"), ("gpu", "A100"), ("spot", "yes")),
}


@pytest.mark.capability("O3", "O5", "O7")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_job_has_the_same_bytes_and_the_strategy_in_its_command(engine: str, tmp_path: Path) -> None:
    target = replace(TARGET, engine=engine, options=ENGINES[engine])
    strategy = Strategy.parse("replicas=2 shard=4 zero=3")
    files = render(RECIPE, strategy, target)
    assert files == render(RECIPE, strategy, target)
    text = "".join(files.values())
    assert "replicas=2 shard=4 zero=3" in text and "--auto-resume" in text
    first, *_ = files
    if first.endswith(".py"):
        compile(text, first, "exec")
    elif not first.endswith(".yaml"):
        (tmp_path / first).write_text(files[first])
        assert subprocess.run(["bash", "-n", tmp_path / first], check=False).returncode == 0


@pytest.mark.capability("O3")
def test_a_batch_script_requests_what_the_ranks_need() -> None:
    need = plan_resources(RECIPE, TARGET)
    assert (need.cpus, need.gpus, need.memory_mib) == (8, 4, 4 * (500 + 700))
    script = render(RECIPE, RECIPE.strategy, replace(TARGET, options=(("partition", "gpu"),)))[
        "digits-1.sbatch"
    ]
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --mem=4800M",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --partition=gpu",
        "#SBATCH --signal=TERM@90",
        "#SBATCH --requeue",
    ):
        assert f"{line}\n" in script
    assert "'/home/ada/my recipes/digits.toml'" in script
    assert 'if [ "$code" -eq 143 ] && [ "$state" = RUNNING ]' in script


@pytest.mark.capability("O3", "N7")
def test_a_batch_job_is_queued_again_until_three_starts_have_saved_nothing(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    script = render(RECIPE, RECIPE.strategy, replace(TARGET, run_dir=str(run)))["digits-1.sbatch"]
    (tmp_path / "job.sh").write_text(script)
    for name, text in (
        ("srun", f"test -z $STEP || mkdir -p '{run}'/checkpoints/step-$STEP; exit $CODE"),
        ("scontrol", "test $1 = requeue && touch requeued; echo JobState=RUNNING"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def start(code: int, step: str = "") -> tuple[int, bool, str]:
        (tmp_path / "requeued").unlink(missing_ok=True)
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "CODE": str(code),
            "STEP": step,
        }
        done = subprocess.run(
            ["bash", "job.sh"],
            check=False,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, (tmp_path / "requeued").exists(), done.stderr

    assert start(143) == start(143) == (0, True, "")
    assert start(143, "00000004") == (0, True, "")  # a saved step: the count begins again
    assert start(143) == start(143) == (0, True, "")
    code, requeued, said = start(143)
    assert (code, requeued) == (143, False) and "3 starts in a row" in said and "time limit" in said
    assert start(1)[:2] == (1, False) and start(0, "00000009")[:2] == (0, False)


@pytest.mark.capability("O3")
def test_a_task_of_a_job_array_trains_its_own_run_and_is_queued_again_alone(tmp_path: Path) -> None:
    jobs = [
        (
            RECIPE,
            replace(
                TARGET,
                recipe_path=f"/r/{i}",
                run_dir=f"{tmp_path}/run {i}",
                processes=processes,
                planned_bytes=planned * 2**20,
            ),
        )
        for i, (processes, planned) in enumerate([(1, 400), (4, 100), (2, 800)])
    ]
    need = plan_array_resources(jobs)
    assert (need.cpus, need.gpus, need.memory_mib) == (8, 4, max(1200, 4 * 825, 2 * 1700))
    assert plan_array_resources([*jobs, (RECIPE, replace(TARGET, planned_bytes=0))]).memory_mib == 0
    script = render_array(jobs)["digits-1.sbatch"]
    assert script == render_array(jobs)["digits-1.sbatch"]
    assert "#SBATCH --array=0-2\n" in script and "#SBATCH --output=digits-1-%A_%a.out\n" in script
    few = [(recipe, replace(target, options=(("array", "0-2%1"),))) for recipe, target in jobs]
    assert "#SBATCH --array=0-2%1\n" in render_array(few)["digits-1.sbatch"]

    (tmp_path / "job.sh").write_text(script)
    for name, text in (
        ("srun", 'printf "%s\\n" "$@" > trained; exit 143'),
        ("scontrol", 'echo "$@" >> asked; echo JobState=RUNNING'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7"}
    for task, code in (("2", 0), ("3", 2)):
        done = subprocess.run(
            ["bash", "job.sh"],
            check=False,
            cwd=tmp_path,
            env={**variables, "SLURM_ARRAY_TASK_ID": task},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr
    assert "this array has no task 3" in done.stderr
    trained = (tmp_path / "trained").read_text().splitlines()
    assert "/r/2" in trained and f"run_dir={tmp_path}/run 2" in trained and trained[-2:] == ["-n", "2"]
    assert (tmp_path / "asked").read_text().splitlines() == ["show job -o 7_2", "requeue 7_2"]
    assert (tmp_path / "run 2" / "fruitless-starts").read_text() == "1\n"


@pytest.mark.capability("O3")
def test_a_sweep_is_rendered_with_its_recipes_and_what_it_cannot_do_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sum.toml").write_text('task = "sum"\nsteps = 4\n[batch]\nsize = 8\nshards = 2\n')
    words = ["submit", "sum.toml", "--name", "s1", "--over", "batch=1,8,16"]

    def submit(*more: str) -> tuple[int, str]:
        done = CliRunner().invoke(build_app(), [*words, *more])
        return done.exit_code, f"{done.output}{done.exception}"

    assert submit("--render", "one")[0] == submit("--render", "two")[0] == 0
    files = {path.relative_to("one") for path in Path("one").rglob("*") if path.is_file()}
    assert files == {Path("s1.sbatch"), Path("batch=8/asked.toml"), Path("batch=16/asked.toml")}
    for file in files:
        first, second = (Path(folder, file).read_text() for folder in ("one", "two"))
        assert first.replace(f"{tmp_path}/one", f"{tmp_path}/two") == second
    assert "size = 16" in Path("one/batch=16/asked.toml").read_text()
    code, printed = submit("--dry-run")
    assert code == 0 and "2 tasks; the largest:" in printed and "batch=1 is left out" in printed
    assert "command: sbatch sweeps/s1/s1.sbatch" in printed and not Path("sweeps").exists()
    for more, message in (
        (("--on", "mpi"), "--over is a job array, and mpi has none"),
        (("--attach",), "--attach prints the output of one job"),
        (("--over", "options.api_key=a,b"), "would write a secret to a file"),
        (("--set", "steps=8", "--render", "one"), "the folder holds a run of another recipe"),
    ):
        assert message in submit(*more)[1]


@pytest.mark.capability("O8")
def test_a_task_of_a_cloud_names_its_resources_and_has_the_cost_of_the_price_file() -> None:
    target = replace(TARGET, engine="sky", options=ENGINES["sky"])
    task = yaml.safe_load(render(RECIPE, RECIPE.strategy, target)["digits-1.yaml"])
    assert task["resources"] == {
        "cpus": "8+",
        "memory": "5+",
        "accelerators": "A100:4",
        "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 3},
    }
    assert task["secrets"] == {"PACELINE_TOKEN": None} and "--auto-resume" in task["run"]
    prices = "".join(
        f'[[machine]]\nname = "{name}"\ncpus = 8\nmemory_gib = {memory}\ngpus = 4\nhour = {hour}\n{more}\n'
        for name, memory, hour, more in (
            ("small", 4, 1, "spot = 0.1"),
            ("large", 64, 12.0, "spot = 5.0"),
            ("cheap", 64, 10.0, 'spot = 4.5\ngpu = "A100"'),
            ("other", 64, 9.0, 'spot = 1.0\ngpu = "T4"'),
            ("never", 64, 2.0, ""),
        )
    )
    machines, need = read_machines(prices, "prices.toml"), plan_resources(RECIPE, target)
    assert describe_cost(machines, need, target).startswith("2 x cheap (spot): 9 an hour (4.5 each)")
    bought = replace(target, options=(("gpu", "A100"),))
    assert describe_cost(machines, need, bought).startswith("2 x never: 4 an hour")
    with pytest.raises(RecipeError, match="no spot machine of the price file has 8 cores"):
        describe_cost(machines[:1], need, target)
    with pytest.raises(RecipeError, match="unknown key 'hours'"):
        read_machines('[[machine]]\nname = "x"\nhours = 1', "prices.toml")


def test_a_secret_is_in_no_file() -> None:
    with pytest.raises(RecipeError, match="would write a secret"):
        render(RECIPE, RECIPE.strategy, replace(TARGET, arguments=("--set", "options.api_key=abc")))
    pod = replace(TARGET, engine="kubernetes", options=ENGINES["kubernetes"])
    with pytest.raises(RecipeError, match=r"options\.password would write a secret"):
        render(RECIPE.replace(options={"password": "abc"}), RECIPE.strategy, pod)
    assert render(RECIPE, RECIPE.strategy, replace(TARGET, arguments=("--set", "options.tokens=8")))
    files = {"job.sh": "export X=hunter2-hunter2\n"}
    environment = {"AWS_SECRET_ACCESS_KEY": "hunter2-hunter2", "MY_TOKEN": "short", "HOME": "export X"}
    assert find_secrets(files, environment) == ["AWS_SECRET_ACCESS_KEY"]


def test_what_cannot_be_rendered_is_refused_with_a_next_step() -> None:
    pod = replace(TARGET, engine="kubernetes", options=ENGINES["kubernetes"])
    cases = [
        (RECIPE, replace(TARGET, engine="nomad"), "unknown engine"),
        (RECIPE, replace(TARGET, engine="ray", options=(("wait", "long"),)), "not a number"),
        (RECIPE, replace(TARGET, engine="sky"), "the name of a GPU"),
        (RECIPE, replace(TARGET, engine="sky", options=(("gpu", "A100"),)), "a place that outlives them"),
        (RECIPE, replace(pod, options=(*pod.options, ("kind", "serve"))), "needs the run that is served"),
        (RECIPE, replace(TARGET, engine="mpi", hosts=("a",)), "as many hosts"),
        (RECIPE, replace(pod, options=()), "needs an image"),
        (RECIPE, replace(pod, options=(*pod.options, ("kind", "deployment"))), "unknown kind"),
        (RECIPE, replace(pod, options=(*pod.options, ("partition", "gpu"))), "no such option"),
        (RECIPE.replace(task="task.py:build"), pod, "a pod does not have"),
    ]
    for recipe, target, what in cases:
        with pytest.raises(RecipeError, match=what) as caught:
            render(recipe, recipe.strategy, target)
        assert caught.value.next_step


@pytest.mark.parametrize(
    "printed, advice",
    [  # the first is of Slurm 22.05 here; the others are from the sources of Slurm and kubectl, not recorded
        (
            "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed",
            "sinfo",
        ),
        (
            'Error from server (Forbidden): jobs.batch is forbidden: User "ada" cannot create',
            "ask for access",
        ),
        (
            "The connection to the server localhost:8080 was refused - did you specify",
            "reaches the controller",
        ),
        ('no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"', "kind=job"),
        ('no matches for kind "TrainJob" in version "trainer.kubeflow.org/v1alpha1"', "Kubeflow Trainer"),
        ('container "trainer" is waiting to start: trying and failing to pull image', "--option image"),
        ("sbatch: error: User's group not permitted to use this partition", "ask for access"),
        ("something new", "look up this message"),
    ],
)
def test_a_client_that_fails_has_a_next_step(printed: str, advice: str) -> None:
    error = explain_client_error("sbatch", printed)
    assert advice in error.next_step and error.what.startswith("sbatch failed: ")


def test_a_client_that_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PacelineError, match="sbatch is not installed on this machine") as caught:
        require_client("sbatch")
    assert "slurm-client" in caught.value.next_step


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
def test_a_host_that_ssh_does_not_reach_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["submit", "digits.toml", "--on", "ssh", "-n", "1", "--hosts", "127.0.0.1", "--name", "one"]
    (tmp_path / "digits.toml").write_text('task = "digits"\nsteps = 1\n')
    done = CliRunner().invoke(build_app(words), words)
    assert isinstance(done.exception, PacelineError)
    assert done.exception.what.startswith("ssh has not reached all of 127.0.0.1")
    assert "ssh-copy-id" in done.exception.next_step


def test_a_task_that_raises_while_memory_is_planned_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text("def build():\n    raise OSError('no such disk')\n")
    (tmp_path / "r.toml").write_text('task = "task.py:build"\nsteps = 1\n')
    words = ["submit", "r.toml", "--on", "slurm", "-n", "1", "--name", "one", "--dry-run"]
    done = CliRunner().invoke(build_app(words), words)
    assert done.exit_code == 0, done.output
    assert f"the task raised OSError: no such disk at {tmp_path}/task.py:2." in done.stderr
    assert "--mem" not in done.stdout and "#SBATCH --nodes=1" in done.stdout


def test_a_job_that_waits_has_a_reason_in_words() -> None:
    assert "the partition is full" in describe_reason("Resources")
    assert "squeue" in describe_reason("SomethingNew")


@pytest.mark.parametrize(
    "kind, deleted", [(None, "job"), ("jobset", "jobset"), ("trainjob", "trainjob,trainingruntime")]
)
def test_a_cancelled_job_of_kubernetes_leaves_nothing(
    kind: str | None, deleted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its key would be in the way of the next job with the name; the client is a script here."""
    client = tmp_path / "kubectl"
    client.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    words = ["submit", "--on", "kubernetes", "--cancel", "gpt-1", "--option", "namespace=team"]
    done = CliRunner().invoke(build_app(), [*words, *(["--option", f"kind={kind}"] if kind else [])])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"delete {deleted},service,configmap -l app.kubernetes.io/instance=gpt-1 -n team",
        "delete secret gpt-1-key --ignore-not-found -n team",
    ]
