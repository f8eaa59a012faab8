"""A Deployment of servers: its container is started as a kubelet would, and scaled by what it exports."""

from __future__ import annotations

import math
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.launch.job_target import JobTarget
from paceline.launch.rendered_job import render
from paceline.recipe import load_recipe
from tests.commands import Command
from tests.ports import free_port
from tests.serving.clients import Client, wait_until

KEY = "the key of this test"


def desired_replicas(autoscaler: Any, current: int, average: float) -> int:
    """The formula of HorizontalPodAutoscaler for one metric of pods."""
    (metric,) = autoscaler["spec"]["metrics"]
    wanted = math.ceil(current * average / float(metric["pods"]["target"]["averageValue"]))
    return min(max(wanted, autoscaler["spec"]["minReplicas"]), autoscaler["spec"]["maxReplicas"])


@pytest.mark.capability("O6")
def test_a_pod_answers_its_probes_and_texts_that_wait_ask_for_more_pods(
    gpt_run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn", reason="needs paceline[serve]")
    recipe = load_recipe(gpt_run / "recipe.toml")
    options = {"image": "registry.example/paceline:1", "kind": "serve", "run": "gpt", "queued": "2"}
    target = JobTarget("kubernetes", "served", 1, 1, ("paceline",), "", "", options=(*options.items(),))
    text = render(recipe, recipe.strategy, target)["served.yaml"]
    _, deployment, autoscaler = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # every pod has port 8000 and the volume of runs; here they are those of this host
    port = free_port()
    places = {"8000": str(port), "/runs/gpt": str(gpt_run)}
    words = [places.get(word, word) for word in container["command"]]
    environ = {entry["name"]: entry.get("value", KEY) for entry in container["env"]}
    client = Client(port, KEY)

    def passes(probe: str) -> bool:
        try:
            return Client(port).call(container[probe]["httpGet"]["path"])[0] == 200
        except OSError:
            return False

    with Command(words, tmp_path, {**environ, "HOME": str(tmp_path)}) as process:
        wait_until(lambda: passes("startupProbe"))
        assert passes("livenessProbe") and passes("readinessProbe")
        name = autoscaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
        assert desired_replicas(autoscaler, 1, client.metric(name)) == 1
        request = {"prompt": "The server ", "max_tokens": 100, "n": 16}
        texts = [threading.Thread(target=client.call, args=("/v1/completions", request)) for _ in range(3)]
        for thread in texts:
            thread.start()
        queued: list[float] = []
        wait_until(lambda: queued.append(client.metric(name)) or queued[-1] > 4)
        assert desired_replicas(autoscaler, 1, queued[-1]) > 2
        assert desired_replicas(autoscaler, 8, 1000) == autoscaler["spec"]["maxReplicas"] == 8
        for thread in texts:
            thread.join()
        process.send_signal(signal.SIGTERM)
        assert process.wait(pod["terminationGracePeriodSeconds"]) == 0
