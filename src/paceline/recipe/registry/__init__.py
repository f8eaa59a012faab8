"""The words of strategy strings and optimizers: one specification for each, and the class of each kind.

A package that adds a word imports everything it needs from here: `from paceline.recipe.registry import
CodecSpec, WordArgument`.
"""

from collections.abc import Mapping
from typing import Any

from paceline.recipe.registry.codec_specs import CODEC_SPECS, CodecSpec, DgcArgument
from paceline.recipe.registry.layout_specs import LAYOUT_SPECS, SCHEDULE_SPECS, LayoutSpec, ScheduleSpec
from paceline.recipe.registry.optimizer_specs import OPTIMIZER_SPECS, OptimizerSpec
from paceline.recipe.registry.route_specs import CHANNEL_SPECS, ROUTE_SPECS, ChannelSpec, RouteSpec
from paceline.recipe.registry.sink_specs import SINK_SPECS, SinkSpec
from paceline.recipe.registry.sync_specs import SYNC_SPECS, AgreementScope, SyncSpec
from paceline.recipe.registry.word_spec import (
    ParsedWord,
    StrategyRefusal,
    WordArgument,
    WordSpec,
    builtin_specs,
    find_spec,
    forget_plugins,
    import_object,
    integer_argument,
    known_specs,
    parse_counts,
    parse_word,
    plugin_specs,
)

ALL_SPECS: tuple[WordSpec, ...] = (
    *SYNC_SPECS,
    *CODEC_SPECS,
    *ROUTE_SPECS,
    *CHANNEL_SPECS,
    *SCHEDULE_SPECS,
    *LAYOUT_SPECS,
    *OPTIMIZER_SPECS,
    *SINK_SPECS,
)
SPECS_BY_CHOICE: Mapping[str, Mapping[str, Any]] = {
    choice: {spec.word: spec for spec in ALL_SPECS if spec.choice == choice}
    for choice in {spec.choice for spec in ALL_SPECS}
}
"""The built-in specifications by kind and word."""

__all__ = [
    "ALL_SPECS",
    "SPECS_BY_CHOICE",
    "AgreementScope",
    "ChannelSpec",
    "CodecSpec",
    "DgcArgument",
    "LayoutSpec",
    "OptimizerSpec",
    "ParsedWord",
    "RouteSpec",
    "ScheduleSpec",
    "SinkSpec",
    "StrategyRefusal",
    "SyncSpec",
    "WordArgument",
    "WordSpec",
    "builtin_specs",
    "find_spec",
    "forget_plugins",
    "import_object",
    "integer_argument",
    "known_specs",
    "parse_counts",
    "parse_word",
    "plugin_specs",
]
