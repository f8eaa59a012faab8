"""What `paceline bench comm` measures: every route and codec that was asked for, with its error and bytes."""

import pytest

from paceline.comm import Net
from paceline.job.cluster import Cluster
from paceline.testing.rank_processes import run_ranks
from paceline.tuning.comm_benchmark import AllReduceTiming, default_routes, measure_comm


@pytest.mark.capability("G13", "H9")
def test_routes_are_exact_and_codecs_send_less() -> None:
    def run(cluster: Cluster) -> list[AllReduceTiming]:
        return measure_comm(cluster, Net(60.0), default_routes(), ["int8", "topk:0.01"], [4096])

    first, second = run_ranks(run, 2)
    assert first[0].record().keys() == second[0].record().keys()
    by_word = {(row.route, row.codec): row for row in first}
    routes = {route for route, codec in by_word if codec == "fp32"}
    assert routes == {
        "native",
        "ring",
        "tree",
        "recursive-doubling",
        "grid",
        "shared-memory",
    }  # one host: one level
    plain = by_word["native", "fp32"]
    for (_, codec), row in by_word.items():
        assert row.seconds > 0 and row.processor_seconds >= 0
        assert row.error < 1e-6 if codec == "fp32" else 1e-4 < row.error < 1.0
        assert codec == "fp32" or row.sent_bytes < plain.sent_bytes / 3
