"""One rank of a call: `python -m paceline.launch -m paceline.calls FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paceline.calls.order import Given, Order
from paceline.cli.console import lasting_output
from paceline.cluster import Cluster
from paceline.phase import LEAVING


def main() -> None:
    """Make the call that lies in the folder; rank 0 gives back what came out."""
    folder, cluster = Path(sys.argv[1]), Cluster.from_env()
    order = Order.load(folder)
    options: dict[str, Any] = dict(order.options)
    if order.reports:
        options["console"] = lasting_output()
    result = order.function(order.recipe, order.task, **options)
    cluster.enter_phase(LEAVING)
    if cluster.global_rank == 0:
        Given(result, [callback.state_dict() for callback in options.get("callbacks", ())]).save(folder)


main()
