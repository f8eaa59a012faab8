"""Repeat the order in which the server of an earlier run heard its workers."""

from __future__ import annotations

from pathlib import Path

from paceline.comm.channel import Channel, InOrder
from paceline.errors import DataError
from paceline.report.read import read_run


def heard_as_recorded(channel: Channel, folder: str | None) -> Channel:
    """The channel, in the order of the run in `folder`; None: in the order of arrival.

    Raises:
        DataError: the run has recorded none, was resumed, or has lost a worker.
    """
    if folder is None:
        return channel
    run = read_run(Path(folder))
    order = [int(rank) for record in run.of("arrivals") for rank in record["senders"]]
    if not order or len(run.starts) != 1 or run.of("lost"):
        raise DataError(
            f"{folder} holds no order of arrival of a whole run, in which no worker was lost",
            where="debug.replay_arrivals",
            next_step='record one: train under a server with log.level = "debug"',
        )
    return InOrder(channel, order)
