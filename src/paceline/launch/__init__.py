"""Start the processes of a job on this node, supervise them, and end all of them when one fails.

Invariants: this package never imports torch (only its fork server does, in a process of its own), and when
`launch` returns, no process that it started is left. It knows nothing of what a worker computes.
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
