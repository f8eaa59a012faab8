"""How the work is distributed, as one value: layout, schedule, lanes, sync, codec and route.

Invariant: the text, the TOML table and the object are the same thing; `Strategy.parse(str(s)) == s`.
This module knows the words; `support` knows which combinations are built.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from paceline.errors import RecipeError, StrategyError
from paceline.recipe.registry.route_specs import DEFAULT_CHANNEL, ChannelSpec, uses_channel
from paceline.recipe.registry.word_spec import (
    CodecSpec,
    LayoutSpec,
    RouteSpec,
    ScheduleSpec,
    SyncSpec,
    WordSpec,
    find_spec,
    known_specs,
)
from paceline.recipe.strategy_text import (
    SyncPhase,
    check_channel,
    check_codec,
    check_cut,
    check_partition,
    check_rechunk,
    check_route,
    check_schedule,
    check_stages,
    check_sync,
    choices_of,
    merge_sync_specs,
    parse_counts,
    parse_replicas,
    phase_at_step,
    phases_of,
    phases_to_text,
    read_terms,
)
from paceline.recipe.validation import ExpectedText, RecipeTable


class Strategy(RecipeTable):
    """Where state lives, when replicas agree, what goes over the wire and along which path.

    `Strategy.parse("replicas=2 sync=every-step")`, `Strategy.parse("ddp")`, and in a recipe either that
    text or a table with these keys.

    Raises:
        StrategyError: a word is unknown or a degree is impossible.
    """

    error_class: ClassVar[type[RecipeError]] = StrategyError
    expects: ClassVar[str] = 'a table, or text such as "replicas=2" or "ddp"'

    replicas: Annotated[
        int | None, BeforeValidator(parse_replicas), ExpectedText('an integer >= 1 or "all"')
    ] = Field(
        default=None, ge=1, description='whole copies of the model; "all" fills the processes that are left'
    )
    shard: int = Field(default=1, ge=1, description="ranks that share the state of one replica (ZeRO)")
    zero: int = Field(default=0, ge=0, le=3, description="they share: 1 optimizer, 2 + grads, 3 + weights")
    tensor: int = Field(default=1, ge=1, description="ranks that split each large tensor")
    pipeline: int = Field(default=1, ge=1, description="stages of consecutive layers")
    schedule: Annotated[str, AfterValidator(check_schedule)] = Field(
        default="gpipe", description="the order in which a stage runs its micro-batches"
    )
    stages: Annotated[str, AfterValidator(check_stages)] = Field(
        default="parameters", description="even in parameters or measured time; or numbers of modules: 3,5"
    )
    rechunk: Annotated[str, AfterValidator(check_rechunk)] = Field(
        default="", description="parts in which each stage runs a micro-batch: 1,4; empty: all of it at once"
    )
    context: int = Field(default=1, ge=1, description="ranks that split the positions of a sequence")
    cut: Annotated[str, AfterValidator(check_cut)] = Field(
        default="", description="a further cut of the model, that an installed package brings"
    )
    lanes: int = Field(
        default=1, ge=1, description="threads of a process that run shards, or the stages, side by side"
    )
    servers: int = Field(default=0, ge=0, description="further processes that hold state and do not train")
    partition: Annotated[str, AfterValidator(check_partition)] = Field(
        default="fixed",
        description="pieces of a tensor on several servers: one on each; or as many as have BYTES, or so few",
    )
    sync: Annotated[str, BeforeValidator(phases_to_text), AfterValidator(check_sync)] = Field(
        default="every-step", description="when replicas agree"
    )
    balance: Literal["even", "speed"] = Field(
        default="even", description="shards of a batch that a replica runs: as many as others, or by speed"
    )
    codec: Annotated[str, AfterValidator(check_codec)] = Field(
        default="fp32", description="what goes over the wire"
    )
    route: Annotated[str, AfterValidator(check_route)] = Field(
        default="auto", description="along which path it goes; auto: memory within a host, else as measured"
    )
    channel: Annotated[str, AfterValidator(check_channel)] = Field(
        default=DEFAULT_CHANNEL, description="what carries the messages of servers and of gossip"
    )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `NAME=VALUE` terms, or a preset and terms that change it.

        Raises:
            StrategyError: a term is not understood; names it and the nearest right spelling.
        """
        return cls.read(text, lambda paths: f'strategy "{text}"')

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, value: Any) -> Any:
        return read_terms(value, cls.model_fields) if isinstance(value, str) else value

    @property
    def ranks_per_replica(self) -> int:
        """Processes that together hold one whole copy of the model."""
        return self.shard * self.tensor * self.stage_ranks * self.context

    @property
    def stage_ranks(self) -> int:
        """Processes among which the stages of a replica are dealt: 1 where they are lanes of one."""
        return 1 if self.lanes > 1 else self.pipeline

    @property
    def degrees(self) -> dict[str, int]:
        """Size of each mesh axis; servers train nothing, and are further ranks of the replica axis."""
        return {
            "replica": (self.replicas or 1) + self.servers,
            "shard": self.shard,
            "pipeline": self.stage_ranks,
            "context": self.context,
            "tensor": self.tensor,
        }

    @property
    def stage_lengths(self) -> list[int] | None:
        """Numbers of modules, by chunk of the model; None: it is cut evenly."""
        return parse_counts(self.stages) if self.stages[0].isdecimal() else None

    @property
    def layout(self) -> str:
        """The words of its cuts, in their order, joined by `+`."""
        return "+".join(spec.word for spec in self.cuts) or "replicate"

    @property
    def cuts(self) -> list[LayoutSpec]:
        """How a replica is spread over ranks: cuts in their order."""
        applying = (
            [spec for spec in known_specs(LayoutSpec).values() if spec.applies(self)]
            if self._is_spread
            else []
        )
        return sorted(applying, key=lambda spec: spec.order)

    @property
    def _is_spread(self) -> bool:
        return self.ranks_per_replica > 1 or self.servers > 1 or bool(self.cut)

    @property
    def rule_argument(self) -> str:
        """The argument of the sync rule, as `8` in `local:8`; empty if there is none."""
        return self.sync.partition(":")[2]

    @property
    def rule(self) -> SyncSpec:
        """What its rule is; of several what holds of all."""
        return self.rules[0] if len(self.rules) == 1 else merge_sync_specs(self.rules)

    @property
    def rules(self) -> list[SyncSpec]:
        """Its rules, one after another."""
        return [_spec_of(SyncSpec, phase.rule) for phase in phases_of(self.sync)]

    def phase(self, step: int) -> SyncPhase:
        """The rule of a step, and until when it holds."""
        return phase_at_step(phases_of(self.sync), step)

    def under(self, rule: str) -> Self:
        """Itself under one of its rules, on the same ranks: who serves under another trains here."""
        several, spec = len(self.rules) > 1, _spec_of(SyncSpec, rule)
        changes: dict[str, Any] = {"channel": DEFAULT_CHANNEL} if several and not uses_channel(spec) else {}
        if several and self.servers and not spec.needs_server:
            changes |= {"servers": 0, "replicas": self.replicas and self.replicas + self.servers}
        return self.replace(sync=rule, **changes)

    @property
    def choices(self) -> tuple[str, ...]:
        """The rules that a run may choose from, once its first steps were measured; empty: they are named."""
        return choices_of(self.sync)

    @property
    def path(self) -> RouteSpec:
        """What its route is."""
        return _spec_of(RouteSpec, self.route)

    @property
    def channel_spec(self) -> ChannelSpec:
        """What its channel is."""
        return _spec_of(ChannelSpec, self.channel)

    @property
    def form(self) -> CodecSpec:
        """What its codec is; of a chain the first."""
        return self.links[0][0]

    @property
    def links(self) -> list[tuple[CodecSpec, str]]:
        """The words of its codec, in order, with their arguments."""
        word, _, allowed = self.codec.partition(":")
        whole = find_spec(CodecSpec, word)
        if whole is not None and whole.chooses:
            return [(whole, allowed)]
        return [(_spec_of(CodecSpec, link), link.partition(":")[2]) for link in self.codec.split("+")]

    @property
    def codec_alternatives(self) -> list[Self]:
        """Itself; under `codec=auto` values as they are, then what it is allowed to choose."""
        (spec, allowed), *more = self.links
        if more or not spec.chooses:
            return [self]
        return [self.replace(codec=codec) for codec in ("fp32", *(allowed or "lossless").split(","))]

    @property
    def is_coded(self) -> bool:
        """Whether values travel in another form than their own."""
        return self.codec != "fp32"

    @property
    def uses_error_feedback(self) -> bool:
        """Whether coding loses what is to be sent later."""
        return any(spec.uses_error_feedback for spec, _ in self.links) and not self.codec.endswith(
            ":stochastic"
        )

    @property
    def order(self) -> ScheduleSpec:
        """What its schedule is."""
        return _spec_of(ScheduleSpec, self.schedule)

    @property
    def is_approximate(self) -> bool:
        """Whether its result differs by nature, not by rounding, from that of one process."""
        specs = [spec for one in self.codec_alternatives for spec, _ in one.links]
        return not (self.rule.exact and all(spec.exact for spec in specs))

    @property
    def updates_per_step(self) -> int:
        """Updates that one global batch makes."""
        return self.rule.updates_per_step(self)

    def __str__(self) -> str:
        """The text that `parse` reads back: who and when always, the rest where it is not the default."""
        terms = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in ("replicas", "sync") or value != field.default:
                terms.append(f"{name}={'all' if value is None else value}")
        return " ".join(terms)


D = TypeVar("D", bound=WordSpec)


def _spec_of(kind: type[D], text: str) -> D:
    found = find_spec(kind, text.partition(":")[0])
    assert found is not None, text  # it was checked when it was read
    return found
