"""A codec is chosen where it pays, in the order in which the user allowed them."""

from __future__ import annotations

import pytest

from paceline.errors import StrategyError
from paceline.recipe import Strategy, support
from paceline.tuning.codec_choice import CodecCost, CodecMeasurements, choose_fastest_codec

MB = 1e6
CODINGS = (
    CodecCost("fp32", 40 * MB, 0.0),
    CodecCost("int8", 10.2 * MB, 0.05),
    CodecCost("topk:0.01", 0.9 * MB, 0.08),
)


def found(bits_per_second: float, compute: float = 0.2) -> CodecMeasurements:
    return CodecMeasurements(compute, bits_per_second, CODINGS)


@pytest.mark.capability("H9")
@pytest.mark.parametrize(
    "bits_per_second, codec",
    [(1e10, "fp32"), (1.6e9, "fp32"), (5e8, "int8"), (1e7, "topk:0.01"), (1e6, "topk:0.01")],
)
def test_the_slower_the_link_the_smaller_the_form(bits_per_second: float, codec: str) -> None:
    assert choose_fastest_codec(found(bits_per_second)).codec == codec


def test_what_is_allowed_first_stays_where_a_later_one_gains_little() -> None:
    both = CodecMeasurements(0.2, 3e8, (*CODINGS[:2], CodecCost("int4", 5.1 * MB, 0.05)))
    assert both.seconds(both.costs[2]) < both.seconds(both.costs[1])
    assert choose_fastest_codec(both).codec == "int8"


@pytest.mark.capability("H9")
def test_the_line_names_the_break_even_bandwidth_and_it_is_that_of_the_model() -> None:
    known = found(1e8)
    limit = known.break_even(CODINGS[1])
    assert limit == pytest.approx(8 * 40 * MB / 0.25)
    above, below = (found(limit * factor) for factor in (1.01, 0.99))
    assert above.seconds(CODINGS[1]) > above.seconds(CODINGS[0])
    assert below.seconds(CODINGS[1]) < below.seconds(CODINGS[0])
    text = str(choose_fastest_codec(known))
    assert text.startswith("codec: topk:0.01 (the link has 100 Mbit/s")
    assert "break-even bandwidth: int8 1.28e+03 Mbit/s, topk:0.01" in text


def test_a_codec_that_sends_more_never_pays() -> None:
    worse = CodecMeasurements(0.1, 1e6, (CODINGS[0], CodecCost("lossless", 41 * MB, 0.1)))
    choice = choose_fastest_codec(worse)
    assert choice.codec == "fp32" and "lossless never" in choice.reason


@pytest.mark.parametrize(
    "text, codecs",
    [
        ("codec=auto", ["fp32", "lossless"]),
        ("codec=auto:int8,topk:0.01+int4", ["fp32", "int8", "topk:0.01+int4"]),
        ("codec=int8", ["int8"]),
    ],
)
def test_only_what_was_allowed_is_chosen_from(text: str, codecs: list[str]) -> None:
    strategy = Strategy.parse(text)
    assert [one.codec for one in strategy.codec_alternatives] == codecs
    assert Strategy.parse(str(strategy)) == strategy
    assert strategy.is_approximate == ("int8" in text)


@pytest.mark.parametrize(
    "text", ["codec=auto:auto", "codec=auto:fp32", "codec=auto:nothing", "codec=auto:int8+"]
)
def test_what_cannot_be_allowed_is_an_error(text: str) -> None:
    with pytest.raises(StrategyError, match="codec"):
        Strategy.parse(text)


@pytest.mark.parametrize(
    "text, why",
    [
        ("replicas=2 codec=auto:int8 lanes=2", "lanes need an exact"),
        ("replicas=2 codec=auto:int4+int8", "in a chain of codecs"),
        ("replicas=2 codec=auto+lossless", "in a chain of codecs"),
        ("replicas=2 codec=topk:0.01+auto", "in a chain of codecs"),
        ("replicas=1 pipeline=2 codec=auto:int8", "name the codec"),
        ("replicas=2 codec=auto:int8 route=shared-memory", "no messages that a codec could encode"),
    ],
)
def test_what_no_alternative_may_have_is_refused(text: str, why: str) -> None:
    answer = support(Strategy.parse(text), processes=2, shards=4)
    assert not answer.ok and why in answer.reason
