"""Names of strategies that users already know."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Preset(NamedTuple):
    """A name that users already know; where a degree has to be given it is the smallest, to be changed."""

    terms: str
    summary: str


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "ddp": Preset("replicas=all", "a whole model on every process, gradients averaged each step"),
        "fsdp": Preset("replicas=1 shard=2 zero=3", "one replica, all state sharded"),
        "hsdp": Preset("shard=2 zero=3", "several replicas, each sharded inside"),
        "zero1": Preset("shard=2 zero=1", "optimizer state sharded"),
        "zero2": Preset("shard=2 zero=2", "optimizer state and gradients sharded"),
        "zero3": Preset("shard=2 zero=3", "optimizer state, gradients and weights sharded"),
        "mirrored": Preset("replicas=all", "as ddp, on one machine"),
        "multi-worker-mirrored": Preset(
            "replicas=all route=hierarchical", "as ddp, on several machines, inside each first"
        ),
        "parameter-server": Preset("servers=1 sync=server", "workers push gradients to a server"),
        "central-storage": Preset(
            "replicas=1 shard=2 zero=3 route=shared-memory", "one copy of weights and moments on a machine"
        ),
        "hogwild": Preset("sync=hogwild", "lock-free updates of shared weights, on one machine"),
        "local-sgd": Preset("sync=local:8", "replicas train alone and average every 8 steps"),
        "diloco": Preset("sync=diloco:50", "local steps with an outer optimizer"),
        "pipedream": Preset("replicas=1 pipeline=2 sync=pipedream", "stages that never wait for a flush"),
        "gpipe": Preset("pipeline=2", "stages of layers, all forwards before all backwards"),
        "1f1b": Preset("pipeline=2 schedule=1f1b", "stages of layers, forwards and backwards in turn"),
        "3d": Preset("tensor=2 pipeline=2", "replicas x tensor x pipeline"),
        "auto": Preset("replicas=all", "what fits: today every process is a replica"),
    }
)
