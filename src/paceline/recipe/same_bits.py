"""What a run whose sums have one order cannot have. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.recipe.learning import BatchRecipe
from paceline.recipe.problems import Conflict
from paceline.recipe.specs import LayoutSpec
from paceline.recipe.strategy import Strategy


def same_bits_conflicts(
    strategy: Strategy, batch: BatchRecipe, threads: int, *, compiles: bool
) -> Iterator[Conflict]:
    """Choices under which the bits would depend on how many processes compute them."""
    if batch.accumulation is not None:
        yield Conflict(
            ("batch.accumulation", "reproducible"),
            "expected batch.shards with reproducible: accumulation times the number of ranks would change"
            " with the ranks",
        )
    if not (strategy.rule.in_order(strategy) and all(spec.exact for spec, _ in strategy.links)):
        yield Conflict(
            ("strategy", "reproducible"),
            "expected sync=every-step and codec=fp32 with reproducible,"
            f" found '{strategy}': its result depends on who trains when, or on what coding loses",
        )
    if strategy.path.any_order:
        yield Conflict(
            ("strategy", "reproducible"),
            f"expected another route with reproducible, found route={strategy.route}: its sums have an order"
            " of their own",
        )
    if strategy.balance != "even":
        yield Conflict(
            ("strategy", "reproducible"),
            f"expected balance=even with reproducible, found balance={strategy.balance}: which rank adds"
            " which node of the tree of additions is laid out once, for equal shares",
        )
    if strategy.rechunk:
        yield Conflict(
            ("strategy", "reproducible"),
            f"expected no rechunk with reproducible, found rechunk={strategy.rechunk}: a gradient that is"
            " added part by part has other bits",
        )
    for spec in strategy.cuts:
        if spec.adds_otherwise:
            yield Conflict(("strategy", "reproducible"), _other_order(spec, strategy))
    if threads > 1:
        yield Conflict(
            ("runtime", "reproducible"),
            f"expected runtime.threads = 1 (or 0) with reproducible, found {threads}: the number of threads"
            " inside an operation changes the order of its sums; use the cores by lanes=2 in the strategy",
        )
    if compiles:
        yield Conflict(
            ("runtime", "reproducible"),
            "expected runtime.compile = false with reproducible: a compiled graph has an order of its own",
        )


def _other_order(spec: LayoutSpec, strategy: Strategy) -> str:
    degree = getattr(strategy, spec.word, None)
    expected, found = (
        (f"{spec.word}=1", f"{spec.word}={degree}") if degree else ("no cut", f"cut={spec.word}")
    )
    return f"expected {expected} with reproducible, found {found}: {spec.adds_otherwise}"


def lane_conflicts(threads: int, *, compiles: bool) -> Iterator[Conflict]:
    """What threads that run shards side by side cannot have."""
    if threads > 1:
        yield Conflict(
            ("runtime", "strategy"),
            f"expected runtime.threads = 1 (or 0) with lanes, found {threads}: a lane is one thread",
        )
    if compiles:
        yield Conflict(
            ("runtime", "strategy"),
            "expected runtime.compile = false with lanes: a lane runs a copy of the model",
        )
