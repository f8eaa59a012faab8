"""The page of `paceline bench comm` needs nothing else, and shows every row."""

import re

import pytest

from paceline.tuning.comm_benchmark import AllReduceTiming, render_comm_page, render_comm_table

ROWS = [
    AllReduceTiming("native", "fp32", 1024, 1e-4, 1024.0, 1e-8, 1e-4),
    AllReduceTiming("ring", "fp32", 1024, 2e-4, 1024.0, 1e-8, 1e-4),
    AllReduceTiming("native", "topk:0.01+int4", 1024, 3e-4, 12.0, 0.9, 4e-4, 2.7e7),
]


@pytest.mark.capability("H9")
def test_every_row_is_on_the_page_and_nothing_is_fetched() -> None:
    page = render_comm_page(ROWS, "All-reduce of <2> ranks")
    assert "All-reduce of &lt;2&gt; ranks" in page
    assert not re.findall(r"(?:src|href)=|https?:", page)
    for row in ROWS:
        assert f"<td>{row.route}</td><td>{row.codec}</td>" in page
    assert page.count("<polyline") == 3 and "27 Mbit/s" in page


@pytest.mark.capability("H9")
def test_the_table_names_the_break_even_bandwidth() -> None:
    lines = [*render_comm_table(ROWS)]
    assert lines[0].endswith("pays below") and lines[3].endswith("27 Mbit/s") and lines[1].endswith("-")
