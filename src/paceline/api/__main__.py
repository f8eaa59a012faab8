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
    """Make the call that is stored in the folder; rank 0 writes its result there."""
    folder, cluster = Path(sys.argv[1]), Cluster.from_env()
    call = RemoteCall.load(folder)
    options: dict[str, Any] = dict(call.options)
    if call.reports:
        options["console"] = job_output()
    result = call.function(call.recipe, call.task, **options)
    cluster.enter_phase(LEAVING)
    if cluster.global_rank == 0:
        CallResult(result, [callback.state_dict() for callback in options.get("callbacks", ())]).save(folder)


main()
