"""One rank of `benchmarks.route_choice`: choose as a session would, then measure every route beside it.

Rank 0 prints one line: the choice, and for each size the median of each route and what was predicted.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from paceline.comm import Net
from paceline.comm.link_benchmark import (
    RouteCandidates,
    build_route_candidates,
    measure_routes,
    num_sums_per_timing,
    time_sums,
)
from paceline.comm.routes.route_by_size import choose_route
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup

MARK = "choice: "
_SIZE_SECONDS = 2.0  # of all routes: no further repeat of a size after it


def medians_of(
    found: RouteCandidates, net: Net, group: RankGroup, num_bytes: int, repeats: int
) -> dict[str, float]:
    """Of a size by every route, in turns, the warm-up left out; fewer repeats where they take long."""
    times: dict[str, list[float]] = {word: [] for word in found.paths}
    key, num_sums, like = f"measured {num_bytes}", 1, torch.zeros(1)
    buffers = {word: path.buffer(num_bytes // 4, like, key) for word, path in found.paths.items()}
    for repeat in range(repeats + 1):
        for word in [*times] if repeat % 2 else reversed([*times]):  # they take turns
            seconds = time_sums(found.paths[word], net, group, buffers[word], key, num_sums)
            times[word].append(seconds)
        if not repeat:
            num_sums = num_sums_per_timing({word: own[0] for word, own in times.items()})
        if num_sums * sum(map(sum, times.values())) > _SIZE_SECONDS:
            break
    return {word: statistics.median(own[1:] or own) for word, own in times.items()}


def main(most_bytes: int, repeats: int) -> None:
    """Choose, then measure."""
    cluster = Cluster.from_env().connect("cpu", 120.0)
    group, net = Mesh.build(cluster, {"replica": cluster.world_size}).replica, Net(120.0)
    found = build_route_candidates(net, group)
    began = time.perf_counter()
    forecast = measure_routes(found, net, group)
    took = time.perf_counter() - began
    choice, sizes, num_bytes = choose_route(forecast), [], 1024
    while num_bytes <= most_bytes:
        medians = medians_of(found, net, group, num_bytes, repeats)
        predicted = {word: forecast.seconds(word, num_bytes) for word in medians}
        sizes.append(
            {
                "bytes": num_bytes,
                "chosen": choice.route(num_bytes),
                "measured": medians,
                "predicted": predicted,
            }
        )
        num_bytes *= 4
    if cluster.global_rank == 0:
        print(MARK + json.dumps({"choice": str(choice), "seconds": took, "sizes": sizes}), flush=True)
    net.barrier(group)
    found.close()
    cluster.disconnect()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]))
