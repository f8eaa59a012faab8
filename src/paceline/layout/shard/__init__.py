"""ZeRO: what is updated, or held at all, is cut among ranks that each run samples of their own."""

from paceline.layout.shard.after_update import GatherAfterUpdate, ReadAfterUpdate
from paceline.layout.shard.in_common import lay_in_common, lay_whole_in_common
from paceline.layout.shard.on_use import GatherOnUse

__all__ = ["GatherAfterUpdate", "GatherOnUse", "ReadAfterUpdate", "lay_in_common", "lay_whole_in_common"]
