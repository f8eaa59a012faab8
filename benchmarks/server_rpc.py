"""One rank of a parameter server over `torch.distributed.rpc`: the side of `server_libraries`.

Rank 0 serves. A worker sends its gradients in one call, and the answer, once those of all have come and the
update is made, is the new parameters. So a step is one call and its answer, as a ticket of `sync=server` is.
A module of its own, since rpc names functions by their module.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, distributed, nn
from torch.distributed import rpc
from torch.futures import Future

from benchmarks.server import task_of
from paceline.job.addresses import listen_at
from paceline.job.cluster import Cluster

_SECONDS = 120.0  # of every call


class Served:
    """Parameters, and the gradients of a step so far.

    Args:
        workers: whose gradients make a step.
    """

    def __init__(self, megabytes: int, workers: int) -> None:
        self.parameters = [*task_of(megabytes).model.parameters()]
        self._optimizer = torch.optim.SGD(self.parameters, lr=1e-6)
        self._workers, self._lock = workers, threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._arrived, self.updated = 0, Future[list[Tensor]]()

    def take(self, gradients: Sequence[Tensor]) -> Future[list[Tensor]]:
        """Gradients of one worker; the parameters follow when those of all have come."""
        with self._lock:
            updated = self.updated
            self._arrived += 1
            for p, gradient in zip(self.parameters, gradients, strict=True):
                p.grad = gradient if p.grad is None else p.grad.add_(gradient)
            if self._arrived == self._workers:
                self._update()
                self._begin()
                updated.set_result([p.detach() for p in self.parameters])
        return updated

    def _update(self) -> None:
        for p in self.parameters:
            assert p.grad is not None, "a gradient has just been taken"
            p.grad /= self._workers
        self._optimizer.step()
        self._optimizer.zero_grad()


@cache
def _served(megabytes: int, workers: int) -> Served:
    return Served(megabytes, workers)


@rpc.functions.async_execution
def push(megabytes: int, workers: int, gradients: Sequence[Tensor]) -> Future[list[Tensor]]:
    """Runs on the server; see `ServerParticipant.take`."""
    return _served(megabytes, workers).take(gradients)


def gradients_of(model: nn.Module, sample: Tensor) -> list[Tensor]:
    """Forward and backward, as a step of `server` does them."""
    return [*torch.autograd.grad(model(sample).square().sum(), [*model.parameters()])]


def step_seconds(transports: Sequence[str], megabytes: int, steps: int, cluster: Cluster) -> float:
    """The mean of all steps, of the slowest worker; of the server 0.

    Args:
        transports: of TensorPipe; none: what it chooses by itself, which is shared memory on one host.
    """
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{cluster.address}:{_free_port(cluster)}",
        rpc_timeout=_SECONDS,
        _transports=[*transports] or None,
    )
    rank, ranks = cluster.global_rank, cluster.world_size
    if rank == 0:
        _served(megabytes, ranks - 1)  # once: two calls at a time would each make one
    rpc.init_rpc(f"rank-{rank}", rank=rank, world_size=ranks, rpc_backend_options=options)
    distributed.barrier()
    seconds = _work(megabytes, ranks - 1, steps) if rank else 0.0
    rpc.shutdown()
    return seconds


def _work(megabytes: int, workers: int, steps: int) -> float:
    task = task_of(megabytes)
    model, sample = task.model, task.data[:1]
    began = time.perf_counter()
    for _ in range(steps):
        found = rpc.rpc_sync("rank-0", push, (megabytes, workers, gradients_of(model, sample)))
        with torch.no_grad():
            torch._foreach_copy_([*model.parameters()], found)
    return (time.perf_counter() - began) / steps


def _free_port(cluster: Cluster) -> int:
    with listen_at(cluster.address, 0, 1) as listener:
        told = torch.tensor([listener.getsockname()[1]])
    distributed.broadcast(told, 0)
    return int(told)
