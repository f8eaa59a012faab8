"""One rank of `benchmarks.diloco_libraries`: rounds of DiLoCo, and of Hivemind's averager, which take turns.

Started in every host of a lab by `paceline run`. Rank 0 prints one line: the series of all sides, and the
bytes that a host sent over its link in a round, by the kernel's count, the mean of hosts and rounds.
Hivemind's processes are forked before this one connects, as a fork keeps none of its threads.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.allocator import keep_freed_memory
from benchmarks.hivemind_peer import Peer
from benchmarks.loops import next_loss
from benchmarks.measure import Series, Side, merge_ranks, take_turns
from benchmarks.pair import slowest
from benchmarks.route_job import Counted
from benchmarks.server import OneRound, task_of
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing.parity import build_test_session

MARK = "rounds: "
CODECS = {"fp32": "fp32", "fp16": "fp16", "int8": "8 bits"}
"""Of both sides, by ours."""
_DEADLINE_SECONDS = 120.0
_STEPS = 10_000  # more than are ever run


def ours(codec: str, megabytes: int, cluster: Cluster) -> Side:
    """A session that meets in every step: forward, backward, both updates and the exchange."""
    ranks = cluster.world_size
    recipe = Recipe(
        task="own",
        steps=_STEPS,
        batch={"size": ranks, "shards": ranks},
        optimizer={"name": "sgd", "lr": 1e-6},
        strategy=Strategy.parse(f"replicas={ranks} sync=diloco:1 codec={codec}"),
    )
    session = build_test_session(cluster, recipe, partial(task_of, megabytes))
    session.parts.feed = OneRound(session.feed.work, session.feed.loader, _STEPS)
    return Side(f"diloco, {codec}", partial(next_loss, session, session.rounds()))


def addresses(folder: Path, own: Callable[[], list[str]], rank: int) -> list[str]:
    """Of the first peer, which writes them; the others wait for its file."""
    path = folder / "addresses"
    if rank == 0:
        draft = folder / "draft"
        draft.write_text("\n".join(own()), encoding="utf-8")
        draft.rename(path)
    expires = time.monotonic() + _DEADLINE_SECONDS
    while not path.exists():
        if time.monotonic() > expires:
            raise TimeoutError("the first peer of Hivemind has written no address")
        time.sleep(0.05)
    return path.read_text(encoding="utf-8").split()


def peers(megabytes: int, folder: Path, cluster: Cluster, stack: ExitStack) -> Iterator[Side]:
    """One of Hivemind for each codec."""
    here, ranks = socket.gethostbyname(socket.gethostname()), cluster.world_size
    for codec, name in CODECS.items():
        place = folder / codec
        place.mkdir(exist_ok=True)
        find = partial(addresses, place, rank=cluster.global_rank)
        peer = stack.enter_context(Peer(name, megabytes, here, ranks, find, cluster.global_rank))
        yield Side(f"Hivemind, {name}", peer.meet)


def main(megabytes: int, repeats: int, steps: int, folder: str) -> None:
    """Measure all sides."""
    cluster = Cluster.from_env()
    keep_freed_memory()
    with ExitStack() as stack:
        theirs = [*peers(megabytes, Path(folder), cluster, stack)]
        cluster = cluster.connect("cpu", _DEADLINE_SECONDS)
        counted = [Counted(side) for side in [*(ours(c, megabytes, cluster) for c in CODECS), *theirs]]
        turns = [Side(one.side.name, one.step) for one in counted]
        mine = take_turns(
            turns,
            repeats=repeats,
            steps=steps,
            warmup=2,
            ready=dist.barrier,
            budget_seconds=150.0,
            slowest=slowest,
        )
        ranks: list[tuple[list[Series], list[float]]] = [([], [])] * cluster.world_size
        dist.all_gather_object(ranks, (mine, [statistics.mean(one.sent) for one in counted]))
        if cluster.global_rank == 0:
            means = [statistics.mean(hosts) for hosts in zip(*(sent for _, sent in ranks), strict=True)]
            sent = dict(zip((one.side.name for one in counted), means, strict=True))
            series = [asdict(one) for one in merge_ranks([rows for rows, _ in ranks])]
            print(MARK + json.dumps({"series": series, "sent": sent}), flush=True)
        dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
