"""The other libraries, as wrappings of the same hand-written loop: DDP, Accelerate, Lightning Fabric.

All of them join the default process group that the rank already has; the variables that Accelerate and
Fabric look for are set by `announce`. Each is set up as its documentation advises for speed:
`gradient_as_bucket_view`, `static_graph` where every micro-batch communicates, no gradient exchange in the
other micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.loops import Wrapping, adamw, autocast_of
from benchmarks.subjects import Subject
from paceline.job.cluster import Cluster, change_environment

Library = Callable[[Subject], Wrapping]

_DEFAULT_BUCKET_MB = 25


def announce(cluster: Cluster) -> None:
    """Tell libraries that read the environment which rank this is; nothing listens on the port."""
    change_environment(
        {
            "RANK": str(cluster.global_rank),
            "LOCAL_RANK": str(cluster.local_rank),
            "WORLD_SIZE": str(cluster.world_size),
            "LOCAL_WORLD_SIZE": str(cluster.local_world_size),
            "MASTER_ADDR": cluster.address,
            "MASTER_PORT": str(cluster.port),
            "OMP_NUM_THREADS": "1",
        }
    )


def ddp(subject: Subject, *, bucket_mb: float = _DEFAULT_BUCKET_MB) -> Wrapping:
    """PyTorch's DistributedDataParallel."""
    plain = subject.fresh().model.train()
    model = DistributedDataParallel(plain, bucket_cap_mb=bucket_mb, **_ddp_options(subject))
    name = "DDP" if bucket_mb == _DEFAULT_BUCKET_MB else f"DDP, buckets of {bucket_mb:g} MB"
    return Wrapping(
        name,
        model,
        adamw(plain, subject.recipe),
        clip=partial(nn.utils.clip_grad_norm_, list(model.parameters())),
        autocast=autocast_of(subject.recipe),
        quiet=model.no_sync,
    )


def accelerate(subject: Subject) -> Wrapping:
    """Hugging Face Accelerate; its prepared model brings the precision."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    precision = {"fp32": "no"}.get(subject.recipe.precision.compute, subject.recipe.precision.compute)
    options = DistributedDataParallelKwargs(bucket_cap_mb=_DEFAULT_BUCKET_MB, **_ddp_options(subject))
    accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=[options])
    plain = subject.fresh().model.train()
    model, optimizer = accelerator.prepare(plain, adamw(plain, subject.recipe))
    if not isinstance(model, DistributedDataParallel):
        raise RuntimeError("Accelerate did not join the process group")
    return Wrapping(
        "Accelerate",
        model,
        optimizer,
        clip=partial(accelerator.clip_grad_norm_, list(model.parameters())),
        backward=accelerator.backward,
        quiet=partial(accelerator.no_sync, model),
    )


def fabric(subject: Subject) -> Wrapping:
    """Lightning Fabric; its set-up model brings the precision."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.ddp import DDPStrategy

    precision: Any = {"fp32": "32-true", "bf16": "bf16-mixed"}[subject.recipe.precision.compute]
    strategy = DDPStrategy(
        process_group_backend="gloo", bucket_cap_mb=_DEFAULT_BUCKET_MB, **_ddp_options(subject)
    )
    engine = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
    engine.launch()
    plain = subject.fresh().model.train()
    model, optimizer = engine.setup(plain, adamw(plain, subject.recipe))
    if engine.world_size != 2:
        raise RuntimeError("Fabric did not join the process group")
    return Wrapping(
        "Lightning Fabric",
        model,
        optimizer,
        clip=lambda norm: engine.clip_gradients(model, optimizer, max_norm=norm),
        backward=engine.backward,
        quiet=partial(engine.no_backward_sync, model),
    )


def _ddp_options(subject: Subject) -> dict[str, Any]:
    micro_batches_per_rank = subject.recipe.batch.shards // 2
    return {"gradient_as_bucket_view": True, "static_graph": micro_batches_per_rank == 1}
