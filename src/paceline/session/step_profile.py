"""The profile of some steps: those of the recipe, `runtime.profile = "10:13"`, and those that are requested.

`torch.profiler` measures operations, and a thread samples Python stacks. Both only look, so the weights have
the same bits with and without a profile. For a range of the recipe each rank writes a Chrome trace as well.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from paceline.recipe.tables import parse_step_range, require_steps_of_run
from paceline.report.run_profile import (
    FOLDER,
    OperationTime,
    ProfileRequest,
    RankProfile,
    Stack,
    read_request,
    write_rank_profile,
)
from paceline.session.session import Session

_LOOK_SECONDS = 1.0
_SAMPLE_SECONDS = 0.002
_END_SECONDS = 5.0

_SendEvent = Callable[[str, Mapping[str, Any]], object]
_CodeStack = tuple[str | CodeType, ...]


class StackSampler:
    """A sampler of the Python stacks of this process, in a thread of its own.

    The thread that makes it is sampled always, other threads while the system runs them. Each sample counts
    for the time since the one before it. What all stacks of the first thread begin with is left out, except
    for the last function.

    Attributes:
        num_samples: so far.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._seconds: dict[_CodeStack, float] = defaultdict(float)
        self._training_thread, self._stopping = threading.get_ident(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="stack-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> dict[Stack, float]:
        """End the thread, and return seconds by stack."""
        self._stopping.set()
        self._thread.join(_END_SECONDS)
        main = [stack for stack in self._seconds if isinstance(stack[0], CodeType)]
        levels = takewhile(lambda level: len(set(level)) == 1, zip(*main, strict=False))
        num_common = max(0, len(list(levels)) - 1)
        roots, seconds = _source_roots(), defaultdict[Stack, float](float)
        for stack, value in self._seconds.items():
            shown = stack[num_common:] if isinstance(stack[0], CodeType) else stack
            seconds[tuple(_function_name(part, roots) for part in shown)] += value
        return dict(seconds)

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._stopping.wait(_SAMPLE_SECONDS):
            now = time.perf_counter()
            self._sample(now - last)
            last = now

    def _sample(self, seconds: float) -> None:
        """Add a sample of each thread; no frame is kept, since it would keep its local variables."""
        threads = {thread.ident: thread for thread in threading.enumerate()}
        self.num_samples += 1
        for identifier, frame in sys._current_frames().items():
            if identifier == self._training_thread:
                self._seconds[_codes(frame)] += seconds
            elif (thread := threads.get(identifier)) and thread is not self._thread and _is_running(thread):
                self._seconds[f"thread {thread.name}", *_codes(frame)] += seconds


def _codes(frame: FrameType | None) -> tuple[CodeType, ...]:
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return tuple(reversed(codes))


def _is_running(thread: threading.Thread) -> bool:
    """Return whether the system runs a thread; False where it does not say."""
    try:
        text = Path(f"/proc/self/task/{thread.native_id}/stat").read_bytes()
    except OSError:
        return False
    return text.rpartition(b")")[2].split()[:1] == [b"R"]


def _source_roots() -> list[tuple[str, str]]:
    """Return folders of source files, and what a function's name shows in place of each."""
    paths = sysconfig.get_paths()
    folders = [(f"{Path(__file__).parents[1]}/", "paceline/"), (f"{torch.__path__[0]}/", "torch/")]
    folders += [(f"{paths[name]}/", "") for name in ("purelib", "platlib")]
    return [*folders, (f"{paths['stdlib']}/", "python/"), (f"{Path.cwd()}/", "")]


def _function_name(part: str | CodeType, roots: list[tuple[str, str]]) -> str:
    if isinstance(part, str):
        return part
    path = part.co_filename
    begin, shown = next(((b, s) for b, s in roots if path.startswith(b)), (str(Path(path).parent) + "/", ""))
    return f"{part.co_qualname} ({shown}{path.removeprefix(begin)}:{part.co_firstlineno})"


class StepProfile:
    """Profiles of the rounds of this rank between two steps: those of the recipe, and those requested.

    A round that has several steps is profiled as a whole. If the run begins or ends inside the range, the
    profile has the steps that were taken.

    Args:
        first, end: indices of the first step of the recipe's range and of the one after it; equal: none.
        run_dir: requests and profiles are in its folder `profile`.
        rank: global rank.
        is_cuda: records the kernels of the GPU too.
        send_event: receives the event `profile` when it is written, or `warning` if it cannot be.
    """

    def __init__(
        self, first: int, end: int, run_dir: Path, rank: int, *, is_cuda: bool, send_event: _SendEvent
    ) -> None:
        self._range, self._run_dir, self._rank = range(first, end), run_dir, rank
        self._is_cuda, self._send_event = is_cuda, send_event
        self._profiler: torch.profiler.profile | None = None
        self._sampler: StackSampler | None = None
        self._request: ProfileRequest | None = None  # that waits for its step, or is answered now
        self._from = self._to = self._end = 0
        self._began, self._next_look = 0.0, time.monotonic() + _LOOK_SECONDS
        found = read_request(run_dir)  # what is there already was meant for an earlier start of the run
        self._last_id = None if found is None else found.id

    def before_step(self, step: int) -> bool:
        """Start before the first step of a range, and write the profile before the one after it.

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
            return False
        if step in self._range:
            self._request = None
            self._start(step, self._range.stop)
            return True
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._look_for_request()
        if self._request is not None and step >= self._request.first_step:
            self._start(step, step + self._request.num_steps)
            return True
        return False

    def close(self) -> None:
        """Write the profile of the steps so far, if the profiler runs."""
        profiler, self._profiler = self._profiler, None
        sampler, self._sampler = self._sampler, None
        request, self._request = self._request, None
        if profiler is None or sampler is None:
            return
        seconds, num_samples, stacks = time.perf_counter() - self._began, sampler.num_samples, sampler.stop()
        folder = self._run_dir / FOLDER
        try:
            profiler.stop()
            if request is None:
                folder.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(str(folder / f"rank-{self._rank}.json"))
            name, steps = "" if request is None else request.id, (self._from, self._to)
            operations = tuple(_operation_times(profiler))
            write_rank_profile(
                self._run_dir, RankProfile(name, self._rank, *steps, seconds, num_samples, operations, stacks)
            )
        except (OSError, RuntimeError) as error:
            self._send_event("warning", {"text": f"the profile cannot be written: {error}"})
            return
        self._send_event("profile", {"step": self._from, "end": self._to, "path": str(folder)})

    def _look_for_request(self) -> None:
        """Take a new request, and forget one that was withdrawn."""
        request = read_request(self._run_dir)
        if request is None:
            self._request = None  # whoever has waited for it is gone
        elif request.id != self._last_id:
            self._last_id = request.id
            self._request = request if request.includes(self._rank) else None

    def _start(self, step: int, end: int) -> None:
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
        self._end = end
        self._began, self._sampler = time.perf_counter(), StackSampler()


def _operation_times(profiler: torch.profiler.profile) -> Iterator[OperationTime]:
    """Yield the operations; kernels of a GPU are part of those that have launched them."""
    for event in profiler.key_averages():
        if event.device_type.name == "CPU" and not event.key.startswith("["):
            yield OperationTime(
                event.key,
                event.count,
                1e-6 * event.self_cpu_time_total,
                1e-6 * event.self_device_time_total,
            )


def build_step_profile(session: Session, run_dir: Path | None, send_event: _SendEvent) -> StepProfile | None:
    """Return the profiles of a run; None if it has no folder.

    Raises:
        RecipeError: the run ends before the first step of the recipe's range.
    """
    text = session.recipe.runtime.profile
    if run_dir is None:
        return None
    if text is not None:
        require_steps_of_run("runtime.profile", text, session.num_steps)
    first, end = (0, 0) if text is None else parse_step_range(text)
    is_cuda = session.runner.sharded_model.device.type == "cuda"
    rank = session.cluster.global_rank
    return StepProfile(first, end, run_dir, rank, is_cuda=is_cuda, send_event=send_event)
