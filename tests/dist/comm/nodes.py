"""Nodes on one machine: ranks that are told that they sit on several."""

from dataclasses import replace

from paceline.comm import NativeCollective, Net
from paceline.comm.routes import HierarchicalCollective
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, NodeLevels, group_ranks_by_node


def on_nodes(cluster: Cluster, num_nodes: int) -> Cluster:
    """This rank on one of some nodes, as a launcher would place it."""
    here = cluster.world_size // num_nodes
    node, local = divmod(cluster.global_rank, here)
    return replace(cluster, node_rank=node, num_nodes=num_nodes, local_rank=local, local_world_size=here)


def hierarchical_on(
    cluster: Cluster, num_nodes: int, net: Net, kind: type = HierarchicalCollective
) -> HierarchicalCollective:
    """The hierarchical route over all ranks."""
    group = Mesh.build(cluster, {"replica": cluster.world_size}).replica
    here = cluster.world_size // num_nodes
    parts = group_ranks_by_node(group.ranks, [rank // here for rank in range(group.size)])
    levels = NodeLevels.build(group, parts)
    return kind(net, group, levels, NativeCollective(net, levels.between))
