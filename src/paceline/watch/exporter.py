"""The exporter for Prometheus: a process of its own that reads the folder of a run and answers scrapes.

A run with `log.prometheus = "HOST:PORT"` starts it beside rank 0, as `python -m paceline.watch.exporter`, and
ends it. Invariant: it never outlives the process that started it, and a step never waits for it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.watch.metric_catalog import DAMAGED_LINES, STATUS, UPDATED
from paceline.watch.metric_values import MetricSample
from paceline.watch.run_watch import RunWatch

_CHECK_PARENT_SECONDS = 0.5
_READ_BYTES = 2**22
_CLIENT_SECONDS = 10.0
_STATUSES = ("new", "running", "finished", "stopped", "failed", "lost", "unknown")


class RunCollector(Collector):
    """A collector of the metrics of one run; each scrape reads what was written since the last one.

    Args:
        run: the run; the label `run` has the name of its folder.
    """

    def __init__(self, run: RunWatch) -> None:
        self._run, self._lock = run, threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """Return all metrics that have a value."""
        with self._lock:
            while self._run.update(_READ_BYTES) and not self._run.is_complete:
                pass
            samples, state = list(self._run.values.samples()), self._run.state()
        samples += [MetricSample(STATUS, (word,), float(word == state["status"])) for word in _STATUSES]
        samples.append(MetricSample(DAMAGED_LINES, (), state["damaged_lines"]))
        if state["updated"] is not None:
            samples.append(MetricSample(UPDATED, (), state["updated"]))
        yield from metric_families(samples, {"run": state["name"]})


def metric_families(samples: Iterable[MetricSample], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield samples as the client library expects them.

    Args:
        samples: those of one metric follow each other.
        labels: of all of them, in front of their own.
    """
    for metric, group in groupby(samples, key=lambda sample: sample.metric):
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name.removesuffix("_total"), metric.meaning, labels=(*labels, *metric.labels))
        for sample in group:
            family.add_metric((*labels.values(), *sample.labels), sample.value)
        yield family


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    timeout = _CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the name of the base class
        pass


def serve(run_dir: Path, listener: socket.socket, parent: int) -> None:
    """Answer scrapes until the parent process is gone.

    Args:
        run_dir: the folder of the run.
        listener: a socket that listens.
        parent: process id of the one that started this one.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(RunWatch(run_dir)))
    server = _Server(listener.getsockname()[:2], _QuietHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name, server.server_port = listener.getsockname()[:2]
    server.setup_environ()
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    while os.getppid() == parent:
        time.sleep(_CHECK_PARENT_SECONDS)


def main() -> None:
    """Run the exporter with the arguments of `paceline.session.companion_processes`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("fd", type=int)
    parser.add_argument("parent", type=int)
    arguments = parser.parse_args()
    serve(arguments.run_dir, socket.socket(fileno=arguments.fd), arguments.parent)
    sys.exit(0)


if __name__ == "__main__":
    main()
