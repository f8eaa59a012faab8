"""The progress of a run on the terminal: one live line, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.observe.metrics_schema import shows_on_terminal
from paceline.observe.step_stats import PHASES, StepStats

_WINDOW_STEPS = 20
_PLAIN_SECONDS = 5.0
_LIVE_SECONDS = 0.1  # the terminal is drawn 8 times a second, and a line that nobody sees is not made
_BAR_WIDTH = 24


class ProgressSink:
    """Shows step, loss, rate, time left and where the time goes.

    Args:
        console: where to; plain lines every few seconds if it is no terminal.
        first_step, last_step: range of the run, for the time left.
        tokens_per_sample: shows tokens/s if positive, samples/s otherwise.
        steps_per_epoch: shows which epoch of how many it is, where there are several; 0: not known.
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
        """Show one round, which may have been many steps."""
        self._recent.append(stats)
        self._ends.append(stats.step)
        now = time.monotonic()
        if now < self._next_line and stats.step + 1 != self._last:
            return
        self._next_line = now + (_LIVE_SECONDS if self._is_live else _PLAIN_SECONDS)
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
        """Show an event above the progress line; the books of the run go to the metrics file only."""
        if not shows_on_terminal(name):
            return
        flat = {**record, **record.get("metrics", {})}
        text = "  ".join(f"{k} {_format_value(v)}" for k, v in flat.items() if k != "metrics")
        self._console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last line standing."""
        if self._live.is_started:
            if self._recent:
                self._show()
            self._live.stop()

    def line(self) -> str:
        """The line for the steps seen so far."""
        last = self._recent[-1]
        seconds = sum(s.seconds for s in self._recent)
        samples = sum(s.num_samples for s in self._recent)
        rate = samples / seconds * (self._tokens or 1) if seconds else 0.0
        steps = max(1, self._ends[-1] - self._ends[0])  # a run that has gone back has made none yet
        left = seconds / steps * (self._last - last.step - 1)
        unit = "tokens/s" if self._tokens else "samples/s"
        shares = " ".join(
            f"{phase} {sum(s.phases[phase] for s in self._recent) / seconds:.0%}"
            for phase in PHASES
            if seconds
        )
        return (
            f"step {last.step + 1}/{self._last}{_format_epoch(last.epoch, self._epochs)}  loss {_format_loss(last.loss)}  "
            f"{_format_rate(rate)} {unit}  {_format_time_left(left)} left  | {shares}"
        )


def _render_bar(done: int, whole: int) -> str:
    filled = round(_BAR_WIDTH * done / max(1, whole))
    return "━" * filled + "╌" * (_BAR_WIDTH - filled)


def _format_epoch(index: int, epochs: int) -> str:
    """The number of the epoch, of how many, where the data is seen more than once."""
    return f"  epoch {index + 1}/{epochs}" if epochs > 1 else ""


def _format_loss(value: float) -> str:
    """Four digits behind the point, or of its own where these would be zeros."""
    return f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def _format_rate(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"


def _format_time_left(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _format_value(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
