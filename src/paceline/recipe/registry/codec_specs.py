"""The codecs of collectives, and the class of their specifications."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple

from paceline.recipe.registry.word_spec import StrategyRefusal, WordArgument, WordSpec, integer_argument

PLAIN_CODEC = "fp32"
LOSSLESS_CODEC = "lossless"


@dataclass(frozen=True, kw_only=True)
class CodecSpec(WordSpec):
    """The specification of the encoding of collectives: `build(argument) -> Codec | None`.

    `argument` is the value that `WordArgument.parse` makes; None where the word stands alone.

    Args:
        exact: decoding restores the same bits.
        is_identity: values travel as they are, so there is no codec.
        uses_error_feedback: the quantisation error is kept and added to the next values.
        is_unbiased: given the argument, whether errors are zero in the mean and need no error feedback.
        sparsifies: it leaves out some values, and another codec may encode the others: `topk:0.01+int4`.
        after: where it may follow in a chain: a codec that leaves out "values", or any codec ("bytes").
        join: `module:name` of `join(earlier, this) -> Codec`, for a codec that follows another one.
        summed: `module:name` of `summed(path, argument, seed) -> Collective`, for codecs whose sum is not
            that of decoded parts.
        has_momentum: it applies momentum where gradients are sent, so the optimizer must not.
        clip_norm: given the argument, the norm to which each rank clips what it sends; None: no clipping.
        compiled: it has compiled CPU kernels.
    """

    choice = "codec"
    exact: bool = False
    is_identity: bool = False
    uses_error_feedback: bool = True
    is_unbiased: Callable[[Any], bool] = lambda argument: False
    sparsifies: bool = False
    after: Literal["", "values", "bytes"] = ""
    join: str = ""
    summed: str = ""
    has_momentum: bool = False
    clip_norm: Callable[[Any], float | None] = lambda argument: None
    compiled: bool = False

    def can_follow(self, earlier: CodecSpec) -> bool:
        """Return whether it may follow another codec in a chain."""
        return self.after == "bytes" or (self.after == "values" and earlier.sparsifies)


class DgcArgument(NamedTuple):
    """The argument of `dgc:K:M:C`.

    Args:
        kept: an int is a number of values, a float a share of them.
        momentum: below 1; None: the codec's default.
        clip_norm: the norm to which each rank clips its gradient; None: no clipping.
    """

    kept: int | float
    momentum: float | None = None
    clip_norm: float | None = None


def _parse_rounding(text: str) -> bool:
    """Return whether rounding is stochastic."""
    if text not in ("nearest", "stochastic"):
        raise ValueError(text)
    return text == "stochastic"


def _parse_kept(text: str) -> int | float:
    """Return how many values are kept: a count as int, or a share of all values as float."""
    number = int(text) if text.isdecimal() else float(text)
    if number <= 0 or (isinstance(number, float) and not number <= 1.0):  # also refuses nan
        raise ValueError(text)
    return number


def _parse_dgc(text: str) -> DgcArgument:
    count_or_share, *others = text.split(":")
    numbers = [float(number) for number in others]
    if (
        len(numbers) > 2
        or not all(0.0 < number < inf for number in numbers)
        or max(numbers[:1], default=0) >= 1
    ):
        raise ValueError(text)
    return DgcArgument(_parse_kept(count_or_share), *numbers)


_ROUNDING = WordArgument("stochastic", "nearest or stochastic", _parse_rounding)
_SPARSITY_ARGUMENT = WordArgument("0.01", "a share above 0 and at most 1, or a count", _parse_kept)
_DGC_ARGUMENT = WordArgument(
    "0.01:0.9",
    "a share or a count, behind a colon a momentum below 1, behind another the norm that ranks clip to",
    _parse_dgc,
)
_DGC_NEEDS_GRADIENTS = StrategyRefusal(
    "dgc applies momentum to gradients once, where whole replicas sum them in every step: choose topk",
    lambda s: s.is_set("sync") or s.ranks_per_replica > 1,
)
_DGC_NEEDS_EQUAL_SHARES = StrategyRefusal(
    "dgc clips on each rank to the part of the norm that belongs to an equal share of the batch: leave out"
    " the norm behind the momentum, or balance=speed",
    lambda s: s.balances_by_speed and any(codec.clip_norm is not None for codec in s.codec_alternatives),
)
_AUTO_CODEC_REFUSAL = StrategyRefusal(
    "codec=auto measures sums of whole gradients, of replicas with or without zero: name the codec",
    lambda s: not s.sync_spec.sums or bool(s.servers) or s.ranks_per_replica != s.shard or bool(s.cut),
)


def _value_codec(word: str, summary: str, build: str, argument: WordArgument | None = None) -> CodecSpec:
    """Return a codec that encodes every value, so that it may follow one that leaves some out."""
    return CodecSpec(
        word=word,
        summary=summary,
        build=f"paceline.comm.codecs.{build}",
        argument=argument,
        argument_may_be_missing=argument is _ROUNDING,
        is_unbiased=lambda parsed: argument is _ROUNDING and bool(parsed),
        after="values",
        join="paceline.comm.codecs.top_k:code_kept_values",
        compiled=True,
    )


CODEC_SPECS = (
    CodecSpec(
        word=PLAIN_CODEC,
        summary="values as they are",
        build="paceline.comm.codecs:no_codec",
        exact=True,
        is_identity=True,
        uses_error_feedback=False,
    ),
    _value_codec("bf16", "the upper 16 bits of values", "bf16_fp16:bf16"),
    _value_codec("fp16", "16-bit floats, scaled so that none overflows", "bf16_fp16:fp16"),
    _value_codec("int8", "8 bits per value, with a scale for each block", "int8_int4_int2:int8", _ROUNDING),
    _value_codec("int4", "4 bits per value, with a scale for each block", "int8_int4_int2:int4", _ROUNDING),
    _value_codec("int2", "2 bits per value, with a scale for each block", "int8_int4_int2:int2", _ROUNDING),
    _value_codec(
        "fixed",
        "fixed point, in steps of 2**-b of the largest value",
        "fixed_point:fixed_point",
        integer_argument(1, "8", 14),
    ),
    _value_codec("sign", "1 bit per value, with the mean magnitude of each block", "sign:sign"),
    CodecSpec(
        word="topk",
        summary="the largest values of a row; the others are sent later",
        argument=_SPARSITY_ARGUMENT,
        build="paceline.comm.codecs.top_k:top_k",
        sparsifies=True,
        compiled=True,
    ),
    CodecSpec(
        word="dgc",
        summary="topk with momentum before sending (Deep Gradient Compression)",
        argument=_DGC_ARGUMENT,
        build="paceline.comm.codecs.top_k:deep_gradient_compression_codec",
        summed="paceline.comm.collectives.coded_collective:deep_gradient_compression",
        has_momentum=True,
        clip_norm=lambda argument: argument.clip_norm,
        compiled=True,
        refusals=(_DGC_NEEDS_GRADIENTS, _DGC_NEEDS_EQUAL_SHARES),
    ),
    CodecSpec(
        word="randomk",
        summary="values at random indices, new in every step; the others are sent later",
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
        word=LOSSLESS_CODEC,
        summary="fewer bytes, the same bits",
        build="paceline.comm.codecs.lossless:lossless",
        exact=True,
        uses_error_feedback=False,
        after="bytes",
        join="paceline.comm.codecs.lossless:compress_coded_bytes",
    ),
    CodecSpec(
        word="auto",
        summary="one of the listed codecs, if it is faster; alone: lossless or none",
        argument=WordArgument("int8,topk:0.01", "codecs by comma", lambda text: tuple(text.split(","))),
        argument_may_be_missing=True,
        build="paceline.tuning.codec_choice:choose_codec",
        chooses=True,
        refusals=(_AUTO_CODEC_REFUSAL,),
    ),
)
