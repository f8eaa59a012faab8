"""Words of a strategy: what is found, what another package brings, and what follows from a description."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import StrategyError
from paceline.plan import plan_memory
from paceline.recipe import Strategy, support
from paceline.recipe import specs as specs_module
from paceline.recipe.channel_words import ChannelSpec
from paceline.recipe.specs import (
    CodecSpec,
    LayoutSpec,
    OptimizerSpec,
    Refusal,
    RouteSpec,
    ScheduleSpec,
    Spec,
    SyncSpec,
    find,
    known,
    own_words,
    plugged_in,
)
from paceline.recipe.words import WORDS
from tests.unit.plan.gpt_jobs import gpt, recipe

KINDS: tuple[type[Spec], ...] = (
    SyncSpec,
    CodecSpec,
    RouteSpec,
    ChannelSpec,
    ScheduleSpec,
    LayoutSpec,
    OptimizerSpec,
)

PLUGIN = """
from paceline.recipe.channel_words import ChannelSpec
from paceline.recipe.specs import CodecSpec, LayoutSpec, Refusal

ROUND = CodecSpec(
    word="round",
    build="math:floor",
    refusals=(Refusal("round goes with replicas only", lambda s: s.pipeline > 1),),
)
AUTO = CodecSpec(word="fp32", summary="another one of that name", build="math:ceil")
PIGEON = ChannelSpec(word="pigeon", build="math:sqrt")
FOLD = LayoutSpec(word="fold", build="math:trunc", order=15, applies=lambda s: s.cut == "fold")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with a codec, a layout, and a codec whose word is taken."""
    about = tmp_path / "other-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (tmp_path / "other_words.py").write_text(PLUGIN)
    (about / "entry_points.txt").write_text(
        "[paceline.codec]\nround = other_words:ROUND\nfp32 = other_words:AUTO\n"
        "[paceline.layout]\nfold = other_words:FOLD\n[paceline.channel]\npigeon = other_words:PIGEON\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    specs_module._plugged_in.cache_clear()
    yield
    specs_module._plugged_in.cache_clear()


def test_every_word_is_found_by_its_name_and_kind_and_no_word_twice() -> None:
    for kind in KINDS:
        own = own_words(kind)
        assert list(own) == [spec.word for spec in WORDS if isinstance(spec, kind)]
        assert all(find(kind, word) is spec for word, spec in own.items())
        assert known(kind) == own  # nothing is installed
        assert find(kind, "no such word") is None
    assert find(SyncSpec, "int8") is None and find(CodecSpec, "int8") is not None
    assert sum(len(own_words(kind)) for kind in KINDS) == len(WORDS)


def test_what_is_built_can_be_loaded_and_its_example_is_a_strategy() -> None:
    for kind in KINDS:
        for spec in own_words(kind).values():
            if spec.is_built:
                assert callable(spec.load()) and spec.summary
            if kind not in (LayoutSpec, OptimizerSpec):
                text = f"{spec.with_terms} {kind.choice}={spec.example}"
                assert getattr(Strategy.parse(text), kind.choice) == spec.example
            if spec.argument is not None:
                assert spec.argument.fits(spec.argument.example) and not spec.argument.fits("")


def test_a_strategy_names_its_cuts_in_their_order() -> None:
    words = {
        "replicas=2": "replicate",
        "shard=2 zero=3": "zero-3",
        "tensor=2 shard=2 zero=1 pipeline=2": "pipeline+tensor+zero-1",
        "pipeline=2 lanes=2": "replicate",  # the stages are threads of one process
        "pipeline=2 lanes=2 shard=2 zero=1": "zero-1",
    }
    assert {text: Strategy.parse(text).layout for text in words} == words


def test_words_of_an_installed_package_are_known_beside_the_own(package: None) -> None:
    found = find(CodecSpec, "round")
    assert found is not None and found.load()(1.5) == 1
    assert list(plugged_in(LayoutSpec)) == ["fold"] and not plugged_in(RouteSpec)
    assert Strategy.parse("codec=round").form is found
    assert support(Strategy.parse("codec=round"), processes=2, shards=8).ok
    carried = Strategy.parse("servers=1 sync=server channel=pigeon")
    assert carried.carrier.load()(4) == 2 and support(carried, processes=2, shards=8).ok
    refused = support(Strategy.parse("pipeline=2 codec=round"), processes=2, shards=8)
    assert not refused.ok and refused.reason == "round goes with replicas only"
    folded = Strategy.parse("tensor=2 pipeline=2 cut=fold")
    assert folded.layout == "pipeline+fold+tensor"
    assert Strategy.parse(str(folded)) == folded
    assert Strategy.parse("cut=fold").layout == "fold"
    with pytest.raises(StrategyError, match='expected one of fold, found "foldd"; did you mean "fold"'):
        Strategy.parse("cut=foldd")


def test_memory_of_a_cut_without_a_form_is_refused_and_not_guessed(package: None) -> None:
    with pytest.raises(StrategyError, match="what cut=fold keeps in memory has no closed form yet"):
        plan_memory(recipe("cut=fold"), gpt(), 1)


def test_a_word_that_is_taken_keeps_its_meaning(package: None) -> None:
    """An installed package must not change what a recipe means."""
    own = own_words(CodecSpec)["fp32"]
    assert find(CodecSpec, "fp32") is own
    assert known(CodecSpec)["fp32"] is own


def test_without_it_they_are_unknown() -> None:
    for text in ("codec=round", "cut=fold"):
        with pytest.raises(StrategyError, match="expected"):
            Strategy.parse(text)


def test_an_entry_of_another_kind_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Refusal("never", lambda s: False)
    monkeypatch.setattr(
        specs_module,
        "_plugged_in",
        lambda choice: (RouteSpec(word="sideways", build="math:floor", refusals=(refusal,)),),
    )
    assert not plugged_in(CodecSpec) and list(plugged_in(RouteSpec)) == ["sideways"]
