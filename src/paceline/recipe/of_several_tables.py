"""What keys of one table of a recipe need of another one to act."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.recipe.acting import Need
from paceline.recipe.phases import phases_of

_NO_BEST = Need(
    ("evaluate.patience", "checkpoint.keep_best"),
    lambda recipe: recipe.evaluate.patience or recipe.checkpoint.keep_best,
    "with evaluate.patience or checkpoint.keep_best",
    "and neither is set",
)
_OUTER = Need(
    ("strategy.sync",),
    lambda recipe: "outer" in recipe.strategy.rule.reads,
    "with sync=diloco:H",
    "found sync={t.strategy.sync}",
)
_SEEN_WHOLE = Need(
    ("strategy.sync",),
    lambda recipe: recipe.strategy.rule.agrees != "nobody",
    "with sync=every-step, local or diloco",
    "found sync={t.strategy.sync}, under which no rank sees all of a step",
)


def _rounds(recipe: Any) -> list[int]:
    """H of every diloco:H that the run may come to."""
    rules = [phase.rule.partition(":") for phase in phases_of(recipe.strategy.sync)]
    return [int(steps) for word, _, steps in rules if word == "diloco"]


OF_SEVERAL_TABLES: Mapping[str, Need] = {
    "on_divergence": Need(
        ("hash_every", "reproducible"),
        lambda recipe: recipe.hash_every or recipe.reproducible,
        "with hash_every or reproducible",
        "and neither is set",
    ),
    "evaluate.metric": _NO_BEST,
    "evaluate.better": _NO_BEST,
    "checkpoint.keep_best": Need(
        ("evaluate.every_steps",),
        lambda recipe: recipe.evaluate.every_steps,
        "with evaluate.every_steps",
        "which is not set",
    ),
    "health.non_finite": _SEEN_WHOLE,
    "health.spike_factor": _SEEN_WHOLE,
    "health.straggler_factor": Need(
        ("strategy.sync",),
        lambda recipe: any(spec.word == "every-step" for spec in recipe.strategy.rules),
        "with sync=every-step",
        "found sync={t.strategy.sync}",
    ),
    "outer.lr": _OUTER,
    "outer.momentum": _OUTER,
    "outer.fragments": Need(
        ("strategy.sync",),
        lambda recipe: recipe.outer.fragments <= min(_rounds(recipe), default=0),
        "with sync=diloco:H, and H as large or larger",
        "found sync={t.strategy.sync}",
    ),
    "outer.delay_steps": Need(
        ("outer.fragments", "strategy.sync"),
        lambda recipe: recipe.outer.delay_steps * recipe.outer.fragments <= min(_rounds(recipe), default=0),
        "with sync=diloco:H, and at most H / outer.fragments",
        "found fragments = {t.outer.fragments} and sync={t.strategy.sync}",
    ),
    "outer.mixing": _OUTER,
    "debug.replay_arrivals": Need(
        ("strategy.sync",),
        lambda recipe: recipe.strategy.rule.needs_server,
        "with a rule of a server",
        "found sync={t.strategy.sync}",
    ),
    "security.certificate": Need(
        ("strategy.channel", "security.tls"),
        lambda recipe: recipe.strategy.carrier.takes_certificate and recipe.security.tls != "off",
        'with channel=grpc, and without security.tls = "off"',
        'found channel={t.strategy.channel} and tls = "{t.security.tls}"',
    ),
    "runtime.link_profile": Need(
        ("strategy.route", "strategy.codec", "reproducible"),
        lambda recipe: (
            (recipe.strategy.route == "auto" or recipe.runtime.bucket_latency is not None)
            and not (recipe.strategy.is_coded or recipe.is_ordered)
        ),
        "with route=auto or bucket_latency, and codec=fp32, and without reproducible and lanes",
        "found '{t.strategy}'",
    ),
    "runtime.bucket_latency": Need(
        ("strategy.sync", "strategy.codec", "reproducible"),
        lambda recipe: recipe.strategy.rule.sums and not (recipe.strategy.is_coded or recipe.is_ordered),
        "where gradients are summed with codec=fp32, and without reproducible and lanes",
        "found '{t.strategy}'",
    ),
    "runtime.bucket_bytes": Need(
        ("strategy.sync",),
        lambda recipe: recipe.strategy.rule.sums,
        "where gradients are summed",
        "and sync={t.strategy.sync} sends them to a server or sums none",
    ),
}
