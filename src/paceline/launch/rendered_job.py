"""The files with which another engine starts a job: batch scripts, host files, programs, task files. Pure.

`render` gives the same bytes for the same recipe and target. Invariants: no file contains a secret (a job
gets its key when it starts), every file starts the run with `--auto-resume` in one folder, so that an engine
may start it again, and resource requests follow from the strategy.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paceline.errors import RecipeError
from paceline.launch.cloud_task import render_sky
from paceline.launch.job_target import (
    HEADER,
    MARGIN_SECONDS,
    PORT,
    SECRET_NAME,
    JobTarget,
    NodeResources,
    plan_resources,
    train_words,
)
from paceline.launch.kubernetes_manifest import render_kubernetes
from paceline.launch.outcome import STOPPED_EXIT_CODE
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy

_NOTICE_MARGIN_SECONDS = 60
_KEY = "PACELINE_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"


def render(recipe: Recipe, strategy: Strategy, target: JobTarget) -> dict[str, str]:
    """Return the files of a job, by name; the first is the one that is submitted.

    Args:
        recipe: the recipe; its strategy is replaced by `strategy`.
    Raises:
        RecipeError: the engine or one of its options is unknown, or a file would contain a secret.
    """
    if target.engine not in RENDERERS:
        known = ", ".join(RENDERERS)
        raise RecipeError(f"--on {target.engine}: unknown engine", next_step=f"one of {known}")
    known_options = OPTIONS[target.engine]
    unknown = [name for name, _ in target.options if known_options and name not in known_options]
    if unknown:
        raise RecipeError(
            f"--option {unknown[0]}: {target.engine} has no such option",
            next_step=f"one of {', '.join(known_options)}",
        )
    recipe = recipe.replace(strategy=strategy)
    refuse_secret_settings(target.arguments)
    return RENDERERS[target.engine](recipe, target)


def refuse_secret_settings(words: Sequence[str]) -> None:
    """Raise a RecipeError if one of the words is a setting `KEY=VALUE` whose key is that of a secret."""
    for word in words:
        key, equals, value = word.partition("=")
        if equals and value and SECRET_NAME.search(key):
            raise RecipeError(
                f"--set {key}=... would write a secret to a file",
                next_step="read it in your task from a variable or a file of the node",
            )


def find_secrets(files: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables with a secret that stands in one of the files; pure."""
    secret = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|ACCESS_KEY|API_?KEY)", re.IGNORECASE)
    held = {name: value for name, value in environment.items() if secret.search(name) and len(value) >= 8}
    return [name for name, value in held.items() if any(value in text for text in files.values())]


def _join(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))


# Slurm


def _render_slurm(recipe: Recipe, target: JobTarget) -> dict[str, str]:
    return _render_batch_script(
        [(recipe, target)],
        select="",
        job='"$SLURM_JOB_ID"',
        run=shlex.quote(target.run_dir),
        train=_slurm_words(recipe, target),
    )


def render_array(jobs: Sequence[tuple[Recipe, JobTarget]]) -> dict[str, str]:
    """Return the batch script of a job array of Slurm: each task is a job, and is queued again alone.

    Args:
        jobs: recipe and target of each task, by its index. The targets differ in `recipe_path`, `run_dir`,
            `processes` and `planned_bytes` only; every task requests what the largest one needs.
    """
    target = replace(jobs[0][1], options=(("array", f"0-{len(jobs) - 1}"), *jobs[0][1].options))
    cases = [
        f"{i}) run={shlex.quote(job.run_dir)} train=({_slurm_words(recipe, job)}) ;;"
        for i, (recipe, job) in enumerate(jobs)
    ]
    return _render_batch_script(
        [(jobs[0][0], target), *jobs[1:]],
        select=_SELECT.format(cases="\n".join(cases)),
        # for one of its tasks, SLURM_JOB_ID is the number of the whole array
        job='"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"',
        run='"$run"',
        train='"${train[@]}"',
    )


def plan_array_resources(jobs: Sequence[tuple[Recipe, JobTarget]]) -> NodeResources:
    """Return what each node of a task needs: the largest of each number."""
    needs = [plan_resources(recipe, target) for recipe, target in jobs]
    # a job whose memory is not planned may need any
    planned = all(need.memory_mib for need in needs)
    return NodeResources(
        cpus=max(need.cpus for need in needs),
        gpus=max(need.gpus for need in needs),
        memory_mib=max(need.memory_mib for need in needs) if planned else 0,
    )


def _slurm_words(recipe: Recipe, target: JobTarget) -> str:
    words = train_words(recipe, target, recipe_path=target.recipe_path, run_dir=target.run_dir)
    words += ["--nodes", str(target.nodes)] if target.nodes > 1 else []
    return _join([*words, "-n", str(target.processes)])


def _render_batch_script(
    jobs: Sequence[tuple[Recipe, JobTarget]], *, select: str, job: str, run: str, train: str
) -> dict[str, str]:
    """Return the script of a job, or of a job array if there is a `select`.

    Args:
        select: lines that set the variables of a task.
        job, run, train: number of the job, its run folder and the command that trains, in the shell.
    """
    target, need = jobs[0][1], plan_array_resources(jobs)
    notice = math.ceil(max(recipe.checkpoint.grace_seconds for recipe, _ in jobs)) + _NOTICE_MARGIN_SECONDS
    requests = {
        "job-name": target.name,
        "nodes": str(target.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(need.cpus),
        **({"mem": f"{need.memory_mib}M"} if need.memory_mib else {}),
        **({"gpus-per-node": str(need.gpus)} if need.gpus else {}),
        "output": f"{target.name}-{'%A_%a' if select else '%j'}.out",
        "open-mode": "append",
        "signal": f"TERM@{notice}",
        "requeue": "",
        **dict(target.options),
    }
    lines = [f"#SBATCH --{name}{'=' if value else ''}{value}" for name, value in requests.items()]
    script = _SBATCH.format(
        header=HEADER,
        requests="\n".join(lines),
        key=_KEY,
        stopped=STOPPED_EXIT_CODE,
        select=select,
        job=job,
        train=train,
        run=run,
        starts=_STARTS_WITHOUT_PROGRESS,
        # the checkpoints of another place are not looked at, so such a job is always queued again
        saved=_SAVED.format(run=run)
        if all(recipe.checkpoint.folder is None for recipe, _ in jobs)
        else "date +%s%N",
    )
    return {f"{target.name}.sbatch": script}


_STARTS_WITHOUT_PROGRESS = 3
_SELECT = """
# Every task of the array is a run of its own.
case "$SLURM_ARRAY_TASK_ID" in
{cases}
*) echo "this array has no task $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;
esac
"""
_SAVED = "ls {run}/checkpoints 2>/dev/null | grep '^step-' | tail -n 1"
_SBATCH = """#!/bin/bash
{header}{requests}
#
# The contract with Paceline: exit code {stopped} means that the job was told to stop (preemption, time limit)
# and has saved. Slurm takes such an end for a completed job, so this script has it queued again, unless
# {starts} starts in a row have saved no step.

# The key of the job is in the memory of its processes only.
{key}
export PACELINE_TOKEN
{select}
# A signal to this script ends nothing: the job's own processes get one, and save.
trap : TERM USR1

last_saved() {{ {saved}; }}
before=$(last_saved)
srun --ntasks-per-node=1 --kill-on-bad-exit=0 {train}
code=$?
fruitless=0
if [ "$(last_saved)" = "$before" ]; then
    fruitless=$(($(cat {run}/fruitless-starts 2>/dev/null || echo 0) + 1))
fi
mkdir -p {run} && echo "$fruitless" > {run}/fruitless-starts

# A job that was cancelled is not running any more, and stays cancelled.
state=$(scontrol show job -o {job} | sed -n 's/.*JobState=\\([A-Z_]*\\).*/\\1/p')
if [ "$code" -eq {stopped} ] && [ "$state" = RUNNING ]; then
    if [ "$fruitless" -ge {starts} ]; then
        echo "$fruitless starts in a row have saved no step, so the job is not queued again:" \\
            "submit it with a longer time limit (--option time=HH:MM:SS)" >&2
        exit "$code"
    fi
    scontrol requeue {job} && exit 0
fi
exit "$code"
"""


# MPI and ssh


def _render_mpi(recipe: Recipe, target: JobTarget) -> dict[str, str]:
    hosts = target.hosts or ("localhost",) * (target.nodes == 1)
    _require_hosts(target, hosts)
    words = train_words(recipe, target, recipe_path=target.recipe_path, run_dir=target.run_dir)
    options = ["-n", str(target.nodes * target.processes), "--map-by", f"ppr:{target.processes}:node"]
    # by default mpirun binds each process to one core
    options += ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "-x", "PACELINE_TOKEN"]
    extra = [word for name, value in target.options for word in (f"--{name}", value) if word]
    hostfile = f"{target.name}.hosts"
    script = (
        f"#!/bin/sh\n{HEADER}\n# The key of the job is in the memory of its processes only.\n{_KEY}\n"
        f'export PACELINE_TOKEN\ncd "$(dirname "$0")" || exit 1\nhosts=$PWD/{shlex.quote(hostfile)}\n'
        f'cd - >/dev/null || exit 1\nexec mpirun --hostfile "$hosts" {_join([*options, *extra, *words])}\n'
    )
    slots = "".join(f"{host} slots={target.processes}\n" for host in hosts[: target.nodes])
    return {f"{target.name}.sh": script, hostfile: slots}


def _render_ssh(recipe: Recipe, target: JobTarget) -> dict[str, str]:
    _require_hosts(target, target.hosts)
    words = train_words(recipe, target, recipe_path=target.recipe_path, run_dir=target.run_dir)
    port = target.option("port", str(PORT))
    lines = []
    for node, host in enumerate(target.hosts[: target.nodes]):
        where = ["--nodes", str(target.nodes), "--node-rank", str(node), "-n", str(target.processes)]
        where += (
            ["--rendezvous", f"{target.hosts[0]}:{port}", "--token-file", "-"] if target.nodes > 1 else []
        )
        command = f"cd {shlex.quote(target.option('folder', '.'))} && {_join([*words, *where])}"
        lines.append(f"start {shlex.quote(host)} {shlex.quote(command)}")
    return {f"{target.name}.sh": _SSH.format(header=HEADER, key=_KEY, starts="\n".join(lines))}


_SSH = """#!/bin/bash
{header}
# The key of the job reaches the hosts by standard input, which no other user can read.
{key}
pids=()
start() {{
    printf '%s\\n' "$PACELINE_TOKEN" | ssh -o BatchMode=yes "$1" "$2" &
    pids+=($!)
}}
trap 'kill "${{pids[@]}}" 2>/dev/null' TERM INT

{starts}

code=0
for pid in "${{pids[@]}}"; do
    wait "$pid" || {{ ended=$?; [ "$code" -ne 0 ] || code=$ended; }}
done
exit "$code"
"""


def _require_hosts(target: JobTarget, hosts: Sequence[str]) -> None:
    if len(hosts) < target.nodes:
        raise RecipeError(
            f"--nodes {target.nodes} needs as many hosts, and --hosts has {len(hosts)}",
            next_step="--hosts HOST,HOST,... in the order of the nodes",
        )


# Ray


def _render_ray(recipe: Recipe, target: JobTarget) -> dict[str, str]:
    need = plan_resources(recipe, target)
    strategy = recipe.strategy
    arguments = {
        "address": target.option("address", "auto"),
        "wait_seconds": target.number("wait", 600),
        "max_restarts": int(target.number("restarts", 3)),
        "nodes": target.nodes,
        "processes": target.processes,
        "cpus": need.cpus,
        "gpus": need.gpus,
        "memory_mib": need.memory_mib,
        "servers": strategy.servers,
        "checkpoints": recipe.checkpoint.folder or f"{target.run_dir}/checkpoints",
        "patience_seconds": recipe.runtime.deadline_seconds + MARGIN_SECONDS,
        "words": train_words(
            recipe, replace(target, command=()), recipe_path=target.recipe_path, run_dir=target.run_dir
        ),
    }
    lines = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    return {
        f"{target.name}.py": f"{HEADER}from paceline.cli.submit import run_on_ray\n\nrun_on_ray(\n{lines})\n"
    }


RENDERERS: Mapping[str, Callable[[Recipe, JobTarget], dict[str, str]]] = {
    "slurm": _render_slurm,
    "mpi": _render_mpi,
    "ssh": _render_ssh,
    "ray": _render_ray,
    "kubernetes": render_kubernetes,
    "sky": render_sky,
}

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "slurm": (),
    "mpi": (),
    "ssh": ("port", "folder"),
    "ray": ("address", "restarts", "wait"),
    "sky": ("bucket", "gpu", "infra", "spot", "workdir", "setup"),
    "kubernetes": ("image", "namespace", "claim", "kind", "secret", "run", "max-replicas", "queued"),
}
"""Options of each engine; empty: any, which its command checks (`sbatch --NAME=VALUE`, `mpirun --NAME`)."""
