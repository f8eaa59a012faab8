"""A step of `sync=server` beside a parameter server on `torch.distributed.rpc` and one on Ray's object store.

The model, the bytes and the work are those of `server`: every worker gets all parameters and sends all
gradients, and one server makes the update of their mean. Sides take turns, two rounds of each. Ray is a side
where it is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version

from benchmarks import server_ray, server_rpc
from benchmarks.report import Options, Report, Table, present
from benchmarks.server import MEGABYTES, WORKERS, step_seconds
from paceline.job.cluster import Cluster
from paceline.testing import run_ranks

_ROUNDS = 2
Side = Callable[[int, int, int], float]
"""The mean seconds of some steps: of megabytes, workers and steps."""


def _paceline(way: str, megabytes: int, workers: int, steps: int) -> float:
    return max(run_ranks(partial(step_seconds, way, megabytes, steps), workers + 1, deadline=600.0))


def _rpc(transports: tuple[str, ...], megabytes: int, workers: int, steps: int) -> float:
    work = partial(_rpc_rank, transports, megabytes, steps)
    return max(run_ranks(work, workers + 1, deadline=600.0))


def _rpc_rank(transports: tuple[str, ...], megabytes: int, steps: int, cluster: Cluster) -> float:
    """Of this module, which is sent by value, so that the one of rpc's functions is imported by its name."""
    return server_rpc.step_seconds(transports, megabytes, steps, cluster)


@contextmanager
def sides() -> Iterator[Mapping[str, Side]]:
    """By name; the first is what others are put beside."""
    with ExitStack() as stack:
        found: dict[str, Side] = {
            "sync=server": partial(_paceline, "servers=1 sync=server"),
            "rpc": partial(_rpc, ()),
            "rpc by TCP": partial(_rpc, ("uv",)),
        }
        if importlib.util.find_spec("ray") is not None:
            found["Ray"] = stack.enter_context(server_ray.session(max(WORKERS)))
        yield found


def measure(options: Options) -> Report:
    """All sizes and numbers of workers; the better of the rounds of each side."""
    steps, rows, data = 3 if options.quick else 12, [], {}
    with sides() as ways:
        for megabytes in MEGABYTES[: 1 if options.quick else None]:
            for workers in WORKERS[: 2 if options.quick else None]:
                turns = [
                    {name: way(megabytes, workers, steps) for name, way in ways.items()}
                    for _ in range(1 if options.quick else _ROUNDS)
                ]
                best = {name: min(turn[name] for turn in turns) for name in ways}
                rows.append((f"{megabytes} MB", str(workers), *_cells(best)))
                data[f"{megabytes} MB, {workers} workers"] = turns
    columns = ("parameters", "workers", *(f"{name}: ms" for name in ways))
    ratios = tuple(f"/ {name}" for name in list(ways)[1:])
    remarks = (
        "The last columns: the time of sync=server as a multiple of that of the other.",
        "rpc chooses shared memory on one host, and Ray's store is mapped by all; sync=server and rpc by TCP"
        f" send every byte through a socket. Ray: {_ray_version()}.",
    )
    title = f"Mean of {steps} steps, forward, backward and the update in them; better of {_ROUNDS} rounds"
    question = "A step of a synchronous server beside torch.distributed.rpc and Ray's object store."
    return Report(question, [Table(title, (*columns, *ratios), rows, remarks)], data)


def _ray_version() -> str:
    return version("ray") if importlib.util.find_spec("ray") is not None else "not installed"


def _cells(best: Mapping[str, float]) -> list[str]:
    ours, *others = best.values()
    return [
        *(f"{1e3 * seconds:.0f}" for seconds in best.values()),
        *(f"{ours / other:.2f}" for other in others),
    ]


if __name__ == "__main__":
    present(measure, __doc__ or "")
