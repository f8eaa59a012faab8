"""One rank of a call: `python -m paceline.launch -m paceline.api FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paceline.api.remote_call import CallResult, RemoteCall
from paceline.cli.console import job_output
from paceline.job.cluster import Cluster
from paceline.job.launcher_reports import LEAVING


def main() -> None:
    """Make the call that lies in the folder; rank 0 gives back what came out."""
    folder, cluster = Path(sys.argv[1]), Cluster.from_env()
    order = RemoteCall.load(folder)
    options: dict[str, Any] = dict(order.options)
    if order.reports:
        options["console"] = job_output()
    result = order.function(order.recipe, order.task, **options)
    cluster.enter_phase(LEAVING)
    if cluster.global_rank == 0:
        CallResult(result, [callback.state_dict() for callback in options.get("callbacks", ())]).save(folder)


main()
