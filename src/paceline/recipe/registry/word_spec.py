"""What is known of a word before anything is built, of a strategy or an optimizer: torch-free descriptions.

From them follow parsing, support, refusals, who guards and saves, closed forms, and what builds the piece.
A word is described in one place (`words`), or in another package, as an entry point of `paceline.CHOICE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy


class WordArgument(NamedTuple):
    """What stands behind the colon of a word.

    Args:
        example: one that is right.
        says: what is expected, in words.
        fits: whether a text is right.
    """

    example: str
    says: str
    fits: Callable[[str], bool]


class StrategyRefusal(NamedTuple):
    """Why a strategy cannot be, in one line, and whether that holds of one."""

    reason: str
    holds: Callable[[Strategy], bool]


@dataclass(frozen=True, kw_only=True)
class WordSpec:
    """A word.

    Args:
        word: as users write it.
        summary: what it does, in a few words.
        argument: behind a colon; None: there is none.
        argument_may_be_missing: the word may stand alone.
        build: `module:name` of what constructs it; empty: not built yet.
        with_terms: further terms of the smallest strategy that shows it.
        refusals: what it does not go with.
        chooses: it stands for one of the words of its argument, until it was measured which one pays.
    """

    choice: ClassVar[str]
    word: str
    summary: str = ""
    argument: WordArgument | None = None
    argument_may_be_missing: bool = False
    build: str = ""
    with_terms: str = ""
    refusals: tuple[StrategyRefusal, ...] = ()
    chooses: bool = False

    @property
    def example(self) -> str:
        """The word as it is written."""
        if self.argument is None or self.argument_may_be_missing:
            return self.word
        return f"{self.word}:{self.argument.example}"

    @property
    def is_built(self) -> bool:
        """Whether it can run."""
        return bool(self.build)

    def load(self) -> Any:
        """What constructs it; imports its module."""
        return import_object(self.build)


def import_object(place: str) -> Any:
    """What `module:name` names; imports the module."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


AgreementScope = Literal["world", "replica", "nobody"]


@dataclass(frozen=True, kw_only=True)
class SyncSpec(WordSpec):
    """When replicas agree. `build(setting, layout, state) -> Rule`; of a server a policy
    (`paceline.sync.server.server_policies`), of which `training.rules.served` makes the rest.

    Args:
        exact: whether the result is that of one process but for rounding.
        agrees: which ranks see the same sums in a step.
        shares_state: all ranks that hold a part of the state hold the same, so any of them may save it.
        steady: nothing but the optimizer changes parameters before the first update of a round.
        needs_server: how many servers it has at least.
        needs_whole_replicas: a replica must be whole on one rank, beside others that train alone.
        sums: it sums over replicas by collectives, which have a route and a codec.
        sends: ranks send each other messages, over a channel; those of a server always do.
        reads: tables of the recipe that it alone reads.
        updates_per_step: how many updates a global batch makes, of a strategy with its replicas filled in.
        deals: whether the shards of its batches may be dealt by speed.
        in_order: whether its sums can follow the tree of a reproducible run.
        extra_tally_bytes: how much longer its tally is than every-step's; None: nobody knows.
        memory: `module:name` of what it says that it keeps (`paceline.sync.sync_rule`); empty: nobody knows.
    """

    choice = "sync"
    exact: bool = False
    agrees: AgreementScope = "nobody"
    shares_state: bool = False
    steady: bool = False
    needs_server: int = 0
    needs_whole_replicas: bool = False
    sums: bool = True
    sends: bool = False
    reads: tuple[str, ...] = ()
    updates_per_step: Callable[[Strategy], int] = lambda strategy: 1
    in_order: Callable[[Strategy], bool] = lambda strategy: strategy.rule.exact
    deals: Callable[[Strategy], bool] = lambda strategy: False
    extra_tally_bytes: int | None = None
    memory: str = ""


@dataclass(frozen=True, kw_only=True)
class CodecSpec(WordSpec):
    """The form of what travels. `build(argument) -> Codec | None`.

    Args:
        exact: nothing is lost.
        uses_error_feedback: what is lost is kept, and sent later.
        sparsifies: it leaves out some values, and another codec may code the others: `topk:0.01+int4`.
        after: it may stand behind another word: behind one that leaves "values", or behind any ("bytes").
        join: `join(earlier, this) -> Codec` of what stands behind another; a module and a name, as `build`.
        summed: `summed(path, argument, seed) -> Collective`, if parts are not coded and added up; as `build`.
        keeps: `keeps(buffers, argument, scatters=) -> int`, bytes of that where shapes decide; as `build`.
    """

    choice = "codec"
    exact: bool = False
    uses_error_feedback: bool = True
    sparsifies: bool = False
    after: Literal["", "values", "bytes"] = ""
    join: str = ""
    summed: str = ""
    keeps: str = ""

    def can_follow(self, earlier: CodecSpec) -> bool:
        """Whether it may stand behind another."""
        return self.after == "bytes" or (self.after == "values" and earlier.sparsifies)


@dataclass(frozen=True, kw_only=True)
class RouteSpec(WordSpec):
    """The path on which it travels. `build(group, site) -> Collective`.

    Args:
        coded: buffers that are coded and under way at a time; 0: no codec goes with it; None: nobody knows.
        any_order: it sums in an order of its own, so a reproducible run, or lanes, cannot have it.
        by_default: what a user gets who says nothing, or what costs nothing to name anyway.
        ring_bytes: an all_reduce sends 2 (P-1)/P n bytes of a rank.
        in_memory: what ranks of one host have for each other lies in memory that they share.
        hops: messages, one after another, that may carry it between hosts; `hops() -> Hops`, as `build`.
    """

    choice = "route"
    coded: int | None = None
    any_order: bool = False
    by_default: bool = False
    ring_bytes: bool = False
    in_memory: bool = False
    hops: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec(WordSpec):
    """The order in which stages work. `build(num_stages, num_micro_batches[, argument]) -> Table`."""

    choice = "schedule"


@dataclass(frozen=True, kw_only=True)
class LayoutSpec(WordSpec):
    """One cut of a model. `build(setting, material) -> Cutting`.

    Args:
        order: cuts are made from the lowest to the highest.
        inexact_reason: why its result has other bits than one process; empty: it has the same.
        applies: whether a strategy asks for it.
    """

    choice = "layout"
    order: int = 0
    inexact_reason: str = ""
    applies: Callable[[Strategy], bool] = lambda strategy: False


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(WordSpec):
    """An update rule. `build(model, groups, recipe, *, fused) -> torch.optim.Optimizer`; its method
    `on_build(session)`, if it has one, is called once, before anything is restored.

    Args:
        reads: keys of [optimizer] that it reads, beside those that all read.
        decays_by: the key whose value is a group's "weight_decay".
        elementwise: it is known to update each value by itself; else its class says so, or it is tried.
        has_kernel: PyTorch has a fused kernel of it.
    """

    choice = "optimizer"
    reads: tuple[str, ...] = ()
    decays_by: Literal["weight_decay", "l2"] = "weight_decay"
    elementwise: bool = False
    has_kernel: bool = False


S = TypeVar("S", bound=WordSpec)


def find_spec(kind: type[S], word: str) -> S | None:
    """The description of a word; None: nobody knows it."""
    return builtin_specs(kind).get(word) or plugin_specs(kind).get(word)


def known_specs(kind: type[S]) -> dict[str, S]:
    """All words of a choice, by word, the own ones first; those keep their meaning."""
    return {**builtin_specs(kind), **plugin_specs(kind), **builtin_specs(kind)}


def builtin_specs(kind: type[S]) -> Mapping[str, S]:
    """Those that come with this package."""
    from paceline.recipe.registry.sync_specs import SPECS_BY_CHOICE

    return SPECS_BY_CHOICE[kind.choice]


@cache
def _load_plugins(choice: str) -> tuple[WordSpec, ...]:
    return tuple(entry.load() for entry in entry_points(group=f"paceline.{choice}"))


def plugin_specs(kind: type[S]) -> dict[str, S]:
    """Those of other packages that are installed; looked up once."""
    return {spec.word: spec for spec in _load_plugins(kind.choice) if isinstance(spec, kind)}
