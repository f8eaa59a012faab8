"""A rank is lost that should have written a part of a checkpoint, and the job goes on without it."""

import json
from pathlib import Path

import pytest

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.storage import StorageFolder
from tests.unit.checkpoint.states import holds, make_state, saver, whole


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints") if request.param == "disk" else f"memory://{tmp_path.name}"


@pytest.mark.capability("N5", clause="a server and its launcher outlive workers")
@pytest.mark.parametrize("needed", [False, True])
def test_where_the_job_outlives_a_rank_its_part_is_not_needed_or_the_draft_is_dropped(
    needed: bool, place: str
) -> None:
    """What follows is saved as if nothing had been; of one that is dropped nothing is left."""
    there, state = ["rank 1"], make_state()

    def both(text: str) -> list[str]:
        told = json.loads(text)
        other = {**told, "rank": 1, "table": told["table"] if needed else []}
        return [text, json.dumps(other)][: 1 + len(there)]

    with saver(place, state, exchange=both, left=lambda: (0,), survives_lost_ranks=lambda: True) as one:
        name = one.save()
        assert one.wait_published(name) == (not needed) and one.dropped == ({name} if needed else set())
        there.clear()
        second = one.save()
        assert one.wait_published(second)
        assert one.dropped == set()  # the name has come again
    assert not CheckpointCatalog.read(StorageFolder(place)).broken and len(whole(place)) == 2 - needed
    assert holds(place, second, state)
