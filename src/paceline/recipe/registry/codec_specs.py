"""The words of what goes over the wire and along which path: one line of registration each."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from paceline.recipe.registry.word_spec import CodecSpec, RouteSpec, StrategyRefusal, WordArgument

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy


def integer_argument(smallest: int, example: str, largest: int = 1 << 31) -> WordArgument:
    """Integers from one to another."""
    says = f"an integer >= {smallest}" if largest == 1 << 31 else f"an integer from {smallest} to {largest}"
    return WordArgument(example, says, lambda text: text.isdecimal() and smallest <= int(text) <= largest)


def _is_share_or_count(text: str) -> bool:
    if text.isdecimal():
        return int(text) > 0
    try:
        return 0.0 < float(text) <= 1.0
    except ValueError:
        return False


def _is_dgc_argument(text: str) -> bool:
    kept, *more = text.split(":")
    try:
        numbers = [float(x) for x in more]
    except ValueError:
        return False
    positive = all(0.0 < x < inf for x in numbers)
    return _is_share_or_count(kept) and len(numbers) <= 2 and positive and all(x < 1.0 for x in numbers[:1])


def _clips(strategy: Strategy) -> bool:
    """Whether each rank clips what it sends."""
    return any(spec.word == "dgc" and said.count(":") == 2 for spec, said in strategy.links)


_ROUNDING = WordArgument(
    "stochastic", "nearest or stochastic", lambda text: text in ("nearest", "stochastic")
)
_SPARSITY_ARGUMENT = WordArgument("0.01", "a share above 0 and at most 1, or a count", _is_share_or_count)
_DGC_ARGUMENT = WordArgument(
    "0.01:0.9",
    "a share or a count, behind a colon a momentum below 1, behind another the norm that ranks clip to",
    _is_dgc_argument,
)
_NOT_GRADIENTS = StrategyRefusal(
    "dgc gives gradients their momentum once, where whole replicas sum them in every step: choose topk",
    lambda s: s.sync != "every-step" or s.ranks_per_replica > 1,
)
_CLIPS_EQUALLY = StrategyRefusal(
    "dgc clips on each rank to a part of the norm that goes with an equal share of the batch: leave out the"
    " norm behind the momentum, or balance=speed",
    lambda s: s.balance == "speed" and any(map(_clips, s.codec_alternatives)),
)
_CODED_VALUES = "paceline.comm.codecs.top_k:code_kept_values"


def _value_codec(word: str, summary: str, build: str, argument: WordArgument | None = None) -> CodecSpec:
    """A codec that codes every value, so it may stand behind one that leaves some out."""
    return CodecSpec(
        word=word,
        summary=summary,
        build=f"paceline.comm.codecs.{build}",
        argument=argument,
        argument_may_be_missing=argument is _ROUNDING,
        after="values",
        join=_CODED_VALUES,
    )


_AUTO_CODEC_REFUSAL = StrategyRefusal(
    "codec=auto measures sums of whole gradients, of replicas with or without zero: name the codec",
    lambda s: not s.rule.sums or bool(s.servers) or s.ranks_per_replica != s.shard or bool(s.cut),
)

CODEC_SPECS = (
    CodecSpec(
        word="fp32",
        summary="values as they are",
        build="paceline.comm.codecs:no_codec",
        exact=True,
        uses_error_feedback=False,
    ),
    _value_codec("bf16", "the upper halves of values", "bf16_fp16:bf16"),
    _value_codec("fp16", "half floats, scaled so that none overflows", "bf16_fp16:fp16"),
    _value_codec("int8", "8 bits with a scale for every block", "int8_int4_int2:int8", _ROUNDING),
    _value_codec("int4", "4 bits with a scale for every block", "int8_int4_int2:int4", _ROUNDING),
    _value_codec("int2", "2 bits with a scale for every block", "int8_int4_int2:int2", _ROUNDING),
    _value_codec(
        "fixed",
        "steps of one size, 2**-b of the largest value",
        "fixed_point:fixed_point",
        integer_argument(1, "8", 14),
    ),
    _value_codec("sign", "one bit, and the mean magnitude of every block", "sign:sign"),
    CodecSpec(
        word="topk",
        summary="the largest values of a row, the rest later",
        argument=_SPARSITY_ARGUMENT,
        build="paceline.comm.codecs.top_k:top_k",
        sparsifies=True,
    ),
    CodecSpec(
        word="dgc",
        summary="topk of velocities: momentum where gradients are sent (Deep Gradient Compression)",
        argument=_DGC_ARGUMENT,
        build="paceline.comm.codecs.top_k:deep_gradient_compression_codec",
        summed="paceline.comm.collectives.coded_collective:deep_gradient_compression",
        refusals=(_NOT_GRADIENTS, _CLIPS_EQUALLY),
    ),
    CodecSpec(
        word="randomk",
        summary="values at places drawn anew in every step, the rest later",
        argument=_SPARSITY_ARGUMENT,
        build="paceline.comm.codecs.top_k:random_k",
        sparsifies=True,
    ),
    CodecSpec(
        word="lowrank",
        summary="matrices as products of rank R (PowerSGD)",
        argument=integer_argument(1, "2"),
        build="paceline.comm.codecs.low_rank:low_rank",
        summed="paceline.comm.collectives.power_sgd:power_sgd",
    ),
    CodecSpec(
        word="lossless",
        summary="fewer bytes, the same bits",
        build="paceline.comm.codecs.lossless:lossless",
        exact=True,
        uses_error_feedback=False,
        after="bytes",
        join="paceline.comm.codecs.lossless:compress_coded_bytes",
    ),
    CodecSpec(
        word="auto",
        summary="one of those that stand behind it, where it pays; alone: lossless or none",
        argument=WordArgument("int8,topk:0.01", "codecs by comma", bool),
        argument_may_be_missing=True,
        build="paceline.tuning.codec_choice:choose_codec",
        chooses=True,
        refusals=(_AUTO_CODEC_REFUSAL,),
    ),
)

ROUTE_SPECS = (
    RouteSpec(
        word="auto",
        summary="memory within a host, else by the size of a buffer and what links were measured to do",
        build="paceline.tuning.route_choice:build_auto_route",
        by_default=True,
        ring_bytes=True,
        in_memory=True,
        coded=2,
    ),
    RouteSpec(
        word="native",
        summary="the collectives of torch.distributed",
        build="paceline.comm.routes.native:build_native",
        by_default=True,
        ring_bytes=True,
        coded=2,
    ),
    RouteSpec(
        word="ring",
        summary="messages from each rank to the next",
        build="paceline.comm.routes.ring_route:build_ring",
        any_order=True,
        ring_bytes=True,
        coded=1,
    ),
    RouteSpec(
        word="tree",
        summary="up and down a binomial tree",
        build="paceline.comm.routes.tree_route:build_tree",
        any_order=True,
        coded=1,
    ),
    RouteSpec(
        word="recursive-doubling",
        summary="between ranks whose numbers differ in one bit",
        build="paceline.comm.routes.recursive_doubling:build_recursive_doubling",
        any_order=True,
        coded=1,
    ),
    RouteSpec(
        word="grid",
        summary="along rows, then columns, then rows of a grid of ranks",
        build="paceline.comm.routes.grid_route:build_grid",
        any_order=True,
        coded=1,
    ),
    RouteSpec(
        word="hierarchical",
        summary="inside nodes first",
        build="paceline.comm.routes.hierarchical:build_hierarchical",
        with_terms="replicas=4",
        any_order=True,
    ),
    RouteSpec(
        word="shared-memory",
        summary="the memory of one host",
        build="paceline.comm.routes.shared_memory:build_shared_memory",
        coded=0,
        ring_bytes=True,
        in_memory=True,
    ),
    RouteSpec(word="server"),
)
