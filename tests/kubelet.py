"""An interpreter of rendered manifests: it does with a Job what a cluster would, on hosts of the lab.

Every pod is the container's command on a host of its own, with its environment, its index, its key, and its
volumes. A volume is a folder, and mount paths in words are replaced by it; names of pods are in a hosts file.
Failed pods are started again as the Job's policies say. Not done: images, users, limits, probes, scheduling.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.job.cluster import process_environment
from paceline.lab.namespaces import host_pids, signal_all
from paceline.lab.virtual_cluster import Lab

_SECONDS = 200.0


@dataclass
class Pod:
    """One start of one index.

    Args:
        index: its completion index.
        process: of its container.
        log: its output.
        first: the first process of its host.
    """

    index: int
    process: subprocess.Popen[bytes]
    log: Path
    first: int

    def kill(self) -> None:
        """End it as a node that is lost would, with every process of its host."""
        signal_all(host_pids(self.first), signal.SIGKILL)
        self.process.kill()


@dataclass
class Kubelet:
    """The pods of one Job, and what its policies say about those that end.

    Args:
        lab: with a host for each pod.
        manifest: the text of the file.
        folder: for volumes and logs.
        secrets: values by name of the secret.
    """

    lab: Lab
    manifest: str
    folder: Path
    secrets: Mapping[str, str]
    ends: list[tuple[int, int]] = field(default_factory=list)
    pods: dict[int, Pod] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_kind: dict[str, Any] = {one["kind"]: one for one in documents_of(self.manifest)}
        self.job = self.by_kind["Job"]
        self.name = self.job["metadata"]["name"]
        self.spec = self.job["spec"]["template"]["spec"]
        assert self.job["spec"]["completionMode"] == "Indexed"
        assert self.by_kind["Service"]["spec"]["clusterIP"] == "None"
        selector = self.by_kind["Service"]["spec"]["selector"]
        labels = self.job["spec"]["template"]["metadata"]["labels"]
        assert selector.items() <= labels.items(), "the Service selects no pod"
        self.volumes = {volume["name"]: self._volume(volume) for volume in self.spec["volumes"]}
        self._write_hosts()

    def _volume(self, volume: Mapping[str, Any]) -> Path:
        place = self.folder / "volumes" / str(volume["name"])
        place.mkdir(parents=True)
        if "configMap" in volume:
            config = self.by_kind["ConfigMap"]
            assert config["metadata"]["name"] == volume["configMap"]["name"]
            for name, text in config["data"].items():
                (place / name).write_text(text)
        return place

    def _write_hosts(self) -> None:
        domain = self.spec["subdomain"]
        assert domain == self.by_kind["Service"]["metadata"]["name"], (
            "pods have no names without this Service"
        )
        lines = ["127.0.0.1 localhost"]
        lines += [
            f"{host.address} {self.name}-{index}.{domain} {self.name}-{index}"
            for index, host in enumerate(self.lab.topology.hosts)
        ]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def run(self, disturb: Callable[[Kubelet], None] = lambda kubelet: None) -> str:
        """Run the Job to its end.

        Args:
            disturb: called ten times a second.
        Returns:
            "Complete", or "Failed" and why.
        """
        expires = time.monotonic() + _SECONDS
        open_indexes, failures = set(range(self.job["spec"]["completions"])), 0
        try:
            while open_indexes:
                assert time.monotonic() < expires, self.logs()
                for index in sorted(open_indexes - self.pods.keys()):
                    self.pods[index] = self._start(index)
                time.sleep(0.1)
                disturb(self)
                for pod in [pod for pod in self.pods.values() if pod.process.poll() is not None]:
                    code = pod.process.returncode
                    code = 128 - code if code < 0 else code
                    self.ends.append((pod.index, code))
                    del self.pods[pod.index]
                    action = "Complete" if code == 0 else self._action(code)
                    if action == "Complete":
                        open_indexes.discard(pod.index)
                        if str(pod.index) in self._sufficient():
                            return "Complete"
                    failures += action == "Count"
                    if action == "FailJob" or failures > self.job["spec"]["backoffLimit"]:
                        return f"Failed: {action}"
            return "Complete"
        finally:
            for pod in self.pods.values():
                pod.kill()
                pod.process.wait()

    def _sufficient(self) -> set[str]:
        """The indexes of which one that succeeds completes the Job, by its success policy."""
        rules = self.job["spec"].get("successPolicy", {"rules": ()})["rules"]
        return {rule["succeededIndexes"] for rule in rules}

    def _action(self, code: int) -> str:
        """What the pod failure policy does with an exit code; a pod that was lost has none of its rules."""
        assert self.spec["restartPolicy"] == "Never", "a pod failure policy needs it"
        for rule in self.job["spec"]["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes is not None and (code in codes["values"]) == (codes["operator"] == "In"):
                return str(rule["action"])
        return "Count"

    def _start(self, index: int) -> Pod:
        (container,) = self.spec["containers"]
        mounts = {mount["mountPath"]: self.volumes[mount["name"]] for mount in container["volumeMounts"]}

        paths = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))

        def placed(word: str) -> str:
            return re.sub(rf"(^|=)({paths})(?=/|$)", lambda found: f"{found[1]}{mounts[found[2]]}", word)

        words = [placed(word) for word in container["command"]]
        assert words[0] == "paceline"
        command = [sys.executable, "-m", *words]
        variables = {entry["name"]: placed(self._value(entry)) for entry in container["env"]}
        variables |= {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{self.name}-{index}"}
        kept = {
            name: process_environment()[name]
            for name in ("PATH", "PYTHONPATH", "MKL_CBWR")
            if name in process_environment()
        }
        script = f'mount --bind {self.folder}/hosts /etc/hosts; exec "$@"'
        host = self.lab.hosts[index]
        argv = self.lab.command(host, ["unshare", "-m", "sh", "-ec", script, "sh", *command])
        log = self.folder / f"pod-{index}-{len(self.ends)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                env={**kept, **variables},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return Pod(index, process, log, self.lab.spaces[host].first)

    def _value(self, entry: Mapping[str, Any]) -> str:
        if "value" in entry:
            return str(entry["value"])
        return self.secrets[entry["valueFrom"]["secretKeyRef"]["name"]]

    def logs(self) -> str:
        """The output of all pods."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("pod-*.log")))


def documents_of(manifest: str) -> Sequence[Any]:
    """The documents of a manifest."""
    return [*yaml.safe_load_all(manifest)]
