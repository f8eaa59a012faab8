"""What keys of one table of a recipe need of another one to act.

What a run whose sums have one order cannot have. Pure.

What BatchNorm over all ranks of a step does not go with. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.recipe.registry.word_spec import LayoutSpec
from paceline.recipe.strategy import Strategy
from paceline.recipe.strategy_text import phases_of
from paceline.recipe.tables import BatchRecipe
from paceline.recipe.validation import FieldNeed, KeyConflict

_NEEDS_BEST = FieldNeed(
    ("evaluate.patience", "checkpoint.keep_best"),
    lambda recipe: recipe.evaluate.patience or recipe.checkpoint.keep_best,
    "with evaluate.patience or checkpoint.keep_best",
    "and neither is set",
)
_NEEDS_OUTER = FieldNeed(
    ("strategy.sync",),
    lambda recipe: "outer" in recipe.strategy.rule.reads,
    "with sync=diloco:H",
    "found sync={t.strategy.sync}",
)
_NEEDS_GLOBAL_VIEW = FieldNeed(
    ("strategy.sync",),
    lambda recipe: recipe.strategy.rule.agrees != "nobody",
    "with sync=every-step, local or diloco",
    "found sync={t.strategy.sync}, under which no rank sees all of a step",
)


def _round_lengths(recipe: Any) -> list[int]:
    """H of every diloco:H that the run may come to."""
    rules = [phase.rule.partition(":") for phase in phases_of(recipe.strategy.sync)]
    return [int(steps) for word, _, steps in rules if word == "diloco"]


CROSS_TABLE_NEEDS: Mapping[str, FieldNeed] = {
    "on_divergence": FieldNeed(
        ("hash_every", "reproducible"),
        lambda recipe: recipe.hash_every or recipe.reproducible,
        "with hash_every or reproducible",
        "and neither is set",
    ),
    "evaluate.metric": _NEEDS_BEST,
    "evaluate.better": _NEEDS_BEST,
    "checkpoint.keep_best": FieldNeed(
        ("evaluate.every_steps",),
        lambda recipe: recipe.evaluate.every_steps,
        "with evaluate.every_steps",
        "which is not set",
    ),
    "health.non_finite": _NEEDS_GLOBAL_VIEW,
    "health.spike_factor": _NEEDS_GLOBAL_VIEW,
    "health.straggler_factor": FieldNeed(
        ("strategy.sync",),
        lambda recipe: any(spec.word == "every-step" for spec in recipe.strategy.rules),
        "with sync=every-step",
        "found sync={t.strategy.sync}",
    ),
    "outer.lr": _NEEDS_OUTER,
    "outer.momentum": _NEEDS_OUTER,
    "outer.fragments": FieldNeed(
        ("strategy.sync",),
        lambda recipe: recipe.outer.fragments <= min(_round_lengths(recipe), default=0),
        "with sync=diloco:H, and H as large or larger",
        "found sync={t.strategy.sync}",
    ),
    "outer.delay_steps": FieldNeed(
        ("outer.fragments", "strategy.sync"),
        lambda recipe: (
            recipe.outer.delay_steps * recipe.outer.fragments <= min(_round_lengths(recipe), default=0)
        ),
        "with sync=diloco:H, and at most H / outer.fragments",
        "found fragments = {t.outer.fragments} and sync={t.strategy.sync}",
    ),
    "outer.mixing": _NEEDS_OUTER,
    "debug.replay_arrivals": FieldNeed(
        ("strategy.sync",),
        lambda recipe: recipe.strategy.rule.needs_server,
        "with a rule of a server",
        "found sync={t.strategy.sync}",
    ),
    "security.certificate": FieldNeed(
        ("strategy.channel", "security.tls"),
        lambda recipe: recipe.strategy.channel_spec.uses_certificate and recipe.security.tls != "off",
        'with channel=grpc, and without security.tls = "off"',
        'found channel={t.strategy.channel} and tls = "{t.security.tls}"',
    ),
    "runtime.link_profile": FieldNeed(
        ("strategy.route", "strategy.codec", "reproducible"),
        lambda recipe: (
            (recipe.strategy.route == "auto" or recipe.runtime.bucket_latency is not None)
            and not (recipe.strategy.is_coded or recipe.is_ordered)
        ),
        "with route=auto or bucket_latency, and codec=fp32, and without reproducible and lanes",
        "found '{t.strategy}'",
    ),
    "runtime.bucket_latency": FieldNeed(
        ("strategy.sync", "strategy.codec", "reproducible"),
        lambda recipe: recipe.strategy.rule.sums and not (recipe.strategy.is_coded or recipe.is_ordered),
        "where gradients are summed with codec=fp32, and without reproducible and lanes",
        "found '{t.strategy}'",
    ),
    "runtime.bucket_bytes": FieldNeed(
        ("strategy.sync",),
        lambda recipe: recipe.strategy.rule.sums,
        "where gradients are summed",
        "and sync={t.strategy.sync} sends them to a server or sums none",
    ),
}


def reproducible_conflicts(
    strategy: Strategy, batch: BatchRecipe, threads: int, *, compiles: bool
) -> Iterator[KeyConflict]:
    """Choices under which the bits would depend on how many processes compute them."""
    if batch.accumulation is not None:
        yield KeyConflict(
            ("batch.accumulation", "reproducible"),
            "expected batch.shards with reproducible: accumulation times the number of ranks would change"
            " with the ranks",
        )
    if not (strategy.rule.in_order(strategy) and all(spec.exact for spec, _ in strategy.links)):
        yield KeyConflict(
            ("strategy", "reproducible"),
            "expected sync=every-step and codec=fp32 with reproducible,"
            f" found '{strategy}': its result depends on who trains when, or on what coding loses",
        )
    if strategy.path.any_order:
        yield KeyConflict(
            ("strategy", "reproducible"),
            f"expected another route with reproducible, found route={strategy.route}: its sums have an order"
            " of their own",
        )
    if strategy.balance != "even":
        yield KeyConflict(
            ("strategy", "reproducible"),
            f"expected balance=even with reproducible, found balance={strategy.balance}: which rank adds"
            " which node of the tree of additions is laid out once, for equal shares",
        )
    if strategy.rechunk:
        yield KeyConflict(
            ("strategy", "reproducible"),
            f"expected no rechunk with reproducible, found rechunk={strategy.rechunk}: a gradient that is"
            " added part by part has other bits",
        )
    for spec in strategy.cuts:
        if spec.inexact_reason:
            yield KeyConflict(("strategy", "reproducible"), _sum_order_message(spec, strategy))
    if threads > 1:
        yield KeyConflict(
            ("runtime", "reproducible"),
            f"expected runtime.threads = 1 (or 0) with reproducible, found {threads}: the number of threads"
            " inside an operation changes the order of its sums; use the cores by lanes=2 in the strategy",
        )
    if compiles:
        yield KeyConflict(
            ("runtime", "reproducible"),
            "expected runtime.compile = false with reproducible: a compiled graph has an order of its own",
        )


def _sum_order_message(spec: LayoutSpec, strategy: Strategy) -> str:
    degree = getattr(strategy, spec.word, None)
    expected, found = (
        (f"{spec.word}=1", f"{spec.word}={degree}") if degree else ("no cut", f"cut={spec.word}")
    )
    return f"expected {expected} with reproducible, found {found}: {spec.inexact_reason}"


def lane_conflicts(threads: int, *, compiles: bool) -> Iterator[KeyConflict]:
    """What threads that run shards side by side cannot have."""
    if threads > 1:
        yield KeyConflict(
            ("runtime", "strategy"),
            f"expected runtime.threads = 1 (or 0) with lanes, found {threads}: a lane is one thread",
        )
    if compiles:
        yield KeyConflict(
            ("runtime", "strategy"),
            "expected runtime.compile = false with lanes: a lane runs a copy of the model",
        )


SYNC_BATCHNORM_KEY = "batch.sync_batchnorm"


def sync_batchnorm_conflicts(
    batch: BatchRecipe, strategy: Strategy, *, reproducible: bool, recomputes: bool, compiles: bool
) -> Iterator[KeyConflict]:
    """Choices under which not all ranks run one forward of all samples, at once and once."""
    wrong = {
        ("batch.accumulation", "micro-batches of a rank run one after another"): (batch.accumulation or 1)
        > 1,
        ("strategy", "every rank has to run one whole forward a step"): _splits_forward(strategy),
        ("reproducible", "a sum over ranks has an order of its own"): reproducible,
        ("memory.recompute", "a block would sum again in backward"): recomputes,
        ("runtime.compile", "a compiled graph has no sums over ranks"): compiles,
    }
    for (key, why), holds in wrong.items():
        if holds:
            yield KeyConflict((SYNC_BATCHNORM_KEY, key), f"does not go with this {key}: {why}")


def _splits_forward(strategy: Strategy) -> bool:
    spread = max(strategy.pipeline, strategy.tensor, strategy.context, strategy.lanes) > 1
    waits = strategy.rule.exact and not strategy.servers and strategy.balance == "even"
    return spread or not waits or bool(strategy.cut)
