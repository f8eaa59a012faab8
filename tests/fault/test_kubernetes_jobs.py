"""Manifests for Kubernetes: valid by its schema, and executed by an interpreter with kill and restart."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.launch.job_target import JobTarget
from paceline.launch.rendered_job import render
from paceline.recipe import Strategy, load_recipe
from tests.commands import run
from tests.fault.test_engine_jobs import hash_in, write_job
from tests.kubelet import Kubelet, documents_of

pytestmark = pytest.mark.timeout(300)

TARGET = JobTarget(
    engine="kubernetes",
    name="job",
    nodes=2,
    processes=1,
    command=("paceline",),
    recipe_path="",
    run_dir="job",
    options=(("image", "registry.example/paceline:1"),),
    planned_bytes=2**20,
)


JOB_SET = {  # keys of jobset.x-k8s.io/v1alpha2 that are used here, and the types of their values
    "spec": {"network": dict, "failurePolicy": dict, "replicatedJobs": list},
    "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "failurePolicy": {"maxRestarts": int},
    "replicatedJob": {"name": str, "replicas": int, "template": dict},
}


def check_job_set_part(value: dict[str, object], part: str) -> None:
    for key, item in value.items():
        assert type(item) is JOB_SET[part].get(key), f"{part}.{key}"


@pytest.mark.capability("O5")
@pytest.mark.parametrize("kind", ["job", "jobset", "serve"])
def test_manifests_are_valid(kind: str, tmp_path: Path) -> None:
    """A JobSet has no schema there: its Job is validated, and its own keys are those of v1alpha2."""
    others = ("deployment", "horizontalpodautoscaler") if kind == "serve" else (kind,)
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    recipe = load_recipe(write_job(tmp_path / "job") / "recipe.toml").replace(task="/app/task.py:build")
    options = {"kind": kind, "secret": "s3", "run": "job"}
    target = replace(TARGET, options=(*TARGET.options, *options.items()))
    documents = documents_of(render(recipe, recipe.strategy, target)["job.yaml"])
    first = ("service",) if kind == "serve" else ("configmap", "service")
    assert [document["kind"].lower() for document in documents] == [*first, *others]
    if kind == "jobset":
        made = documents.pop()
        assert made["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        (inner,) = made["spec"]["replicatedJobs"]
        for value, part in ((made["spec"], "spec"), (inner, "replicatedJob")):
            check_job_set_part(value, part)
        for name in ("network", "failurePolicy"):
            check_job_set_part(made["spec"][name], name)
        with pytest.raises(AssertionError):  # the twin: a key of another part
            check_job_set_part({"maxRestart": 6}, "failurePolicy")
        documents.append(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}} | inner["template"]
        )
    for document in documents:
        validate.validate(document, "1.31", strict=True)
    documents[-1]["spec"]["completion"] = 2  # the twin: a word that the schema does not know
    with pytest.raises(validate.ValidationError):
        validate.validate(documents[-1], "1.31", strict=True)


@pytest.mark.capability("O5", "B6")
def test_a_pod_that_is_killed_is_started_again_and_the_run_ends_as_the_plain_one(lab, tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job")
    plain = run(folder, "train", "recipe.toml", "-n", 2)
    assert plain.returncode == 0, plain.stderr
    recipe = load_recipe(folder / "recipe.toml").replace(task=f"{folder}/task.py:build")
    recipe = recipe.replace(checkpoint=recipe.checkpoint.replace(every_steps=2))
    manifest = render(recipe, Strategy.parse("ddp"), TARGET)["job.yaml"]
    pods = tmp_path / "pods"
    pods.mkdir()
    kubelet = Kubelet(lab(hosts=2), manifest, pods, {"job-key": "the key of this test"})
    saved = kubelet.volumes["runs"] / "job" / "checkpoints"
    (folder / "hold").touch()

    def disturb(running: Kubelet) -> None:
        if (folder / "hold").exists() and [*saved.glob("step-*/manifest.json")]:
            running.pods[0].kill()
            (folder / "hold").unlink()

    assert kubelet.run(disturb) == "Complete", kubelet.logs()
    # the first pod serves the store, so that the other one cannot go on without it
    assert kubelet.ends[0] == (0, 137) and (1, 4) in kubelet.ends and (0, 0) in kubelet.ends, kubelet.ends
    printed = kubelet.logs()
    assert re.search("resume: step", printed) and hash_in(printed) == hash_in(plain.stdout)
