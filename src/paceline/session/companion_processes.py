"""Processes beside a run: the exporter and the sinks of rank 0, and the system sampler of each host.

A rank starts them and ends them with its sinks; they end by themselves if that rank is gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.routes.host_links import host_id
from paceline.errors import MissingExtraError, RecipeError
from paceline.job.addresses import format_address, listen_at
from paceline.observe.process_info import process_start_ticks
from paceline.observe.sinks import SinkSite, system_file
from paceline.observe.step_stats import StepStats
from paceline.recipe.log_recipe import LogRecipe, split_address
from paceline.recipe.registry.sink_specs import SinkSpec
from paceline.session.session import Session, repeat_until_agreed

_END_SECONDS = 5.0
SINK_SECONDS = 30.0
"""The longest time that the end of a run waits for the libraries of its sinks."""


class _Companion:
    """A sink that passes nothing on; `close` ends its process. A step never waits for it."""

    _process: subprocess.Popen[bytes]
    _end_seconds = _END_SECONDS

    def step(self, stats: StepStats) -> None:
        """Do nothing."""

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(self._end_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)


class MetricsExporter(_Companion):
    """The exporter for Prometheus, `paceline.watch.exporter`, which reads the run folder.

    Args:
        run_dir: the folder of the run.
        address: "HOST:PORT", see `split_address`.
    Raises:
        MissingExtraError: prometheus-client is not installed.
        RecipeError: it cannot listen there.

    Attributes:
        address: where it listens.
    """

    def __init__(self, run_dir: Path, address: str) -> None:
        if find_spec("prometheus_client") is None:
            raise MissingExtraError(
                "log.prometheus needs prometheus-client, which is not installed.",
                next_step="pip install 'paceline[prometheus]'",
            )
        with _listen(*split_address(address)) as listener:
            self.address = format_address(*listener.getsockname()[:2])
            descriptor = listener.fileno()
            words = [str(run_dir), str(descriptor), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.watch.exporter", *words],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen_at(host, port, backlog=64)
    except OSError as error:
        raise RecipeError(
            f"cannot listen at {format_address(host, port)}: {error.strerror or error}",
            where="log.prometheus",
            next_step="choose another port, or port 0 for any that is free",
        ) from error


class SinkProcess(_Companion):
    """The process of the sinks that are readers, `paceline.watch.sink_process`.

    It is in a session of its own: signals of the terminal do not reach it, and after a crash of rank 0 it
    still writes the last records.

    Args:
        words: the sinks, as in `log.sinks`.
        site: the run.
        start_bytes: size of the records that earlier starts of the run have written.
    """

    def __init__(self, words: Sequence[str], site: SinkSite, start_bytes: int) -> None:
        self._names, self._site = ", ".join(word.partition(":")[0] for word in words), site
        self._end_seconds = SINK_SECONDS + _END_SECONDS  # first it may say itself what it has not written
        self._is_closed = self._has_warned = False
        values = {name: value for name, value in vars(site).items() if name not in ("console", "now", "warn")}
        job = {
            "words": list(words),
            "start_bytes": start_bytes,
            "parent": os.getpid(),
            "end_seconds": SINK_SECONDS,
            "site": {**values, "run_dir": str(site.run_dir), "recipe": dict(site.recipe)},
        }
        with tempfile.TemporaryFile() as file:  # a pipe could be full
            file.write(json.dumps(job).encode())
            file.seek(0)
            # The process inherits the mask: until it can handle SIGTERM, that must not kill it.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "paceline.watch.sink_process"],
                    stdin=file,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Warn once if the process has died; training goes on without it."""
        if not self._has_warned and self._process.poll():
            self._warn_of_end()

    def close(self) -> None:
        """Wait until everything is written, up to the deadline, and end the process."""
        if self._is_closed:
            return
        self._is_closed = True
        super().close()
        if self._process.returncode and not self._has_warned:
            self._warn_of_end()

    def _warn_of_end(self) -> None:
        self._has_warned, code = True, self._process.returncode
        cause = f"was killed by signal {-code}" if code < 0 else f"has ended with code {code}"
        self._site.warn(
            f"the process of the sinks ({self._names}) {cause}, and they have not written everything;"
            " metrics.jsonl has all records, and the run goes on without them"
        )


def check_library(spec: SinkSpec) -> None:
    """Look for the library of a sink, without importing it.

    Raises:
        MissingExtraError: it is not installed.
    """
    # A folder `wandb/` in the working directory is found too, but it has no origin.
    found = find_spec(spec.library) if spec.library else None
    if spec.library and (found is None or found.origin is None):
        raise MissingExtraError(
            f'log.sinks has "{spec.word}", which needs {spec.library}, which is not installed.',
            next_step=f"pip install 'paceline[{spec.library}]'",
        )


class SystemSampler(_Companion):
    """The sampler of a host, `paceline.watch.host_sampler`; it ends with a last sample.

    Args:
        run_dir: the folder of the run; it exists.
        name: of the file that it appends to.
        ranks: "RANK:PID:START" of each rank of this host.
        log: how often it samples, and when a new file begins.
    """

    def __init__(self, run_dir: Path, name: str, ranks: Sequence[str], log: LogRecipe) -> None:
        words = [str(run_dir), name, str(log.sample_seconds), str(log.rotate_bytes), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.watch.host_sampler", *words, *ranks],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )


def check_psutil() -> None:
    """Raise an error if the library of the sampler is missing.

    Raises:
        MissingExtraError: psutil is not installed.
    """
    if find_spec("psutil") is None:
        raise MissingExtraError(
            "log.sample_seconds needs psutil, which is not installed.",
            next_step="pip install 'paceline[system]', or remove log.sample_seconds",
        )


def start_system_sampler(session: Session, run_dir: Path) -> SystemSampler | None:
    """Start a sampler on this host if this is its first rank; collective with `log.sample_seconds`.

    Returns:
        None on the other ranks, without `log.sample_seconds`, and on a host that does not see the run folder.
    Raises:
        MissingExtraError: psutil is not installed.
    Wire: one ragged all_gather of some bytes, before the first step.
    """
    log = session.recipe.log
    if not log.sample_seconds:
        return None
    check_psutil()
    rank, pid = session.cluster.global_rank, os.getpid()
    # Containers of one machine have the same boot id, but not the same processes.
    text = f"{rank}:{pid}:{process_start_ticks(pid)} {host_id()} {socket.gethostname()}"
    gathered = repeat_until_agreed(session, lambda: all_gather_texts(text, session.mesh.world, session.net))
    plan = plan_sampler(gathered, text)
    return SystemSampler(run_dir, *plan, log) if plan is not None and run_dir.is_dir() else None


def plan_sampler(texts: Sequence[str], own: str) -> tuple[str, list[str]] | None:
    """Return the file and the ranks of the sampler that a rank starts; None unless it is its host's first.

    Args:
        texts: "RANK:PID:START HOST" of each rank, in ascending order.
        own: that of this rank.
    """
    process, _, host = own.partition(" ")
    hosts = [text.partition(" ")[2] for text in texts]
    ranks = [text.partition(" ")[0] for text, other in zip(texts, hosts, strict=True) if other == host]
    if ranks[0] != process:
        return None
    return system_file(None if hosts[0] == host else int(process.partition(":")[0])), ranks
