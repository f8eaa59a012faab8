"""The files with which another engine starts a job: batch scripts, host files, manifests. Pure.

`render` gives the same bytes for the same recipe and target. Invariants: no file contains a secret (a job
gets its key when it starts), every file starts the run with `--auto-resume` in one folder, so that an engine
may start it again, and resource requests follow from the strategy.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import RecipeError
from paceline.launch.outcome import STOPPED_EXIT_CODE
from paceline.recipe.recipe import Recipe, to_toml
from paceline.recipe.strategy import Strategy

PORT = 29_500
_MIB = 2**20
_PROCESS_MIB = 700
"""Memory of a process besides its tensors: Python, PyTorch, threads and their buffers."""

_NOTICE_MARGIN_SECONDS, _POD_MARGIN_SECONDS = 60, 30
_KEY = "PACELINE_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
_SECRET_NAME = re.compile(r"(^|[_.])(token|secret|password|passwd|credential\w*|api_?key)$", re.IGNORECASE)


@dataclass(frozen=True)
class JobTarget:
    """Where a job runs and what starts it there.

    Args:
        engine: a key of `RENDERERS`.
        name: name of the job and of its files: lower-case letters, digits and dashes.
        nodes, processes: number of nodes, and of processes on each.
        command: the words that start Paceline on a node.
        recipe_path: the recipe, as nodes find it.
        run_dir: folder of the run, which all nodes share.
        arguments: options of `paceline train`, after those that this module writes.
        options: options of the engine by name; see `OPTIONS`.
        hosts: hosts in order, for mpi and ssh.
        planned_bytes: planned peak of the tensors of a rank; 0: not planned.
    """

    engine: str
    name: str
    nodes: int
    processes: int
    command: tuple[str, ...]
    recipe_path: str
    run_dir: str
    arguments: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    hosts: tuple[str, ...] = ()
    planned_bytes: int = 0

    def option(self, name: str, default: str = "") -> str:
        """Return an option of the engine."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True)
class NodeResources:
    """What a job requests on each node.

    Args:
        cpus: number of cores: one for each thread of each process.
        gpus: number of GPUs: one for each process, if the recipe wants GPUs.
        memory_mib: planned memory with a quarter more, and that of the processes; 0: not planned.
    """

    cpus: int
    gpus: int
    memory_mib: int


def plan_resources(recipe: Recipe, target: JobTarget) -> NodeResources:
    """Return what each node needs for its ranks."""
    of_tensors = math.ceil(1.25 * target.planned_bytes / _MIB)
    return NodeResources(
        cpus=target.processes * max(1, recipe.runtime.threads),
        gpus=target.processes if recipe.runtime.device == "cuda" else 0,
        memory_mib=target.processes * (of_tensors + _PROCESS_MIB) if target.planned_bytes else 0,
    )


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
    _refuse_secret_settings(target)
    return RENDERERS[target.engine](recipe, target)


def _refuse_secret_settings(target: JobTarget) -> None:
    for word in target.arguments:
        key, equals, value = word.partition("=")
        if equals and value and _SECRET_NAME.search(key):
            raise RecipeError(
                f"--set {key}=... would write a secret to a file",
                next_step="read it in your task from a variable or a file of the node",
            )


def find_secrets(files: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables with a secret that stands in one of the files; pure."""
    secret = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|ACCESS_KEY|API_?KEY)", re.IGNORECASE)
    held = {name: value for name, value in environment.items() if secret.search(name) and len(value) >= 8}
    return [name for name, value in held.items() if any(value in text for text in files.values())]


def train_words(recipe: Recipe, target: JobTarget, *, recipe_path: str, run_dir: str) -> list[str]:
    """Return the words of `paceline train` that start or continue the run."""
    strategy = str(recipe.strategy)
    words = [*target.command, "train", recipe_path, "--auto-resume", "--set", f"run_dir={run_dir}"]
    return [*words, *(["--strategy", strategy] if strategy else []), *target.arguments]


def _join(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))


_HEADER = "# Rendered by `paceline submit`; the same recipe and options give the same file.\n"


# Slurm


def _render_slurm(recipe: Recipe, target: JobTarget) -> dict[str, str]:
    need = plan_resources(recipe, target)
    notice = math.ceil(recipe.checkpoint.grace_seconds) + _NOTICE_MARGIN_SECONDS
    requests = {
        "job-name": target.name,
        "nodes": str(target.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(need.cpus),
        **({"mem": f"{need.memory_mib}M"} if need.memory_mib else {}),
        **({"gpus-per-node": str(need.gpus)} if need.gpus else {}),
        "output": f"{target.name}-%j.out",
        "open-mode": "append",
        "signal": f"TERM@{notice}",
        "requeue": "",
        **dict(target.options),
    }
    lines = [f"#SBATCH --{name}{'=' if value else ''}{value}" for name, value in requests.items()]
    words = train_words(recipe, target, recipe_path=target.recipe_path, run_dir=target.run_dir)
    words += ["--nodes", str(target.nodes)] if target.nodes > 1 else []
    script = _SBATCH.format(
        header=_HEADER,
        requests="\n".join(lines),
        key=_KEY,
        stopped=STOPPED_EXIT_CODE,
        train=_join([*words, "-n", str(target.processes)]),
    )
    return {f"{target.name}.sbatch": script}


_SBATCH = """#!/bin/bash
{header}{requests}
#
# The contract with Paceline: exit code {stopped} means that the job was told to stop (preemption, time limit)
# and has saved. Slurm takes such an end for a completed job, so this script has it queued again.

# The key of the job is in the memory of its processes only.
{key}
export PACELINE_TOKEN

# A signal to this script ends nothing: the job's own processes get one, and save.
trap : TERM USR1

srun --ntasks-per-node=1 --kill-on-bad-exit=0 {train}
code=$?

# A job that was cancelled is not running any more, and stays cancelled.
state=$(scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.*JobState=\\([A-Z_]*\\).*/\\1/p')
if [ "$code" -eq {stopped} ] && [ "$state" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
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
        f"#!/bin/sh\n{_HEADER}\n# The key of the job is in the memory of its processes only.\n{_KEY}\n"
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
    return {f"{target.name}.sh": _SSH.format(header=_HEADER, key=_KEY, starts="\n".join(lines))}


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


# Kubernetes


def _render_kubernetes(recipe: Recipe, target: JobTarget) -> dict[str, str]:
    _refuse_unreachable_task(recipe)
    image = target.option("image")
    if not image:
        raise RecipeError(
            "a job on Kubernetes needs an image with Paceline and your task",
            next_step="--option image=REGISTRY/NAME:TAG",
        )
    parts = [_config_map(recipe, target), _service(target)]
    kind = target.option("kind", "job")
    if kind not in ("job", "jobset"):
        raise RecipeError(f"--option kind={kind}: unknown kind", next_step="kind=job or kind=jobset")
    parts.append(_indexed_job(recipe, target) if kind == "job" else _job_set(recipe, target))
    text = "---\n".join("".join(_yaml(part)) for part in parts)
    return {f"{target.name}.yaml": _HEADER + _KEY_ADVICE.format(name=target.name) + text}


def _refuse_unreachable_task(recipe: Recipe) -> None:
    """Refuse what a pod cannot find or a ConfigMap must not hold: a file next to the recipe, a secret."""
    file = recipe.task.partition(":")[0]
    if file.endswith(".py") and not file.startswith("/"):
        raise RecipeError(
            f'task = "{recipe.task}" is a file next to the recipe, which a pod does not have',
            next_step="put it into the image, and name its path there (/app/task.py:build)",
        )
    secret = next((name for name in recipe.options if _SECRET_NAME.search(name)), None)
    if secret is not None:
        raise RecipeError(
            f"options.{secret} would write a secret to a file",
            next_step="read it in your task from a variable or a file of the pod",
        )


_KEY_ADVICE = """# The key of the job is the secret {name}-key, which `paceline submit` creates; by hand:
#   openssl rand -hex 32 | kubectl create secret generic {name}-key --from-file=token=/dev/stdin
"""


def _metadata(target: JobTarget, name: str = "") -> dict[str, Any]:
    namespace = target.option("namespace")
    labels = {"app.kubernetes.io/name": "paceline", "app.kubernetes.io/instance": target.name}
    return {
        "name": name or target.name,
        **({"namespace": namespace} if namespace else {}),
        "labels": labels,
    }


def _config_map(recipe: Recipe, target: JobTarget) -> dict[str, Any]:
    text = to_toml(recipe.replace(run_dir=None))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(target),
        "data": {"recipe.toml": text},
    }


def _service(target: JobTarget) -> dict[str, Any]:
    """Return a headless Service, which gives every pod a name before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(target),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/instance": target.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job_spec(recipe: Recipe, target: JobTarget, first_pod: str) -> dict[str, Any]:
    stopped = {"containerName": "trainer", "operator": "In", "values": [STOPPED_EXIT_CODE]}
    wrong = {"containerName": "trainer", "operator": "In", "values": [RecipeError.exit_code]}
    return {
        "completions": target.nodes,
        "parallelism": target.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 6 * target.nodes,
        # ranks that remain may finish the run without a pod that was lost, which then finds no job to join
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podFailurePolicy": {
            "rules": [
                # the cluster took the pod away, or it was told to stop and has saved: start it again
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": stopped},
                # the recipe is wrong, which another start does not change
                {"action": "FailJob", "onExitCodes": wrong},
            ]
        },
        "template": {
            "metadata": {"labels": _metadata(target)["labels"]},
            "spec": _pod_spec(recipe, target, first_pod),
        },
    }


def _indexed_job(recipe: Recipe, target: JobTarget) -> dict[str, Any]:
    spec = _job_spec(recipe, target, f"{target.name}-0.{target.name}")
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(target), "spec": spec}


def _job_set(recipe: Recipe, target: JobTarget) -> dict[str, Any]:
    """Return a JobSet of one Job: when a pod fails, all pods start again together."""
    spec = _job_spec(recipe, target, f"{target.name}-trainer-0-0.{target.name}")
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(target),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": target.name},
            "failurePolicy": {"maxRestarts": 6},
            "replicatedJobs": [
                {"name": "trainer", "replicas": 1, "template": {"spec": {**spec, "backoffLimit": 0}}}
            ],
        },
    }


def _pod_spec(recipe: Recipe, target: JobTarget, first_pod: str) -> dict[str, Any]:
    selector = {"matchLabels": {"app.kubernetes.io/instance": target.name}}
    claim = target.option("claim", "paceline-runs")
    return {
        "subdomain": target.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(recipe.checkpoint.grace_seconds) + _POD_MARGIN_SECONDS,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": selector,
            }
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(recipe, target, first_pod)],
        "volumes": [
            {"name": "recipe", "configMap": {"name": target.name}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
            # ranks of one pod exchange gradients in shared memory, of which a container has 64 MiB by default
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _container(recipe: Recipe, target: JobTarget, first_pod: str) -> dict[str, Any]:
    need = plan_resources(recipe, target)
    requests: dict[str, Any] = {"cpu": str(need.cpus)}
    limits: dict[str, Any] = {}
    if need.memory_mib:
        requests["memory"] = limits["memory"] = f"{need.memory_mib}Mi"
    if need.gpus:
        limits["nvidia.com/gpu"] = str(need.gpus)
    run_dir = f"/runs/{target.run_dir}"
    # the recipe in the ConfigMap has the settings already
    target = replace(target, arguments=())
    words = train_words(recipe, target, recipe_path="/recipe/recipe.toml", run_dir=run_dir)
    key = {"secretKeyRef": {"name": f"{target.name}-key", "key": "token"}}
    return {
        "name": "trainer",
        "image": target.option("image"),
        "command": [*words, "-n", str(target.processes)],
        "env": [
            {"name": "PACELINE_NODES", "value": str(target.nodes)},
            {"name": "PACELINE_RENDEZVOUS", "value": f"{first_pod}:{PORT}"},
            {"name": "PACELINE_TOKEN", "valueFrom": {"secretKeyRef": key["secretKeyRef"]}},
            {"name": "HOME", "value": "/tmp"},
        ],
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        "resources": {"requests": requests, **({"limits": limits} if limits else {})},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "recipe", "mountPath": "/recipe", "readOnly": True},
            {"name": "runs", "mountPath": "/runs"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _yaml(value: Any, indent: int = 0) -> Iterator[str]:
    """Yield the lines of a mapping as YAML; texts are quoted as in JSON, which YAML reads alike."""
    space = "  " * indent
    for name, item in value.items():
        key = f"{space}{json.dumps(name) if '/' in name else name}:"
        match item:
            case {**entries} if entries:
                yield f"{key}\n"
                yield from _yaml(item, indent + 1)
            case [{}, *_]:
                yield f"{key}\n"
                for part in item:
                    first, *rest = _yaml(part, indent + 2)
                    yield f"{space}  - {first.lstrip()}"
                    yield from rest
            case _:
                yield f"{key} {json.dumps(item)}\n"


RENDERERS: Mapping[str, Callable[[Recipe, JobTarget], dict[str, str]]] = {
    "slurm": _render_slurm,
    "mpi": _render_mpi,
    "ssh": _render_ssh,
    "kubernetes": _render_kubernetes,
}

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "slurm": (),
    "mpi": (),
    "ssh": ("port", "folder"),
    "kubernetes": ("image", "namespace", "claim", "kind"),
}
"""Options of each engine; empty: any, which its command checks (`sbatch --NAME=VALUE`, `mpirun --NAME`)."""
