"""The page: whole in itself, its text escaped, several runs side by side."""

import json
import re
from html import unescape
from pathlib import Path

import pytest

from paceline.report import read_run, render_page, write_report
from tests.unit.report.runs import evaluation, rank_record, start, steps, write

END = ("end", {"step": 10, "stopped": False})


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    write(tmp_path, ("run", start()), *steps(0, 10), ("ranks", rank_record(0)), END)
    text = write_report(tmp_path).read_text()
    assert [p.name for p in tmp_path.iterdir() if "report" in p.name] == ["report.html"]
    assert not re.findall(r"https?://|@import|url\(|<script src|<link rel=.stylesheet", text)
    assert text.count("<style>") == 1 and "</html>" in text


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b 'c'"])
def test_text_of_a_run_is_shown_and_never_run(tmp_path: Path, evil: str) -> None:
    recipe = f"task = {json.dumps(evil)}\n"
    error = ("error", {"text": evil, "kind": "error", "exit_code": 1})
    run = write(tmp_path, ("run", start()), *steps(0, 2), error, recipe=recipe)
    page = render_page([run])
    body = page[page.index("<body>") :]
    assert evil in unescape(body) and (evil not in body or "<" not in evil)
    assert body.count("<script>") == 1 and "<img" not in body


def test_the_values_under_the_pointer_are_those_of_the_rows(tmp_path: Path) -> None:
    run = write(tmp_path, ("run", start()), *steps(0, 3, loss=0.25), evaluation(3, 0.125))
    charts = [json.loads(unescape(text)) for text in re.findall(r'data-chart="([^"]*)"', render_page([run]))]
    training, held_out = charts[0]
    assert (training["step"], training["text"]) == ([1, 2, 3], ["0.25"] * 3)
    assert (held_out["step"], held_out["text"]) == ([3], ["0.125"])


def test_several_runs_are_compared_with_what_differs_in_their_recipes(tmp_path: Path) -> None:
    small, large = (
        write(
            tmp_path / name, ("run", start()), *steps(0, 4), recipe=f'task = "digits"\nbatch.size = {size}\n'
        )
        for name, size in (("small", 32), ("large", 64))
    )
    page = render_page([small, large])
    assert "2 runs compared" in page and "batch.size" in page and "<td>32</td><td>64</td>" in page
    assert "The recipes are identical." in render_page([small, small])


def test_a_certificate_is_shown(tmp_path: Path) -> None:
    write(tmp_path, ("run", start()))
    found = {"ok": False, "conclusion": "diverges in step 0", "strategy": "ddp", "processes": 2, "steps": 3}
    (tmp_path / "certificate.json").write_text(json.dumps(found))
    page = render_page([read_run(tmp_path)])
    assert "diverges in step 0" in page and "ddp, 2 processes, 3 steps" in page


def test_hyperparameters_are_at_the_top(tmp_path: Path) -> None:
    recipe = """task = "digits"
steps = 10
[options]
hidden = [64]
[optimizer]
name = "adamw"
lr = 0.003
[runtime]
device = "cpu"
"""
    page = render_page([write(tmp_path, ("run", start()), *steps(0, 10), END, recipe=recipe)])
    top = page[page.index("Hyperparameters") : page.index("Curves")]
    pairs = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", top))
    assert pairs == {
        "steps": "10",
        "options.hidden": "[64]",
        "optimizer.name": "adamw",
        "optimizer.lr": "0.003",
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_have_one_table_and_cores_busy_is_explained(tmp_path: Path, ranks: int) -> None:
    records = [("ranks", rank_record(rank)) for rank in range(ranks)]
    run = write(tmp_path, ("run", start(ranks=ranks)), *steps(0, 10), *records, END)
    page = render_page([run])
    (table,) = (part for part in page.split("<table>") if "cores busy</th>" in part)
    body = table[table.index("<tbody>") : table.index("</tbody>")]
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body.split("<tr>")[1:]]
    head = re.findall(r"<th[^>]*>(.*?)</th>", table[: table.index("<tbody>")])
    assert len(cells) == ranks and all(len(row) == len(head) for row in cells)
    assert dict(zip(head, cells[0], strict=True))["compute"] == "500 ms"  # 2 + 2.5 + 0.5 s in ten rounds
    assert "Cores busy is the CPU time of the process" in page and page.count("peak memory</th>") == 1


def test_evaluations_are_marked_in_the_chart_of_the_loss(tmp_path: Path) -> None:
    rows = [*steps(0, 4), evaluation(4, 0.5), *steps(4, 8), evaluation(8, 0.25)]
    page = render_page([write(tmp_path, ("run", start()), *rows)])
    frames = [json.loads(unescape(text)) for text in re.findall(r'data-frame="([^"]*)"', page)]
    assert frames[0]["marks"] == [
        [4, "evaluation at step 4: held-out loss 0.5"],
        [8, "evaluation at step 8: held-out loss 0.25, the best"],
    ]
    assert not any(frame["marks"] for frame in frames[2:])


@pytest.mark.capability("Q3", "Q6")
def test_clients_are_shown_with_their_labels_and_who_was_left_out(tmp_path: Path) -> None:
    """A record of another shape is left out, like that of any event."""
    partition = {
        "how": "dirichlet:0.3",
        "clients": 2,
        "samples": 9,
        "smallest": 3,
        "largest": 6,
        "redraws": 1,
        "names": ["north", "south"],
        "sizes": [3, 6],
        "labels": ["cat", "dog"],
        "table": [[3, 0], [2, 4]],
    }
    cohort = {"step": 0, "clients": ["north", "south"], "left_out": {"north": "it has no samples"}}
    sizes = {"samples": 6, "down_bytes": 2000, "up_bytes": 1000}
    bad = ("cohort", {**cohort, **sizes, "clients": [1, 2]})
    run = write(
        tmp_path,
        *(("run", start()), ("partition", partition), ("cohort", cohort | sizes), bad, END),
        recipe='[federated]\nweights = "equal"\n',
    )
    page = render_page([run])
    assert '9 samples were divided among 2 clients ("dirichlet:0.3"), who have 3 to 6 samples.' in unescape(
        page
    )
    assert "1 draw left a client empty" in page
    assert "The weight of a client in the mean is 1, whatever its samples." in page
    assert (
        "Left out: north (it has no samples) 1 time." in page
        and "1.95 KiB went to clients and 1000 B came" in page
    )
    assert "<td>3</td><td>3</td><td></td>" in page and "<td>6</td><td>2</td><td>4</td>" in page
    assert page.count("north: it has no samples") == 1


@pytest.mark.capability("T2")
def test_returns_are_shown_with_the_ages_of_rows(tmp_path: Path) -> None:
    record = {
        "step": 0,
        "environment_steps": 64,
        "episodes": 3,
        "terminated": 2,
        "truncated": 1,
        "mean_return": 21.5,
        "recent_return": "nan",
        "ages": {"0": 64},
        "not_equal": 0,
    }
    bad = {**record, "ages": {"0": "many"}}
    page = render_page([write(tmp_path, ("run", start()), ("rollout", record), ("rollout", bad), END)])
    assert "64 steps of environments; 3 episodes ended: 2 terminated, 1 were truncated." in page
    assert "Rows by the age of their weights, in versions: 64 of age 0." in page
    assert "no row had another log-probability" in page and "mean return" in page
