"""A strategy as one value: how the state, the work and the communication of a run are distributed.

Invariant: the text, the TOML table and the object are the same; `Strategy.parse(str(s)) == s`. This module
knows the terms and what follows from their words; `support` knows which combinations work.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from paceline.errors import RecipeError, StrategyError
from paceline.recipe.constraints import (
    BALANCE_NEEDS,
    CHANNEL_NEEDS,
    CODEC_NEEDS,
    LANE_NEEDS,
    PARTITION_NEEDS,
    ROUTE_NEEDS,
    SCHEDULE_NEEDS,
    SHARD_NEEDS,
    STAGES_NEEDS,
    STORAGE_NEEDS,
    SYNC_NEEDS,
    ZERO_NEEDS,
)
from paceline.recipe.registry import (
    ChannelSpec,
    CodecSpec,
    LayoutSpec,
    ParsedWord,
    RouteSpec,
    ScheduleSpec,
    SyncSpec,
    known_specs,
    parse_word,
)
from paceline.recipe.registry.codec_specs import PLAIN_CODEC
from paceline.recipe.registry.route_specs import DEFAULT_CHANNEL, uses_channel
from paceline.recipe.registry.sync_specs import merge_sync_specs
from paceline.recipe.strategy_text import (
    PieceSize,
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
    codec_choices,
    inner_filled_axis,
    is_speed_balance,
    parse_codec,
    parse_partition,
    parse_replicas,
    parse_stages,
    phase_at_step,
    phases_of,
    phases_to_text,
    read_terms,
    spell_out_terms,
)
from paceline.recipe.validation import ExpectedText, RecipeTable


class Strategy(RecipeTable):
    """Where state lives, when replicas agree, how values are encoded, and along which route they travel.

    It is parsed from text (`Strategy.parse("replicas=2 sync=every-step")`, `Strategy.parse("ddp")`); in a
    recipe it is either that text or a table with these keys.

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
    shard: Annotated[int, *SHARD_NEEDS] = Field(
        default=1, ge=1, description="ranks that share the state of one replica (ZeRO)"
    )
    fills: Literal["replicas", "shard", "pipeline"] = Field(
        default="replicas",
        description="the degree that takes the processes which are left; also written shard=all",
    )
    zero: Annotated[int, *ZERO_NEEDS] = Field(
        default=0, ge=0, le=3, description="what they share: 1 optimizer state, 2 + gradients, 3 + weights"
    )
    storage: Annotated[Literal["spread", "central"], *STORAGE_NEEDS] = Field(
        default="spread",
        description="where shard ranks update weights and hold moments under zero=3: a part on each; or all"
        " on the first, in memory that the host shares",
    )
    tensor: int = Field(default=1, ge=1, description="ranks that split each large tensor")
    pipeline: int = Field(default=1, ge=1, description="stages of consecutive layers")
    schedule: Annotated[str, AfterValidator(check_schedule), *SCHEDULE_NEEDS] = Field(
        default="gpipe", description="the order in which a stage runs its micro-batches"
    )
    stages: Annotated[str, AfterValidator(check_stages), *STAGES_NEEDS] = Field(
        default="parameters",
        description="stages of equal parameters or measured time; or numbers of modules, as in 3,5, of which"
        " the last may be left out",
    )
    rechunk: Annotated[str, AfterValidator(check_rechunk)] = Field(
        default="", description="parts in which each stage runs a micro-batch: 1,4; empty: all of it at once"
    )
    context: int = Field(default=1, ge=1, description="ranks that split the positions of a sequence")
    cut: Annotated[str, AfterValidator(check_cut)] = Field(
        default="", description="a further partition of the model that an installed package adds"
    )
    lanes: Annotated[int, *LANE_NEEDS] = Field(
        default=1, ge=1, description="threads of a process that run shards, or the stages, side by side"
    )
    servers: int = Field(default=0, ge=0, description="additional processes that hold state and do not train")
    partition: Annotated[str, AfterValidator(check_partition), *PARTITION_NEEDS] = Field(
        default="fixed",
        description="pieces of a tensor on several servers: one on each, or of at least or at most BYTES",
    )
    sync: Annotated[str, BeforeValidator(phases_to_text), AfterValidator(check_sync), *SYNC_NEEDS] = Field(
        default="every-step", description="when replicas agree"
    )
    balance: Annotated[Literal["even", "speed"], *BALANCE_NEEDS] = Field(
        default="even", description="shards of a batch per replica: the same number, or by speed"
    )
    codec: Annotated[str, AfterValidator(check_codec), *CODEC_NEEDS] = Field(
        default=PLAIN_CODEC, description="how values are encoded for sending"
    )
    route: Annotated[str, AfterValidator(check_route), *ROUTE_NEEDS] = Field(
        default="auto",
        description="the path of collectives; auto: shared memory within a host, else as measured",
    )
    channel: Annotated[str, AfterValidator(check_channel), *CHANNEL_NEEDS] = Field(
        default=DEFAULT_CHANNEL, description="what carries the messages of servers and of gossip"
    )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `NAME=VALUE` terms, or a preset and terms that change it.

        Raises:
            StrategyError: a term is not understood; names it and the nearest valid spelling.
        """
        return cls.read(text, lambda paths: f'strategy "{text}"')

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, value: Any) -> Any:
        terms = read_terms(value, cls.model_fields) if isinstance(value, str) else value
        return spell_out_terms(terms) if isinstance(terms, dict) else terms

    def is_set(self, field: str) -> bool:
        """Return whether a field has another value than its default."""
        return bool(getattr(self, field) != type(self).model_fields[field].default)

    # ------------------------------------------------------------------ ranks and layout

    @property
    def ranks_per_replica(self) -> int:
        """Return the number of processes that together hold one whole copy of the model."""
        return self.shard * self.tensor * self.stage_ranks * self.context

    @property
    def filled_axis(self) -> str | None:
        """Return the axis inside a replica that takes the processes which are left; None: replicas do."""
        return inner_filled_axis(self.fills)

    @property
    def stage_ranks(self) -> int:
        """Return the number of processes with a stage of a replica; 1 if stages are lanes of one process."""
        return 1 if self.lanes > 1 else self.pipeline

    @property
    def degrees(self) -> dict[str, int]:
        """Return the size of each mesh axis. Servers do not train; they are further ranks of the replica
        axis.
        """
        return {
            "replica": (self.replicas or 1) + self.servers,
            "shard": self.shard,
            "pipeline": self.stage_ranks,
            "context": self.context,
            "tensor": self.tensor,
        }

    @property
    def storage_ranks(self) -> int:
        """Return how many of the first ranks hold parts of the model and run no samples: several servers."""
        return self.servers if self.servers > 1 else 0

    @property
    def stage_lengths(self) -> list[int] | None:
        """Return the number of modules of each chunk of the model; None: the model is divided evenly."""
        lengths = parse_stages(self.stages).lengths
        return None if lengths is None else list(lengths)

    @property
    def has_timed_stages(self) -> bool:
        """Return whether stages are divided by measured time."""
        return parse_stages(self.stages).by_time

    @property
    def piece_size(self) -> PieceSize:
        """Return the limits of the pieces of tensors on several servers."""
        return parse_partition(self.partition)

    @property
    def layout(self) -> str:
        """Return the words of its partitions, in the order in which they are applied, joined by `+`."""
        return "+".join(spec.word for spec in self.cuts) or "replicate"

    @property
    def cuts(self) -> list[LayoutSpec]:
        """Return the partitions that spread a replica over ranks, in the order in which they are applied."""
        if self.ranks_per_replica == 1 and self.servers <= 1 and not self.cut:
            return []
        specs = [spec for spec in known_specs(LayoutSpec).values() if spec.applies(self)]
        return sorted(specs, key=lambda spec: spec.order)

    @property
    def schedule_word(self) -> ParsedWord[ScheduleSpec]:
        """Return the schedule, parsed."""
        return parse_word(ScheduleSpec, self.schedule)

    @property
    def schedule_spec(self) -> ScheduleSpec:
        """Return the specification of the schedule."""
        return self.schedule_word.spec

    @property
    def balances_by_speed(self) -> bool:
        """Return whether the shards of a batch are assigned by the speed of replicas."""
        return is_speed_balance(self.balance)

    # ------------------------------------------------------------------ when replicas agree

    @property
    def sync_words(self) -> tuple[ParsedWord[SyncSpec], ...]:
        """Return the rules of the run, parsed, one after another."""
        return tuple(phase.word for phase in phases_of(self.sync))

    @property
    def sync_word(self) -> ParsedWord[SyncSpec]:
        """Return the first rule, parsed. A session has only one: see `with_sync`."""
        return self.sync_words[0]

    @property
    def sync_specs(self) -> list[SyncSpec]:
        """Return the specifications of the rules, one after another."""
        return [word.spec for word in self.sync_words]

    @property
    def sync_spec(self) -> SyncSpec:
        """Return the specification of the rule; of several rules what holds of all of them."""
        specs = self.sync_specs
        return specs[0] if len(specs) == 1 else merge_sync_specs(specs)

    @property
    def sync_choices(self) -> tuple[str, ...]:
        """Return the rules that a run may choose from after its first steps; empty: `sync` names them."""
        return choices_of(self.sync)

    @property
    def switches_on_event(self) -> bool:
        """Return whether a phase of the run ends with an event and not at a given step."""
        return any(isinstance(phase.until, str) for phase in phases_of(self.sync))

    def phase(self, step: int) -> SyncPhase:
        """Return the phase to which a step belongs."""
        return phase_at_step(phases_of(self.sync), step)

    def with_sync(self, rule: str) -> Self:
        """Return this strategy under one of its rules, on the same ranks.

        A process that is a server under another rule trains as a further replica under this one.
        """
        spec = parse_word(SyncSpec, rule).spec
        changes: dict[str, Any] = {}
        if len(self.sync_words) > 1:
            if not uses_channel(spec):
                changes["channel"] = DEFAULT_CHANNEL
            if self.servers and not spec.needs_server:
                changes |= {"servers": 0, "replicas": self.replicas and self.replicas + self.servers}
        return self.replace(sync=rule, **changes)

    @property
    def updates_per_step(self) -> int:
        """Return how many updates one global batch makes."""
        return self.sync_spec.updates_per_step(self)

    # ------------------------------------------------------------------ what is sent, and how

    @property
    def route_spec(self) -> RouteSpec:
        """Return the specification of the route."""
        return parse_word(RouteSpec, self.route).spec

    @property
    def channel_spec(self) -> ChannelSpec:
        """Return the specification of the channel."""
        return parse_word(ChannelSpec, self.channel).spec

    @property
    def codec_words(self) -> tuple[ParsedWord[CodecSpec], ...]:
        """Return the codec, parsed; of a chain each link, in order."""
        return parse_codec(self.codec)

    @property
    def codec_spec(self) -> CodecSpec:
        """Return the specification of the codec; of a chain that of the first link."""
        return self.codec_words[0].spec

    @property
    def codec_alternatives(self) -> list[Self]:
        """Return this strategy with each codec that it may choose, plain values first; else itself alone."""
        choices = codec_choices(self.codec)
        return [self.replace(codec=codec) for codec in choices] if choices else [self]

    @property
    def is_coded(self) -> bool:
        """Return whether values are encoded for sending."""
        return not self.codec_spec.is_identity or len(self.codec_words) > 1

    @property
    def uses_error_feedback(self) -> bool:
        """Return whether the quantisation error of the codec is kept and sent later."""
        last = self.codec_words[-1]
        is_unbiased = last.spec.is_unbiased(last.argument)
        return any(word.spec.uses_error_feedback for word in self.codec_words) and not is_unbiased

    @property
    def codec_has_momentum(self) -> bool:
        """Return whether the codec applies momentum where gradients are sent."""
        return any(word.spec.has_momentum for word in self.codec_words)

    @property
    def clip_norm(self) -> float | None:
        """Return the norm to which each rank clips what it sends; None: no codec clips."""
        norms = [word.spec.clip_norm(word.argument) for word in self.codec_words]
        return next((norm for norm in norms if norm is not None), None)

    @property
    def is_approximate(self) -> bool:
        """Return whether the result differs from that of one process by more than rounding."""
        specs = [word.spec for strategy in self.codec_alternatives for word in strategy.codec_words]
        return not (self.sync_spec.exact and all(spec.exact for spec in specs))

    @property
    def runs_every_step(self) -> bool:
        """Return whether all ranks take every step of the run together, with collectives and no server."""
        rules = self.sync_words
        return len(rules) == 1 and rules[0].spec.sums and rules[0].spec.exact and not self.servers

    @property
    def has_steps_of_one_process(self) -> bool:
        """Return whether each step is that of one process, up to rounding; also of a rule that is so only
        with its argument, such as `bounded:0`.
        """
        specs = [word.spec for strategy in self.codec_alternatives for word in strategy.codec_words]
        return self.sync_spec.is_exact(self) and all(spec.exact for spec in specs)

    def __str__(self) -> str:
        """Return the text that `parse` reads back: replicas and sync always, other terms if they are set."""
        terms = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name == "fills" or name == self.filled_axis:
                continue
            if name in ("replicas", "sync") or value != field.default:
                terms.append(f"{name}={'all' if value is None else value}")
        if self.filled_axis is not None:
            terms.insert(1, f"{self.filled_axis}=all")
        return " ".join(terms)
