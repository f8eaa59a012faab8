"""The fault hook inside a worker: reports steps, waits while a fault is applied, and damages a tensor.

The guard of the launcher installs it if the lab asked for it (PACELINE_FAULTS names a folder); other workers
never import this module. Steps are counted where every training loop passes: after `step` of the first torch
optimizer of the process. Invariant: no wait is longer than `FAULT_WAIT_SECONDS`.
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
    """Return the file that marks a step as reached by a host, or its faults as done."""
    return folder / f"{what}-{host}-{step}"


def install_fault_hook(folder: Path, local_rank: int) -> None:
    """Install the hook for the fault plan of a folder in this process."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    plan = FaultPlan.from_json((folder / PLAN_FILE).read_text(encoding="utf-8"))
    register_optimizer_step_post_hook(FaultStepHook(plan, folder, socket.gethostname(), local_rank))


@dataclass
class FaultStepHook:
    """A post-step hook of torch optimizers that counts the steps of the first one."""

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
        for index in due:
            if self.plan.faults[index].kind == "nan" and self.local_rank == 0:
                self.damage(index)
        if due:
            self.wait()

    def damage(self, index: int) -> None:
        """Write a NaN into the element that the seed of the plan chooses for a fault."""
        import torch

        params = [
            p for group in self.optimizer.param_groups for p in group["params"] if p.is_floating_point()
        ]
        param = params[self.plan.draw(index, self.count, len(params), "tensor")]
        with torch.no_grad():
            param.view(-1)[self.plan.draw(index, self.count, param.numel(), "element")] = float("nan")

    def wait(self) -> None:
        """Report that the step is reached, and wait until its faults are applied."""
        # All ranks of a host touch one file, so the lab applies the faults once for each host.
        marker_path(self.folder, "reached", self.host, self.count).touch()
        expires = time.monotonic() + FAULT_WAIT_SECONDS
        while not marker_path(self.folder, "done", self.host, self.count).exists():
            if time.monotonic() > expires:
                raise LabError(
                    f"the lab did not apply the faults of step {self.count} within {FAULT_WAIT_SECONDS:g} s",
                    where=self.host,
                )
            time.sleep(_POLL_SECONDS)
