"""Processes of a job as actors of Ray, in one placement group with a bundle on each node."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import CommunicationError, MissingExtraError, format_count
from paceline.job.addresses import format_address
from paceline.launch.executor import ChildProcess, ExecutorProcess, NodeRequest, ProcessReport

_POLL_SECONDS, _END_SECONDS, _CALL_SECONDS = 0.2, 10.0, 60.0


class RayExecutor:
    """Processes that belong to actors, in one placement group with a bundle on each node.

    Args:
        address: of the cluster; "auto": the one to which this machine belongs.
        wait_seconds: how long to wait for nodes that are free.
    Raises:
        MissingExtraError: Ray is not installed.
        CommunicationError: there is no cluster at the address.
    """

    def __init__(self, address: str, wait_seconds: float) -> None:
        self._ray = _import_ray()
        self._wait_seconds = wait_seconds
        try:
            _require_reachable(address)
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError) as error:
            raise CommunicationError(
                f"there is no cluster of Ray at {address}: {_first_line(error)}",
                where="--option address",
                next_step="start one by `ray start --head`, or name its address: --option address=HOST:6379",
            ) from error
        self.actors: list[Any] = []
        self._group: Any = None
        self._calls: dict[int, Any] = {}

    def reserve(self, request: NodeRequest) -> str:
        """Create the placement group and an actor for each process."""
        group_of, strategy_of = _placement()
        bundle: dict[str, float] = {"CPU": request.cpus}
        bundle |= {"GPU": request.gpus} if request.gpus else {}
        bundle |= {"memory": request.memory_mib * 2**20} if request.memory_mib else {}
        self._group = group_of([bundle] * request.nodes, strategy="STRICT_SPREAD")
        if not self._group.wait(self._wait_seconds):
            raise CommunicationError(
                f"Ray has not found {format_count(request.nodes, 'node')} with {bundle} free within"
                f" {self._wait_seconds:g} s",
                where="the placement group of the job",
                next_step="`ray status` shows what is free; ask for fewer nodes or processes, or wait longer:"
                " --option wait=SECONDS",
            )
        share = {
            "num_cpus": request.cpus / request.processes,
            "num_gpus": request.gpus / request.processes,
            "memory": request.memory_mib * 2**20 // request.processes or None,
        }
        actor = self._ray.remote(_RankActor)
        self.actors = [
            actor.options(
                **share, max_restarts=0, scheduling_strategy=strategy_of(self._group, node)
            ).remote()
            for node in range(request.nodes)
            for _ in range(request.processes)
        ]
        host, port = self._get(self.actors[0].endpoint.remote())
        return format_address(host, port)

    def start(self, processes: Sequence[ExecutorProcess]) -> None:
        """Start a process in each actor; those of a node see all GPUs of its bundle."""
        gpus = self._get([actor.gpus.remote() for actor in self.actors])
        calls = []
        for actor, process in zip(self.actors, processes, strict=True):
            of_node = [
                gpu
                for own, other in zip(gpus, processes, strict=True)
                if other.node == process.node
                for gpu in own
            ]
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(of_node)} if of_node else {}
            environ = {**process.environ, **visible}
            calls.append(actor.start.remote(process.words, environ, str(Path.cwd())))
        self._get(calls)
        self._calls = {number: actor.poll.remote() for number, actor in enumerate(self.actors)}

    def _get(self, calls: Any) -> Any:
        """Return the results of calls.

        Raises:
            CommunicationError: an actor is gone, or has not answered.
        """
        try:
            return self._ray.get(calls, timeout=_CALL_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise CommunicationError(
                f"an actor of the job has not started: {_first_line(error)}",
                where="Ray",
                next_step="install Paceline on every node of the cluster; `ray list actors` has more",
            ) from error

    def poll(self) -> Sequence[ProcessReport]:
        """Return what is new; an actor that is gone is a process that is lost."""
        if not self._calls:
            return []
        ready, _ = self._ray.wait(
            [*self._calls.values()], num_returns=len(self._calls), timeout=_POLL_SECONDS
        )
        reports = []
        for number, call in [*self._calls.items()]:
            if call not in ready:
                continue
            try:
                output, code = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                report = ProcessReport(number, ended=True, reason=_first_line(error))
            else:
                report = ProcessReport(number, output, code is not None, code)
            reports.append(report)
            if report.ended:
                del self._calls[number]
            else:
                self._calls[number] = self.actors[number].poll.remote()
        return reports

    def stop(self) -> None:
        """Send SIGTERM to all processes."""
        for number in self._calls:
            self.actors[number].send_signal.remote(int(signal.SIGTERM))

    def close(self) -> None:
        """Kill the actors, with which their processes die, and remove the placement group."""
        for actor in self.actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
        self.actors, self._group, self._calls = [], None, {}

    def leave(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()


class _RankActor(ChildProcess):
    """A child process in an actor of Ray."""

    def endpoint(self) -> tuple[str, int]:
        """Return the address of this node, and a free port."""
        import ray

        return str(ray.util.get_node_ip_address()), self.free_port()

    def gpus(self) -> list[str]:
        """Return the GPUs of this actor."""
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]


def _require_reachable(address: str) -> None:
    """Raise an error if nothing answers at HOST:PORT, for which Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in host:
        with socket.create_connection((host.strip("[]"), int(port)), _END_SECONDS):
            pass


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            "Ray is not installed in this environment",
            where="--on ray",
            next_step="pip install ray, in the version of the cluster",
        ) from error
    return ray


def _placement() -> tuple[Any, Any]:
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return placement_group, lambda group, node: PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=node
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
