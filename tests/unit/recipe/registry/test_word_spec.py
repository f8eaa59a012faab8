"""Words of a strategy: what is found, what another package brings, and what follows from a description."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic_core import PydanticCustomError

from paceline.errors import StrategyError
from paceline.plan import plan_memory
from paceline.recipe import Strategy, support
from paceline.recipe.registry import (
    ALL_SPECS,
    ChannelSpec,
    CodecSpec,
    LayoutSpec,
    OptimizerSpec,
    RouteSpec,
    ScheduleSpec,
    SinkSpec,
    StrategyRefusal,
    SyncSpec,
    WordSpec,
    builtin_specs,
    find_spec,
    forget_plugins,
    known_specs,
    parse_word,
    plugin_specs,
    word_spec,
)
from tests.unit.plan.gpt_jobs import gpt, recipe

KINDS: tuple[type[WordSpec], ...] = (
    SyncSpec,
    CodecSpec,
    RouteSpec,
    ChannelSpec,
    ScheduleSpec,
    LayoutSpec,
    OptimizerSpec,
    SinkSpec,
)

PLUGIN = """
from paceline.recipe.registry import ChannelSpec, CodecSpec, LayoutSpec, StrategyRefusal

ROUND = CodecSpec(
    word="round",
    build="math:floor",
    refusals=(StrategyRefusal("round goes with replicas only", lambda s: s.pipeline > 1),),
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
    forget_plugins()
    yield
    forget_plugins()


def test_every_word_is_found_by_its_name_and_kind_and_no_word_twice() -> None:
    for kind in KINDS:
        own = builtin_specs(kind)
        assert list(own) == [spec.word for spec in ALL_SPECS if isinstance(spec, kind)]
        assert all(find_spec(kind, word) is spec for word, spec in own.items())
        assert known_specs(kind) == own  # nothing is installed
        assert find_spec(kind, "no such word") is None
    assert find_spec(SyncSpec, "int8") is None and find_spec(CodecSpec, "int8") is not None
    assert sum(len(builtin_specs(kind)) for kind in KINDS) == len(ALL_SPECS)


def test_what_is_built_can_be_loaded_and_its_example_is_a_strategy() -> None:
    for kind in KINDS:
        for spec in builtin_specs(kind).values():
            if spec.is_built:
                assert callable(spec.load()) and spec.summary
            if kind not in (LayoutSpec, OptimizerSpec, SinkSpec):
                text = f"{spec.with_terms} {kind.choice}={spec.example}"
                assert getattr(Strategy.parse(text), kind.choice) == spec.example
            if spec.argument is not None:
                assert parse_word(kind, f"{spec.word}:{spec.argument.example}").argument is not None
                with pytest.raises(PydanticCustomError, match=re.escape(spec.argument.says)):
                    parse_word(kind, f"{spec.word}:")


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
    found = find_spec(CodecSpec, "round")
    assert found is not None and found.load()(1.5) == 1
    assert list(plugin_specs(LayoutSpec)) == ["fold"] and not plugin_specs(RouteSpec)
    assert Strategy.parse("codec=round").codec_spec is found
    assert support(Strategy.parse("codec=round"), processes=2, shards=8).ok
    carried = Strategy.parse("servers=1 sync=server channel=pigeon")
    assert carried.channel_spec.load()(4) == 2 and support(carried, processes=2, shards=8).ok
    refused = support(Strategy.parse("pipeline=2 codec=round"), processes=2, shards=8)
    assert not refused.ok and refused.reason == "round goes with replicas only"
    folded = Strategy.parse("tensor=2 pipeline=2 cut=fold")
    assert folded.layout == "pipeline+fold+tensor"
    assert Strategy.parse(str(folded)) == folded
    assert Strategy.parse("cut=fold").layout == "fold"
    with pytest.raises(StrategyError, match='expected one of fold, found "foldd"; did you mean "fold"'):
        Strategy.parse("cut=foldd")


def test_memory_of_a_cut_without_a_form_is_refused_and_not_guessed(package: None) -> None:
    with pytest.raises(StrategyError, match="the memory of cut=fold is not planned"):
        plan_memory(recipe("cut=fold"), gpt(), 1)


def test_a_word_that_is_taken_keeps_its_meaning(package: None) -> None:
    """An installed package must not change what a recipe means."""
    own = builtin_specs(CodecSpec)["fp32"]
    assert find_spec(CodecSpec, "fp32") is own
    assert known_specs(CodecSpec)["fp32"] is own


def test_without_it_they_are_unknown() -> None:
    for text in ("codec=round", "cut=fold"):
        with pytest.raises(StrategyError, match="expected"):
            Strategy.parse(text)


def test_an_entry_of_another_kind_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = StrategyRefusal("never", lambda s: False)
    monkeypatch.setattr(
        word_spec,
        "_load_plugins",
        lambda choice: (RouteSpec(word="sideways", build="math:floor", refusals=(refusal,)),),
    )
    assert not plugin_specs(CodecSpec) and list(plugin_specs(RouteSpec)) == ["sideways"]
