"""Central storage: one copy of the parameters in memory that a host shares, which the first rank updates.

All ranks of the shard axis compute with the copy in place. The first one sums all gradients, holds all
moments and makes the update; the others have memory for neither. Invariant: the copy is written after the
tally of a step, when every rank has run its micro-batches, and before the barrier after which ranks read it
again.

Source: TensorFlow 2, `tf.distribute.experimental.CentralStorageStrategy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.errors import StrategyError
from paceline.parallel.host_shared_parameters import share_sharded_parameters
from paceline.parallel.placement import ShardTransform
from paceline.parallel.sharded_model import ModelPartition, ShardedModel, refuse_compile

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext, TaskMaterial


def store_parameters_centrally(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """Return the partition of storage=central.

    Raises:
        StrategyError: the model is compiled, or the ranks share no memory.
    """
    refuse_compile(context, "storage=central")
    group = context.mesh.axes["shard"]

    def prepare(sharded_model: ShardedModel) -> ShardedModel:
        collective = context.exact_collective(group)
        if isinstance(collective, SharedMemoryCollective):
            return share_sharded_parameters(sharded_model, collective)
        if context.device.type != "cpu":
            reason = "compute on GPUs"
        else:
            reason = f"are on several hosts, or use route={context.recipe.strategy.route}"
        raise StrategyError(
            f"storage=central is memory that ranks of one host share, but these ranks {reason}",
            next_step="use route=shared-memory on the CPUs of one host, as many replicas as there are hosts,"
            " or leave out storage, which spreads the state over the ranks",
        )

    transform = ShardTransform(group.size, {}, keeps=False, frees_gradients=True, is_central=True)
    return ModelPartition(transform, prepare=prepare)
