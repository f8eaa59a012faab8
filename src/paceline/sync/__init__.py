"""When replicas agree, and how the agreed gradient becomes an update."""

from paceline.sync.every_step import EveryStep
from paceline.sync.tail import Tail, Update, UpdateTail, global_norm

__all__ = ["EveryStep", "Tail", "Update", "UpdateTail", "global_norm"]
