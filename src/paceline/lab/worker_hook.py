"""Inside a worker of a job in the lab: report steps, wait while a fault is done, damage a tensor.

A worker is armed by the launcher's `guard` when the lab asked for it (PACELINE_FAULTS names a folder). Steps
are counted where every training loop passes: after `step` of the first torch optimizer of the process.
Invariant: a worker that nobody armed imports none of this, and no wait here is longer than
`FAULT_WAIT_SECONDS`.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import LabError
from paceline.lab.fault_plan import FaultPlan

FAULT_WAIT_SECONDS = 20.0
PLAN_FILE = "plan.json"
_POLL_SECONDS = 0.002


def marker_path(folder: Path, what: str, host: str, step: int) -> Path:
    """The file that says that a host reached a step, or that the faults of that step are done."""
    return folder / f"{what}-{host}-{step}"


def install_fault_hook(folder: Path, local_rank: int) -> None:
    """Let this process take part in the fault plan of a folder."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    plan = FaultPlan.from_json((folder / PLAN_FILE).read_text(encoding="utf-8"))
    register_optimizer_step_post_hook(FaultStepHook(plan, folder, socket.gethostname(), local_rank))


@dataclass
class FaultStepHook:
    """Counts the steps of the first optimizer that takes one; called after each."""

    plan: FaultPlan
    folder: Path
    host: str
    local_rank: int
    optimizer: Any = field(default=None)
    count: int = 0

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.optimizer is None:
            self.optimizer = optimizer
        if optimizer is not self.optimizer:
            return
        self.count += 1
        due = self.plan.due(self.host, self.count)
        for place in due:
            if self.plan.faults[place].kind == "nan" and self.local_rank == 0:
                self.damage(place)
        if due:
            self.wait()

    def damage(self, place: int) -> None:
        """Write a NaN into one element that the plan's seed chooses."""
        import torch

        params = [
            p for group in self.optimizer.param_groups for p in group["params"] if p.is_floating_point()
        ]
        param = params[self.plan.draw(place, self.count, len(params), "tensor")]
        with torch.no_grad():
            param.view(-1)[self.plan.draw(place, self.count, param.numel(), "element")] = float("nan")

    def wait(self) -> None:
        """Say that the step is reached, and wait until what it triggers is done."""
        marker_path(self.folder, "reached", self.host, self.count).touch()
        expires = time.monotonic() + FAULT_WAIT_SECONDS
        while not marker_path(self.folder, "done", self.host, self.count).exists():
            if time.monotonic() > expires:
                raise LabError(
                    f"the lab did not do the faults of step {self.count} within {FAULT_WAIT_SECONDS:g} s",
                    where=self.host,
                )
            time.sleep(_POLL_SECONDS)
