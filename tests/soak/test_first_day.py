"""The walk of a first day."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.first_day import walk


@pytest.mark.soak
def test_a_newcomer_walks_from_an_own_model_to_predictions(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("nbclient")
    for done in walk(tmp_path):
        assert done.code == 0, done.output
        assert done.step.shows in done.output, done.step.title
    runs = [path.name for path in (tmp_path / "runs").iterdir()]
    assert sum(name.endswith("-cnn") for name in runs) == 2, "a cell that runs twice has two runs"
