"""`paceline bench machine` measures everything, with processes of its own for collectives."""

import json
from pathlib import Path

import pytest

from tests.commands import run


@pytest.mark.soak
@pytest.mark.capability("P14")
def test_a_machine_is_measured_with_collectives(tmp_path: Path) -> None:
    done = run(tmp_path, "bench", "machine", "--json", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"schema", "host", "time", "facts", "measured", "slow_paths", "not_measured"}
    missing = report["not_measured"].get("collectives of two processes", "")
    assert report["measured"].get("all_reduce.gloo.2_processes.16MiB") or "busy" in missing
    assert "measuring collectives" in done.stderr or "busy" in missing
    assert list(tmp_path.iterdir()) == []
