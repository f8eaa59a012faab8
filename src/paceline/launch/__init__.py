"""Start the processes of a job on this node, watch them, and end all of them when one fails.

Invariant: this room never imports torch (its fork server imports what it is told, in a process of its own),
and when `launch` returns, no process that it started is left. What a worker computes is not its business.
"""

from paceline.launch.fork_client import fork_server
from paceline.launch.job_spec import LaunchJob, render_workers, script_command
from paceline.launch.launcher import launch
from paceline.launch.outcome import STOPPED_EXIT_CODE, LaunchOutcome, WorkerFailure
from paceline.launch.worker_guard import guard

__all__ = [
    "STOPPED_EXIT_CODE",
    "LaunchJob",
    "LaunchOutcome",
    "WorkerFailure",
    "fork_server",
    "guard",
    "launch",
    "render_workers",
    "script_command",
]
