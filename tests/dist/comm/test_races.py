"""Who touches a tensor between launch and wait is found, with the line of both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.comm import NativeCollective, Net
from paceline.comm.race_detector import RaceDetector, WatchedCollective
from paceline.comm.routes import MessageCollective
from paceline.comm.routes.ring_route import RingRoute
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, duplicate_group
from paceline.testing.rank_processes import run_ranks

TOUCHES: dict[str, Callable[[Tensor], object]] = {
    "read": lambda x: x.sum(),
    "read a part": lambda x: x[2:] + 1,
    "write": lambda x: x.add_(1),
    "write a view": lambda x: x.view(2, -1)[0].zero_(),
    "several": lambda x: torch._foreach_norm([x]),
    "backward": lambda x: (torch.ones(10, requires_grad=True) * 2).backward(x),  # noqa: PLW0108 (a graph of its own each time)
}


@pytest.mark.capability("G4", "Z12")
def test_every_touch_between_launch_and_wait_is_an_error_that_names_both_lines() -> None:
    def run(cluster: Cluster) -> dict[str, str]:
        group = Mesh.build(cluster, {"replica": 2}).replica
        ring = MessageCollective(Net(60.0), duplicate_group(group, "ring"), RingRoute())
        found = {}
        for path in (NativeCollective(Net(60.0), group), ring):
            for name, touch in TOUCHES.items():
                detector, x = RaceDetector(), torch.ones(10)
                watched = WatchedCollective(path, detector)
                with detector:
                    handle = watched.all_reduce(x, "x")
                    try:
                        touch(x)
                        found[name] = "nothing"
                    except CommunicationError as error:
                        found[name] = str(error)
                    handle.wait()
                    touch(x)  # it is its own again
        ring.close()
        return found

    for found in run_ranks(run, 2):
        assert found.keys() == TOUCHES.keys()
        for name, text in found.items():
            assert text.count("test_races.py:") == 2 and "all_reduce was launched at" in text, (name, text)


@pytest.mark.capability("Z12")
def test_without_a_detector_a_race_goes_unseen_and_others_may_be_touched() -> None:
    def run(cluster: Cluster) -> float:
        group = Mesh.build(cluster, {"replica": 2}).replica
        path = NativeCollective(Net(60.0), group)
        x, other, detector = torch.ones(10), torch.ones(10), RaceDetector()
        plain = path.all_reduce(x, "x")
        x.sum()
        plain.wait()
        with detector:
            handle = WatchedCollective(path, detector).all_reduce(x, "x")
            total = float(other.add_(1).sum())
            handle.wait()
        return total

    assert run_ranks(run, 2) == [20.0, 20.0]
