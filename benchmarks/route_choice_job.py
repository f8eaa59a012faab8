"""One rank of `benchmarks.route_choice`: choose as a session would, then measure every route beside it.

Rank 0 prints one line: the choice, and for each size the median of each route and what was predicted.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from paceline.cluster import Cluster
from paceline.comm import Collective, Net
from paceline.comm.routes.forecast import choose
from paceline.comm.routes.trial import candidates, try_routes
from paceline.mesh import Group, Mesh

MARK = "choice: "
_LONG_SECONDS = 4.0  # a size of which the best route takes longer is the last


def seconds_of(path: Collective, net: Net, group: Group, num_bytes: int) -> float:
    """One all_reduce of the slowest rank."""
    x = path.buffer(max(1, num_bytes // 4), torch.zeros(1), f"measured {num_bytes}")
    net.barrier(group)
    began = time.perf_counter()
    path.all_reduce(x, f"measured {num_bytes}").wait()
    slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    return float(net.all_reduce(slowest, group, "max").wait())


def main(most_bytes: int, repeats: int) -> None:
    """Choose, then measure."""
    cluster = Cluster.from_env().connect("cpu", 120.0)
    group, net = Mesh.build(cluster, {"replica": cluster.world_size}).replica, Net(120.0)
    found = candidates(net, group)
    began = time.perf_counter()
    forecast = try_routes(found, net, group)
    took = time.perf_counter() - began
    choice, sizes, num_bytes = choose(forecast), [], 1024
    while num_bytes <= most_bytes:
        times: dict[str, list[float]] = {word: [] for word in found.paths}
        for repeat in range(repeats + 1):
            for word in [*times] if repeat % 2 else reversed([*times]):  # they take turns
                seconds = seconds_of(found.paths[word], net, group, num_bytes)
                times[word].append(seconds)
            if sum(map(sum, times.values())) > _LONG_SECONDS:
                break
        medians = {word: statistics.median(own[1:] or own) for word, own in times.items()}
        predicted = {word: forecast.seconds(word, num_bytes) for word in times}
        sizes.append(
            {
                "bytes": num_bytes,
                "chosen": choice.route(num_bytes),
                "measured": medians,
                "predicted": predicted,
            }
        )
        if min(medians.values()) > _LONG_SECONDS:
            break
        num_bytes *= 4
    if cluster.global_rank == 0:
        print(MARK + json.dumps({"choice": str(choice), "seconds": took, "sizes": sizes}), flush=True)
    net.barrier(group)
    found.close()
    cluster.disconnect()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]))
