"""The exporter of a run, see `paceline.watch.exporter`: a process that rank 0 starts and ends."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import MissingExtraError, RecipeError
from paceline.job.addresses import format_address, listen_at
from paceline.observe.step_stats import StepStats
from paceline.recipe.log_recipe import split_address

_END_SECONDS = 5.0


class MetricsExporter:
    """A sink that passes nothing on: the process reads the run folder. `close` ends it.

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
        if importlib.util.find_spec("prometheus_client") is None:
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

    def step(self, stats: StepStats) -> None:
        """Do nothing: the exporter reads the file."""

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Do nothing: the exporter reads the file."""

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen_at(host, port, backlog=64)
    except OSError as error:
        raise RecipeError(
            f"cannot listen at {format_address(host, port)}: {error.strerror or error}",
            where="log.prometheus",
            next_step="choose another port, or port 0 for any that is free",
        ) from error
