"""The progress of a run on a terminal: one live line, or plain lines where the output is no terminal.

The only module of `paceline.observe` that imports rich; a run imports it when it builds this sink.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.observe.metrics_schema import shows_on_terminal
from paceline.observe.sinks import SinkSite, format_fields
from paceline.observe.step_stats import PHASES, StepStats

_WINDOW_STEPS = 20
_SECONDS_BETWEEN_LINES = 5.0
# rich draws 8 times a second; rendering a line that is never drawn would only slow down short steps.
_SECONDS_BETWEEN_UPDATES = 0.1
_BAR_WIDTH = 24


class ProgressSink:
    """A progress display with step, loss, rate, time left and the share of time of each phase.

    Args:
        console: the terminal; plain lines every few seconds if it is none.
        first_step, last_step: range of the run, for the time left.
        tokens_per_sample: shows tokens/s if positive, samples/s otherwise.
        steps_per_epoch: shows the epoch if there are several; 0 if it is not known.
    """

    def __init__(
        self,
        console: Console,
        first_step: int,
        last_step: int,
        tokens_per_sample: int,
        steps_per_epoch: int = 0,
    ) -> None:
        self._console = console
        self._last = last_step
        self._tokens = tokens_per_sample
        self._epochs = -(-last_step // steps_per_epoch) if steps_per_epoch else 0
        self._recent: deque[StepStats] = deque(maxlen=_WINDOW_STEPS)
        self._ends: deque[int] = deque([first_step - 1], maxlen=_WINDOW_STEPS + 1)
        self._live = Live(console=console, refresh_per_second=8, transient=False)
        self._next_line = 0.0
        self._is_live = console.is_terminal
        if self._is_live:
            self._live.start()

    def step(self, stats: StepStats) -> None:
        """Show one round, which may have many steps."""
        self._recent.append(stats)
        self._ends.append(stats.step)
        now = time.monotonic()
        if now < self._next_line and stats.step + 1 != self._last:
            return
        self._next_line = now + (_SECONDS_BETWEEN_UPDATES if self._is_live else _SECONDS_BETWEEN_LINES)
        self._show()

    def _show(self) -> None:
        if self._is_live:
            done = self._recent[-1].step + 1
            self._live.update(
                Text(f"{_render_bar(done, self._last)} {self.line()}", overflow="ellipsis", no_wrap=True)
            )
        else:
            self._console.print(self.line(), markup=False, highlight=False, soft_wrap=True)

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Print an event above the progress line, unless only `metrics.jsonl` keeps it."""
        if not shows_on_terminal(name):
            return
        text = format_fields({**record, **record.get("metrics", {})})
        self._console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Show the last step and stop the live display."""
        if self._live.is_started:
            if self._recent:
                self._show()
            self._live.stop()

    def line(self) -> str:
        """Return the progress line for the steps seen so far."""
        last = self._recent[-1]
        seconds = sum(s.seconds for s in self._recent)
        samples = sum(s.num_samples for s in self._recent)
        rate = samples / seconds * (self._tokens or 1) if seconds else 0.0
        steps = max(1, self._ends[-1] - self._ends[0])  # negative after a roll-back
        left = seconds / steps * (self._last - last.step - 1)
        unit = "tokens/s" if self._tokens else "samples/s"
        shares = " ".join(
            f"{phase} {sum(s.phases[phase] for s in self._recent) / seconds:.0%}"
            for phase in PHASES
            if seconds
        )
        return (
            f"step {last.step + 1}/{self._last}{_format_epoch(last.epoch, self._epochs)}  "
            f"loss {_format_loss(last.loss)}  {_format_rate(rate)} {unit}  "
            f"{_format_time_left(left)} left  | {shares}"
        )


def build_progress(site: SinkSite, argument: object) -> ProgressSink | None:
    """Build the progress display; None for a run without a console."""
    if site.console is None:
        return None
    return ProgressSink(
        site.console, site.first_step, site.last_step, site.tokens_per_sample, site.steps_per_epoch
    )


def _render_bar(num_done: int, num_steps: int) -> str:
    filled = round(_BAR_WIDTH * num_done / max(1, num_steps))
    return "━" * filled + "╌" * (_BAR_WIDTH - filled)


def _format_epoch(index: int, num_epochs: int) -> str:
    return f"  epoch {index + 1}/{num_epochs}" if num_epochs > 1 else ""


def _format_loss(value: float) -> str:
    """Return four decimals, or scientific notation for a loss that would show as zeros."""
    return f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def _format_rate(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"


def _format_time_left(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes}:{remainder:02d}"
