"""The profile of some steps by `torch.profiler`, one Chrome trace per rank: `runtime.profile = "10:13"`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from paceline.recipe.tables import parse_step_range, require_steps_of_run
from paceline.session.session import Session

FOLDER = "profile"

_SendEvent = Callable[[str, Mapping[str, Any]], object]


class StepProfile:
    """A profile of the rounds of this rank between two steps.

    A round that has several steps is profiled as a whole. If the run begins or ends inside the range, the
    trace has the steps that were taken.

    Args:
        first, end: indices of the first step of the range and of the one after it.
        run_dir: the trace is `profile/rank-N.json` in this folder.
        rank: global rank.
        is_cuda: records the kernels of the GPU too.
        send_event: receives the event `profile` when the trace is written, or `warning` if it cannot be.
    """

    def __init__(
        self, first: int, end: int, run_dir: Path, rank: int, *, is_cuda: bool, send_event: _SendEvent
    ) -> None:
        self._first, self._end, self._send_event = first, end, send_event
        self._path = run_dir / FOLDER / f"rank-{rank}.json"
        self._is_cuda = is_cuda
        self._profiler: torch.profiler.profile | None = None
        self._from = self._to = 0

    def before_step(self, step: int) -> bool:
        """Start before the first step of the range, and write the trace before the one after it.

        Args:
            step: index of the step that comes next.
        Returns:
            Whether something was done whose time does not belong to that step.
        """
        if self._profiler is not None:
            self._to = max(self._to, step)
            if step >= self._end or step <= self._from:  # the run has gone back
                self.close()
                return True
        elif self._first <= step < self._end:
            self._start(step)
            return True
        return False

    def close(self) -> None:
        """Write the trace of the steps so far, if the profiler runs."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        try:
            profiler.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._send_event("warning", {"text": f"the profile cannot be written: {error}"})
            return
        self._send_event("profile", {"step": self._from, "end": self._to, "path": str(self._path.parent)})

    def _start(self, step: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Lanes and backward run in threads of their own.
        config = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler.profile(
            activities=activities, experimental_config=config, acc_events=True
        )
        self._profiler.start()
        self._from = self._to = step


def build_step_profile(session: Session, run_dir: Path | None, send_event: _SendEvent) -> StepProfile | None:
    """Return the profile that the recipe asks for; None if it asks for none or the run has no folder.

    Raises:
        RecipeError: the run ends before the first step of the range.
    """
    text = session.recipe.runtime.profile
    if text is None or run_dir is None:
        return None
    require_steps_of_run("runtime.profile", text, session.num_steps)
    first, end = parse_step_range(text)
    is_cuda = session.runner.sharded_model.device.type == "cuda"
    rank = session.cluster.global_rank
    return StepProfile(first, end, run_dir, rank, is_cuda=is_cuda, send_event=send_event)
