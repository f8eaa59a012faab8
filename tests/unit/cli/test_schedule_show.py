"""`paceline schedule show` prints a schedule, draws it, and writes rows that a strategy reads."""

from pathlib import Path

import pytest

from paceline.cli import schedule_show
from paceline.errors import RecipeError, StrategyError


@pytest.mark.capability("D7", "D11")
def test_it_prints_draws_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, rows = tmp_path / "one.svg", tmp_path / "one.csv"
    schedule_show.show("1f1b", stages=4, micro=8, picture=picture, rows=rows)
    printed = capsys.readouterr().out
    assert "stage 3  .  .  .  F0 B0 -  F1 B1 -" in printed
    assert "bubble: 27.3 % of 33 forwards' time on 4 stages" in printed
    assert "micro-batches in flight, by stage: 4, 3, 2, 1" in printed
    assert picture.read_text().startswith("<svg ") and len(rows.read_text().splitlines()) == 1 + 4 * 8 * 2
    schedule_show.show(str(rows), stages=4, micro=8)
    assert capsys.readouterr().out.splitlines()[1:] == printed.splitlines()[1:]


@pytest.mark.capability("D11")
def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(RecipeError, match="one of gpipe, 1f1b, interleaved, zero-bubble, file"):
        schedule_show.show("1f2b")
    with pytest.raises(StrategyError, match="cannot be read"):
        schedule_show.show("nowhere.csv")
