"""Manifests of Kubernetes: an Indexed Job, JobSet or TrainJob, or a Deployment that serves a run. Pure.

The text is YAML whose scalars are written as JSON. Invariants: no manifest contains a secret, pods are not
root, and every container says what it needs. It talks to no cluster.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from paceline.errors import RecipeError
from paceline.launch.job_target import (
    HEADER,
    MARGIN_SECONDS,
    PORT,
    SECRET_NAME,
    JobTarget,
    plan_resources,
    train_words,
    yaml_lines,
)
from paceline.launch.outcome import STOPPED_EXIT_CODE
from paceline.recipe.recipe import Recipe, to_toml

QUEUED_METRIC = "paceline_server_queued"
"""The metric of a server by which their number is chosen: texts that wait for a slot."""

_HTTP_PORT, _STOP_SECONDS = 8000, 30
# Kubeflow Trainer takes the container "node" of the job "node" for the one that trains.
_NODE = "node"


def render_kubernetes(recipe: Recipe, target: JobTarget) -> dict[str, str]:
    """Return the manifest of a job, or of servers of a run (`--option kind=serve`)."""
    if target.option("kind") != "serve":
        _refuse_unreachable_task(recipe)
    image = target.option("image")
    if not image:
        raise RecipeError(
            "a job on Kubernetes needs an image with Paceline and your task",
            next_step="--option image=REGISTRY/NAME:TAG",
        )
    kind = target.option("kind", "job")
    if kind not in ("job", "jobset", "trainjob", "serve"):
        raise RecipeError(
            f"--option kind={kind}: unknown kind",
            next_step="kind=job, kind=jobset, kind=trainjob or kind=serve",
        )
    if kind == "serve":
        parts = [_service(target, _HTTP_PORT), _deployment(recipe, target), _autoscaler(target)]
    else:
        parts = [_config_map(recipe, target), _service(target, PORT)]
    if kind == "job":
        parts.append(_indexed_job(recipe, target))
    elif kind == "jobset":
        parts.append(_job_set(recipe, target))
    elif kind == "trainjob":
        parts += [_training_runtime(recipe, target), _train_job(target)]
    text = "---\n".join("".join(yaml_lines(part)) for part in parts)
    return {f"{target.name}.yaml": HEADER + _KEY_ADVICE.format(name=target.name) + text}


def _refuse_unreachable_task(recipe: Recipe) -> None:
    """Refuse what a pod cannot find or a ConfigMap must not hold: a file next to the recipe, a secret."""
    file = recipe.task.partition(":")[0]
    if file.endswith(".py") and not file.startswith("/"):
        raise RecipeError(
            f'task = "{recipe.task}" is a file next to the recipe, which a pod does not have',
            next_step="put it into the image, and name its path there (/app/task.py:build)",
        )
    secret = next((name for name in recipe.options if SECRET_NAME.search(name)), None)
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


def _service(target: JobTarget, port: int) -> dict[str, Any]:
    """Return the Service of the pods; for ranks it is headless: each pod has a name before it is ready."""
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(target),
        "spec": {
            **(headless if port == PORT else {}),
            "selector": {"app.kubernetes.io/instance": target.name},
            "ports": [{"name": "rendezvous" if port == PORT else "http", "port": port}],
        },
    }


def _job_spec(recipe: Recipe, target: JobTarget, first_pod: str) -> dict[str, Any]:
    stopped = {"containerName": _NODE, "operator": "In", "values": [STOPPED_EXIT_CODE]}
    wrong = {"containerName": _NODE, "operator": "In", "values": [RecipeError.exit_code]}
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
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(target),
        "spec": _job_set_spec(recipe, target, {}),
    }


def _job_set_spec(recipe: Recipe, target: JobTarget, metadata: dict[str, Any]) -> dict[str, Any]:
    spec = _job_spec(recipe, target, f"{target.name}-{_NODE}-0-0.{target.name}")
    return {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": target.name,
            "publishNotReadyAddresses": True,
        },
        "failurePolicy": {"maxRestarts": 6},
        "replicatedJobs": [
            {"name": _NODE, "replicas": 1, "template": {**metadata, "spec": {**spec, "backoffLimit": 0}}}
        ],
    }


def _training_runtime(recipe: Recipe, target: JobTarget) -> dict[str, Any]:
    """Return the runtime of a TrainJob of Kubeflow Trainer, from which its controller makes a JobSet."""
    ancestor = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(target),
        "spec": {
            # without a framework, as Paceline finds its ranks by the completion index
            "mlPolicy": {"numNodes": target.nodes},
            "template": {"spec": _job_set_spec(recipe, target, ancestor)},
        },
    }


def _train_job(target: JobTarget) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(target),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": target.name,
            },
            "trainer": {"numNodes": target.nodes},
        },
    }


def _pod_spec(recipe: Recipe, target: JobTarget, first_pod: str) -> dict[str, Any]:
    return {
        "subdomain": target.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(recipe.checkpoint.grace_seconds) + MARGIN_SECONDS,
        **_placement(target, "DoNotSchedule"),
        "containers": [_trainer(recipe, target, first_pod)],
        "volumes": [{"name": "recipe", "configMap": {"name": target.name}}, *_volumes(target)],
    }


def _placement(target: JobTarget, otherwise: str) -> dict[str, Any]:
    """Return what spreads pods over the nodes, and what they may do there."""
    return {
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": otherwise,
                "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": target.name}},
            }
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _volumes(target: JobTarget) -> list[dict[str, Any]]:
    return [
        {"name": "runs", "persistentVolumeClaim": {"claimName": target.option("claim", "paceline-runs")}},
        # ranks of one pod exchange gradients in shared memory, of which a container has 64 MiB by default
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "tmp", "emptyDir": {}},
    ]


def _container(recipe: Recipe, target: JobTarget, name: str, port: int) -> dict[str, Any]:
    """Return what containers of ranks and of servers have alike."""
    need = plan_resources(recipe, target)
    requests: dict[str, Any] = {"cpu": str(need.cpus)}
    limits: dict[str, Any] = {}
    if need.memory_mib:
        requests["memory"] = limits["memory"] = f"{need.memory_mib}Mi"
    if need.gpus:
        limits["nvidia.com/gpu"] = str(need.gpus)
    # for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, where checkpoint.folder is an s3:// address
    secret = target.option("secret")
    return {
        "name": name,
        "image": target.option("image"),
        "env": [
            {
                "name": "PACELINE_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": f"{target.name}-key", "key": "token"}},
            },
            {"name": "HOME", "value": "/tmp"},
        ],
        **({"envFrom": [{"secretRef": {"name": secret}}]} if secret else {}),
        "ports": [{"name": "rendezvous" if port == PORT else "http", "containerPort": port}],
        "resources": {"requests": requests, **({"limits": limits} if limits else {})},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _trainer(recipe: Recipe, target: JobTarget, first_pod: str) -> dict[str, Any]:
    # the recipe in the ConfigMap has the settings already
    words = train_words(
        recipe,
        replace(target, arguments=()),
        recipe_path="/recipe/recipe.toml",
        run_dir=f"/runs/{target.run_dir}",
    )
    container = _container(recipe, target, _NODE, PORT)
    container["command"] = [*words, "-n", str(target.processes)]
    container["env"] += [
        {"name": "PACELINE_NODES", "value": str(target.nodes)},
        {"name": "PACELINE_RENDEZVOUS", "value": f"{first_pod}:{PORT}"},
    ]
    container["volumeMounts"].append({"name": "recipe", "mountPath": "/recipe", "readOnly": True})
    return container


# Servers of a run


def _deployment(recipe: Recipe, target: JobTarget) -> dict[str, Any]:
    """Return servers of a run: each pod answers alone, so that their number can change."""
    run = target.option("run")
    if not run:
        raise RecipeError(
            "kind=serve needs the run that is served", next_step="--option run=NAME, the name of its job"
        )
    # the memory plan is that of a training
    container = _container(recipe, replace(target, planned_bytes=0), "server", _HTTP_PORT)
    container["command"] = [
        *(*target.command, "serve", f"/runs/{run}", "--host", "0.0.0.0", "--port", str(_HTTP_PORT)),
        *("--stop-seconds", str(_STOP_SECONDS), "-n", str(target.processes)),
    ]
    container |= _probes()
    container["volumeMounts"][0]["readOnly"] = True
    labels = _metadata(target)["labels"]
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": str(_HTTP_PORT)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(target),
        "spec": {
            "replicas": target.nodes,
            "selector": {"matchLabels": {"app.kubernetes.io/instance": target.name}},
            "template": {
                "metadata": {"labels": labels, "annotations": scraped},
                "spec": {
                    "terminationGracePeriodSeconds": _STOP_SECONDS + MARGIN_SECONDS,
                    **_placement(target, "ScheduleAnyway"),
                    "containers": [container],
                    "volumes": _volumes(target),
                },
            },
        },
    }


def _probes() -> dict[str, Any]:
    """Return the probes of a server: started once it is ready, ended if its engine has failed."""

    def probe(path: str, period: int, failures: int) -> dict[str, Any]:
        get = {"path": path, "port": _HTTP_PORT}
        return {"httpGet": get, "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": 5}

    return {
        # a model of many gigabytes takes minutes to load
        "startupProbe": probe("/ready", 2, 900),
        "livenessProbe": probe("/health", 10, 3),
        "readinessProbe": probe("/ready", 2, 1),
    }


def _autoscaler(target: JobTarget) -> dict[str, Any]:
    """Return an autoscaler by the number of texts that wait for a slot, which each pod exports."""
    most = int(target.number("max-replicas", max(8, target.nodes)))
    if most < target.nodes:
        raise RecipeError(
            f"--option max-replicas={most} is less than --nodes {target.nodes}",
            next_step="--nodes is the smallest number of pods",
        )
    metric = {
        "metric": {"name": QUEUED_METRIC},
        "target": {"type": "AverageValue", "averageValue": f"{target.number('queued', 4):g}"},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": _metadata(target),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target.name},
            "minReplicas": target.nodes,
            "maxReplicas": most,
            "metrics": [{"type": "Pods", "pods": metric}],
            # requests come in bursts: a pod that is not needed stays for some minutes
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
        },
    }
