"""Tasks: what ships, and how a task that the user wrote is found."""

from paceline.tasks.task_registry import SHIPPED, load_samples, load_task, run_build

__all__ = ["SHIPPED", "load_samples", "load_task", "run_build"]
