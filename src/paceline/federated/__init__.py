"""Federated rounds: a cohort of clients trains on its own data, and a server optimizer applies the mean.

A client is a virtual shard of a round. `data_partition` divides one data set among clients and is free of
torch, `cohorts` draws who takes part and deals the clients to ranks, `rounds` is the sync rule,
`vectorized_clients` trains several clients at once, and `client_keeper` keeps what a task asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.federated.data_partition import partition

if TYPE_CHECKING:
    from paceline.federated.client_keeper import ClientKeeper as ClientKeeper
    from paceline.federated.client_keeper import KeeperChange as KeeperChange
    from paceline.federated.client_keeper import LocalTraining as LocalTraining
    from paceline.federated.cohorts import CohortWork as CohortWork
    from paceline.federated.rounds import FederatedRounds as FederatedRounds

_HOMES = {
    "ClientKeeper": "client_keeper",
    "CohortWork": "cohorts",
    "FederatedRounds": "rounds",
    "KeeperChange": "client_keeper",
    "LocalTraining": "client_keeper",
}
__all__ = ["ClientKeeper", "CohortWork", "FederatedRounds", "KeeperChange", "LocalTraining", "partition"]


def __getattr__(name: str) -> Any:
    # On first use, since both need torch and a partition does not.
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.federated' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"paceline.federated.{_HOMES[name]}"), name)
