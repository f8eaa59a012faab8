"""A synchronous parameter server on Ray's object store: the side of `server_libraries`.

As Ray's own example has it: this process serves. It puts the parameters into the store once a step, each
worker (an actor in a process of its own) reads them there, and returns its gradients into the store. All are
on one host, so what lies in the store is mapped, and copied by nobody but its writer and the worker's model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.server import task_of

StepSeconds = Callable[[int, int, int], float]
_STORE_BYTES = 2 * 10**9


@contextmanager
def session(most_workers: int) -> Iterator[StepSeconds]:
    """Ray on this host while the block lasts; yields what measures the mean of some steps.

    Raises:
        ImportError: Ray is not installed.
    """
    import ray

    ray.init(
        address="local",
        num_cpus=most_workers + 1,
        object_store_memory=_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        yield lambda megabytes, workers, steps: _step_seconds(ray, megabytes, workers, steps)
    finally:
        ray.shutdown()


def _step_seconds(ray: Any, megabytes: int, workers: int, steps: int) -> float:
    torch.set_num_threads(1)
    actors = [_worker(ray).remote(megabytes) for _ in range(workers)]
    parameters = [*task_of(megabytes).model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-6)
    ray.get([one.is_ready.remote() for one in actors])
    began = time.perf_counter()
    for _ in range(steps):
        put = ray.put([p.detach().numpy() for p in parameters])
        found = ray.get([one.gradients.remote(put) for one in actors])
        for p, *gradients in zip(parameters, *found, strict=True):
            p.grad = torch.from_numpy(gradients[0].copy())
            for gradient in gradients[1:]:
                p.grad += torch.from_numpy(gradient)
            p.grad /= workers
        optimizer.step()
        optimizer.zero_grad()
    seconds = (time.perf_counter() - began) / steps
    for one in actors:
        ray.kill(one)
    return seconds


def _worker(ray: Any) -> Any:
    """Sent by value: an actor finds no module of this folder."""

    class Worker:
        """One model, and one sample."""

        def __init__(self, megabytes: int) -> None:
            torch.set_num_threads(1)
            side = 1000
            self.model = torch.nn.Linear(side, megabytes * 1_000_000 // 4 // side, bias=False)
            self.sample = torch.randn(1, side)

        def is_ready(self) -> bool:
            """Once it is."""
            return True

        def gradients(self, values: Any) -> list[Any]:
            """Of these parameters."""
            parameters = [*self.model.parameters()]
            with torch.no_grad():
                for p, value in zip(parameters, values, strict=True):
                    p.copy_(torch.from_numpy(value))
            loss = self.model(self.sample).square().sum()
            return [one.numpy() for one in torch.autograd.grad(loss, parameters)]

    return ray.remote(num_cpus=1)(Worker)
