"""Start the processes of a job on this node, watch them, and end all of them when one fails.

Invariant: this room never imports torch (its fork server imports what it is told, in a process of its own),
and when `launch` returns, no process that it started is left. What a worker computes is not its business.
"""

from paceline.launch.forked import fork_server
from paceline.launch.job import Job
from paceline.launch.local import launch
from paceline.launch.outcome import STOPPED_EXIT_CODE, Failure, Outcome
from paceline.launch.render import render_workers, script_command
from paceline.launch.worker import guard

__all__ = [
    "STOPPED_EXIT_CODE",
    "Failure",
    "Job",
    "Outcome",
    "fork_server",
    "guard",
    "launch",
    "render_workers",
    "script_command",
]
