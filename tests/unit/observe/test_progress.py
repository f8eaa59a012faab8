"""The progress line: what it says, plain lines without a terminal, one live line with one."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from paceline.observe import PHASES, StepStats
from paceline.observe import progress as module
from paceline.observe.progress import ProgressSink
from paceline.testing.contracts.sink_contract import make_step
from tests.unit.observe.clock import Clock


def make_stats(step: int, **changes: Any) -> StepStats:
    phases = {**dict.fromkeys(PHASES, 0.0), "forward": 0.125, "backward": 0.25}
    values = {"loss": 2.0, "num_samples": 10, "seconds": 0.5, "phases": phases}
    return replace(make_step(step), **(values | changes))


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=60), out


def lines_for(steps: list[StepStats], last_step: int, tokens_per_sample: int = 0) -> str:
    progress = ProgressSink(plain_console()[0], 0, last_step, tokens_per_sample)
    for stats in steps:
        progress.step(stats)
    return progress.line()


def test_the_line_says_step_loss_rate_time_left_and_where_the_time_goes() -> None:
    assert lines_for([make_stats(0), make_stats(1)], last_step=100) == (
        "step 2/100  loss 2.0000  20 samples/s  0:49 left  | "
        "data 0% forward 25% backward 50% communication 0% optimizer 0%"
    )


def test_text_is_counted_in_tokens_and_large_rates_are_short() -> None:
    assert "  1280 tokens/s  " in lines_for([make_stats(0)], 10, tokens_per_sample=64)
    assert "  20.5k tokens/s  " in lines_for([make_stats(0)], 10, tokens_per_sample=1024)


def test_rate_and_time_left_follow_the_recent_steps() -> None:
    slow, fast = [make_stats(i, seconds=10.0) for i in range(30)], [make_stats(30 + i) for i in range(20)]
    assert "20 samples/s  1:30 left" in lines_for(slow + fast, last_step=230)


def test_a_loss_that_is_not_a_number_and_a_step_of_no_time_can_be_shown() -> None:
    assert lines_for([make_stats(0, loss=float("nan"), seconds=0.0)], 1).startswith(
        "step 1/1  loss nan  0 samples/s"
    )


def test_without_a_terminal_there_is_a_line_every_few_seconds_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    console, out = plain_console()
    progress = ProgressSink(console, 0, 40, 0)
    for step in range(40):
        progress.step(make_stats(step))
        clock.now += 1.0
    progress.close()
    found = out.getvalue().splitlines()
    assert [int(line.split()[1].partition("/")[0]) for line in found] == [1, 6, 11, 16, 21, 26, 31, 36, 40]
    assert all(line.endswith("optimizer 0%") for line in found)  # long lines are not broken
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_there_is_one_live_line_with_a_bar_that_stays_at_the_end() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160, color_system=None)
    progress = ProgressSink(console, 0, 4, 0)
    for step in range(4):
        progress.step(make_stats(step, loss=float(step)))
    progress.close()
    last = out.getvalue().rstrip("\n").split("\r")[-1].split("\x1b[2K")[-1]
    assert "━" * 24 + " step 4/4  loss 3.0000" in last
    assert "\x1b[?25h" in out.getvalue()  # the cursor is back


@pytest.mark.parametrize("done, whole, filled", [(0, 8, 0), (1, 8, 3), (4, 8, 12), (8, 8, 24), (0, 0, 0)])
def test_the_bar_is_filled_in_proportion(done: int, whole: int, filled: int) -> None:
    out = io.StringIO()
    progress = ProgressSink(Console(file=out, force_terminal=True, width=160, color_system=None), 0, whole, 0)
    progress.step(make_stats(done - 1))
    progress.close()
    bar = "━" * filled + "╌" * (24 - filled)
    assert f"{bar} step {done}/{whole}" in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_an_event_is_a_line_of_its_own_with_metrics_beside_the_rest(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=60, color_system=None)
    progress = ProgressSink(console, 0, 10, 0)
    progress.step(make_stats(0))
    progress.event("evaluation", {"step": 1, "loss": 1.23456789, "metrics": {"accuracy": 0.5}})
    progress.close()
    assert "evaluation: step 1  loss 1.2346  accuracy 0.5" in out.getvalue()


def test_a_path_with_brackets_is_shown_as_it_is() -> None:
    console, out = plain_console()
    progress = ProgressSink(console, 0, 10, 0)
    progress.event("checkpoint", {"path": "runs/lr[bold]/step-1 [red]"})
    progress.close()
    assert out.getvalue() == "checkpoint: path runs/lr[bold]/step-1 [red]\n"


def test_closing_twice_is_closing_once() -> None:
    out = io.StringIO()
    progress = ProgressSink(Console(file=out, force_terminal=True), 0, 1, 0)
    progress.close()
    said = out.getvalue()
    progress.close()
    assert "\x1b[?25h" in said  # the cursor is back
    assert out.getvalue() == said


@pytest.mark.parametrize(
    "epoch, epochs, loss, begin",
    [
        (0, 0, 2.0, "step 1/9  loss 2.0000  "),
        (0, 1, 2.0, "step 1/9  loss 2.0000  "),
        (0, 3, 2.0, "step 1/9  epoch 1/3  loss 2.0000  "),
        (2, 3, 2.0, "step 1/9  epoch 3/3  loss 2.0000  "),
        (0, 0, 3.21e-7, "step 1/9  loss 3.210e-07  "),
        (0, 0, 0.0, "step 1/9  loss 0.0000  "),
        (0, 0, float("nan"), "step 1/9  loss nan  "),
    ],
)
def test_epochs_are_counted_and_tiny_losses_have_digits(
    epoch: int, epochs: int, loss: float, begin: str
) -> None:
    progress = ProgressSink(plain_console()[0], 0, 9, 0, -(-9 // epochs) if epochs else 0)
    progress.step(make_stats(0, epoch=epoch, loss=loss))
    assert progress.line().startswith(begin)


def test_the_time_left_counts_steps_although_a_round_has_many() -> None:
    """A server's round is a stretch of steps: 30 steps took 1.5 s, so 70 take 3.5 s."""
    rounds = [make_stats(step) for step in (9, 19, 29)]
    assert "0:04 left" in lines_for(rounds, last_step=100)
