"""Manifests for Kubernetes: valid by its schema, and executed by an interpreter with kill and restart."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

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


# Names, types and required keys of v1alpha1 of Kubeflow Trainer, without pods; those of a JobSet are in it.
CUSTOM = json.loads((Path(__file__).parent / "kubeflow_trainer_schema.json").read_text())


def schema_of(kind: str) -> dict[str, object]:
    """The schema of a custom resource; unknown keys are errors."""
    if kind != "JobSet":
        return CUSTOM[kind]
    spec = CUSTOM["TrainingRuntime"]["properties"]["spec"]
    keys = ("apiVersion", "kind", "metadata")
    others = {key: CUSTOM["TrainJob"]["properties"][key] for key in keys}
    spec = spec["properties"]["template"]["properties"]["spec"]
    return {"type": "object", "properties": {**others, "spec": spec}, "additionalProperties": False}


def jobs_in(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The documents with the Jobs of custom resources in their place, which are validated here."""
    jsonschema = pytest.importorskip("jsonschema")
    found = []
    for document in documents:
        if document["kind"] not in ("JobSet", *CUSTOM):
            found.append(document)
            continue
        schema = schema_of(document["kind"])
        jsonschema.validate(document, schema)
        wrong = copy.deepcopy(document)
        wrong["spec"]["maxRestart"] = 6
        with pytest.raises(jsonschema.ValidationError, match="maxRestart"):  # the twin: an unknown key
            jsonschema.validate(wrong, schema)
        spec = document["spec"].get("template", {"spec": document["spec"]})["spec"]
        for job in spec.get("replicatedJobs", ()):
            metadata = {"name": job["name"], **job["template"].get("metadata", {})}
            template = {**job["template"], "metadata": metadata}
            found.append({"apiVersion": "batch/v1", "kind": "Job", **template})
    return found


@pytest.mark.capability("O5")
@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob", "serve"])
def test_manifests_are_valid(kind: str, tmp_path: Path) -> None:
    others = {"serve": ("deployment", "horizontalpodautoscaler"), "trainjob": ("trainingruntime", "trainjob")}
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    recipe = load_recipe(write_job(tmp_path / "job") / "recipe.toml").replace(task="/app/task.py:build")
    options = {"kind": kind, "secret": "s3", "run": "job"}
    target = replace(TARGET, options=(*TARGET.options, *options.items()))
    documents = documents_of(render(recipe, recipe.strategy, target)["job.yaml"])
    first = ("service",) if kind == "serve" else ("configmap", "service")
    assert [document["kind"].lower() for document in documents] == [*first, *others.get(kind, (kind,))]
    documents = jobs_in(documents)
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


@pytest.mark.soak
@pytest.mark.capability("O5", clause="a TrainJob")
def test_a_train_job_ends_as_the_plain_run(lab, tmp_path: Path) -> None:
    """The controllers of Kubeflow Trainer and JobSet make one Job of it, with an index in its name."""
    folder = write_job(tmp_path / "job")
    plain = run(folder, "train", "recipe.toml", "-n", 2)
    recipe = load_recipe(folder / "recipe.toml").replace(task=f"{folder}/task.py:build")
    target = replace(TARGET, options=(*TARGET.options, ("kind", "trainjob")))
    made = jobs_in(documents_of(render(recipe, Strategy.parse("ddp"), target)["job.yaml"]))
    assert [document["kind"] for document in made] == ["ConfigMap", "Service", "Job"]
    assert made[2]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    made[2]["metadata"]["name"] = f"{TARGET.name}-{made[2]['metadata']['name']}-0"
    pods = tmp_path / "pods"
    pods.mkdir()
    manifest = "\n---\n".join(map(json.dumps, made))
    kubelet = Kubelet(lab(hosts=2), manifest, pods, {"job-key": "the key of this test"})
    assert kubelet.run(lambda running: None) == "Complete", kubelet.logs()
    assert hash_in(kubelet.logs()) == hash_in(plain.stdout)
