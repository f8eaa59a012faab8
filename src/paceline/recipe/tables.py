"""The tables of a recipe that have no file of their own: batch, checkpoints, health, runtime and others.

Each field states its bounds, its meaning and what it needs; `recipe.validation` makes errors, warnings and
the reference page of them. Needs that concern several tables are in `recipe.constraints`.

Invariant: plain values without torch. A key whose value would have no effect is an error.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from paceline.errors import RecipeError
from paceline.recipe.constraints import (
    BEST_VALUE_NEEDS,
    BUCKET_BYTES_NEEDS,
    BUCKET_LATENCY_NEEDS,
    CERTIFICATE_NEEDS,
    DELAY_NEEDS,
    ENTROPY_NEEDS,
    FEDERATED_NEEDS,
    FORMAT_NEEDS,
    FRAGMENT_NEEDS,
    GLOBAL_BATCH_NEEDS,
    GLOBAL_VIEW_NEEDS,
    HELD_OUT_NEEDS,
    KEEP_BEST_NEEDS,
    LINK_PROFILE_NEEDS,
    OUTER_NEEDS,
    RECOMPUTE_NEEDS,
    REPLAY_NEEDS,
    SPIKE_NEEDS,
    STRAGGLER_NEEDS,
    STREAMING_NEEDS,
    SYNC_BATCHNORM_NEEDS,
    TLS_NEEDS,
)
from paceline.recipe.recovery import BUDDY_NEEDS
from paceline.recipe.rl_recipe import BATCH_SIZE_NEEDS
from paceline.recipe.validation import (
    BYTES_EXPECTED,
    ExpectedText,
    FieldNeed,
    RecipeTable,
    expected_message,
    parse_bytes,
    value_error,
)

# ---------------------------------------------------------------------- batch, precision


class BatchRecipe(RecipeTable):
    """The global batch: the samples of one update, independent of the number of processes."""

    size: Annotated[int, *GLOBAL_BATCH_NEEDS, *BATCH_SIZE_NEEDS] = Field(
        default=32, ge=1, description="samples per update, over all replicas"
    )
    shards: Annotated[
        int | None,
        *GLOBAL_BATCH_NEEDS,
        FieldNeed(
            lambda table: (table.shards or 0) <= table.size,
            keys=("size",),
            reason="expected at most batch.size = {t.size}, found {t.shards}",
            is_conflict=True,
        ),
    ] = Field(
        default=None,
        ge=1,
        description="micro-batches of a batch, over all ranks; left out: one per rank, 4 per stage of a"
        " pipeline, 8 in all if reproducible",
    )
    accumulation: Annotated[
        int | None,
        *GLOBAL_BATCH_NEEDS,
        FieldNeed(
            lambda table: (table.accumulation or 0) <= table.size,
            keys=("size",),
            reason="expected at most batch.size = {t.size}, found {t.accumulation}",
            is_conflict=True,
        ),
        FieldNeed(
            lambda table: table.shards is None,
            keys=("shards",),
            reason="expected one of both, found accumulation = {t.accumulation} and shards = {t.shards}:"
            " shards are those of all ranks together",
            is_conflict=True,
        ),
    ] = Field(default=None, ge=1, description="micro-batches of each rank, in place of shards")
    reduction: Literal["mean", "sum"] = Field(
        default="mean", description="gradients of the mean over all counted items, or of their sum"
    )
    drop_last: Annotated[bool, *GLOBAL_BATCH_NEEDS] = Field(
        default=False, description="leave out the smaller last batch of an epoch"
    )
    sync_batchnorm: Annotated[bool, *SYNC_BATCHNORM_NEEDS] = Field(
        default=False, description="statistics of BatchNorm over all ranks of a step; one micro-batch a rank"
    )
    shuffle: bool = Field(
        default=True, description="a new keyed order each epoch; false: the order of the data"
    )


_NEEDS_FP16 = FieldNeed(
    lambda table: table.compute == "fp16", 'with compute = "fp16"', 'found "{t.compute}"', keys=("compute",)
)


class PrecisionRecipe(RecipeTable):
    """The number format of forward and backward; parameters and the update stay fp32."""

    compute: Annotated[Literal["auto", "fp32", "bf16", "fp16"], *FORMAT_NEEDS] = Field(
        default="auto", description="format of the activations; auto: bf16 if it is faster on every rank"
    )
    init_scale: Annotated[float, _NEEDS_FP16] = Field(
        default=65536.0, gt=0, description="first factor of the loss"
    )
    growth_steps: Annotated[int, _NEEDS_FP16] = Field(
        default=200, ge=1, description="finite updates before the factor doubles"
    )


# ---------------------------------------------------------------------- data, evaluation, checkpoints


class LoaderRecipe(RecipeTable):
    """The loading of samples; nothing here changes which samples are used, or their order."""

    workers: int = Field(default=0, ge=0, description="loader processes per rank; 0: in the training process")
    prefetch: Annotated[
        int, FieldNeed(lambda table: table.workers, "with workers", "found 0", keys=("workers",))
    ] = Field(default=2, ge=1, description="micro-batches that are loaded ahead of the one in use")
    cache_bytes: int = Field(
        default=0, ge=0, description="bytes of collated micro-batches kept in memory per rank"
    )


class EvaluateRecipe(RecipeTable):
    """The evaluation on held-out samples."""

    every_steps: Annotated[int, *HELD_OUT_NEEDS] = Field(
        default=0, ge=0, description="updates between evaluations; 0: only at the end"
    )
    batch: Annotated[int, *HELD_OUT_NEEDS] = Field(default=64, ge=1, description="samples per forward")
    max_samples: Annotated[int, *HELD_OUT_NEEDS] = Field(
        default=0, ge=0, description="held-out samples that are used; 0: all"
    )
    validation: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of the training samples, chosen by key, that evaluations use in place of the"
        " held-out ones, which are then the set `test` of `paceline evaluate`; left out: none",
    )
    metric: Annotated[str, *BEST_VALUE_NEEDS] = Field(
        default="loss", min_length=1, description="what decides which evaluation is best: loss, or a metric"
    )
    better: Annotated[Literal["lower", "higher"], *BEST_VALUE_NEEDS] = Field(
        default="lower", description="which values of it are better"
    )
    patience: Annotated[
        int,
        FieldNeed(
            lambda table: table.every_steps, "with every_steps", "which is not set", keys=("every_steps",)
        ),
    ] = Field(
        default=0, ge=0, description="evaluations without improvement after which the run ends; 0: never"
    )


class CheckpointRecipe(RecipeTable):
    """When and where state is saved, and how much of it is kept."""

    every_steps: int = Field(default=0, ge=0, description="updates between checkpoints; 0: only at the end")
    every_minutes: float = Field(default=0.0, ge=0, description="minutes between checkpoints; 0: steps count")
    keep: int = Field(default=2, ge=1, description="newest checkpoints that are kept")
    keep_best: Annotated[int, *KEEP_BEST_NEEDS] = Field(
        default=0, ge=0, description="checkpoints with the best evaluate.metric that are kept as well"
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="a path or a URL such as s3://bucket/folder; left out: checkpoints/ in the run folder",
    )
    mode: Literal["background", "blocking"] = Field(
        default="background", description="whether training continues while a checkpoint is written"
    )
    grace_seconds: float = Field(
        default=30.0,
        gt=0,
        description="seconds to save and exit after a request to stop, before processes are killed",
    )
    notice: str | None = Field(
        default=None,
        min_length=1,
        description="a file or http URL that announces the end of the machine: once it exists, the run saves"
        " and stops",
    )
    deadline_seconds: float = Field(default=1800.0, gt=0, description="seconds that one save may take")
    full_disk_seconds: float = Field(
        default=0.0, ge=0, description="seconds that a save waits for space on a full disk; 0: the run stops"
    )


class AverageRecipe(RecipeTable):
    """A moving average of the weights; where there is one, it is evaluated and exported."""

    decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of the average that stays at an update, for example 0.999; left out: no average",
    )


class ServeRecipe(RecipeTable):
    """The shapes of the forwards of generation, on which the bits of a text depend."""

    slots: int = Field(default=8, ge=1, le=4096, description="texts at a time, of each replica")
    chunk: int = Field(default=64, ge=1, description="tokens of a prompt that run at a time")
    attention: Literal["by_slot", "masked"] = Field(
        default="by_slot",
        description="attention slot by slot at its own length, or over the whole cache under a mask",
    )
    context: int | None = Field(
        default=None, ge=2, description="longest text, in tokens; left out: that of the model"
    )

    def changes_from(self, other: ServeRecipe) -> str:
        """Return the settings that differ from those of another table, as text; empty if none does."""
        return ", ".join(
            f"{name} = {getattr(self, name)} in place of {getattr(other, name)}"
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        )


# ---------------------------------------------------------------------- health


_NEEDS_SPIKE_FACTOR = FieldNeed(
    lambda table: table.spike_factor is not None,
    "with spike_factor",
    "which is not set",
    keys=("spike_factor",),
)


def _need_of_answer(answer: str) -> FieldNeed:
    return FieldNeed(
        lambda table: answer in table.answers, f'with "{answer}"', "which is not set", keys=("non_finite",)
    )


class HealthRecipe(RecipeTable):
    """The reaction to a loss or gradient that is not finite, to a jump of the loss, and to a slow rank."""

    non_finite: Annotated[Literal["stop", "skip", "roll-back", "lower-rate"], *GLOBAL_VIEW_NEEDS] = Field(
        default="stop",
        description="at a loss or gradient that is not finite: end, skip the step, go back to the last"
        " checkpoint, or skip the step and lower all rates",
    )
    spike_factor: Annotated[float | None, *SPIKE_NEEDS] = Field(
        default=None,
        gt=1,
        description="a loss this many times the median of the last ones is a spike; left out: no loss is",
    )
    spike_window: Annotated[int, _NEEDS_SPIKE_FACTOR] = Field(
        default=32, ge=2, description="steps with whose median a loss is compared"
    )
    spike: Annotated[Literal["stop", "skip", "roll-back", "lower-rate"], _NEEDS_SPIKE_FACTOR] = Field(
        default="stop",
        description="at a spike: end, skip the step, go back to the last checkpoint, or lower all rates and"
        " take the step",
    )
    max_skips: Annotated[
        int,
        FieldNeed(
            lambda table: "skip" in table.answers or table.non_finite == "lower-rate",
            'with "skip", or with non_finite = "lower-rate"',
            "which is not set",
            keys=("non_finite",),
        ),
    ] = Field(default=10, ge=1, description="steps that may be skipped in a row before the run ends")
    max_roll_backs: Annotated[int, _need_of_answer("roll-back")] = Field(
        default=3, ge=1, description="times that a run may go back before it ends"
    )
    rate_factor: Annotated[float, _need_of_answer("lower-rate")] = Field(
        default=0.5, gt=0, lt=1, description='factor of every rate after a "lower-rate"'
    )
    max_lowerings: Annotated[int, _need_of_answer("lower-rate")] = Field(
        default=10, ge=1, description="times that the rates may be lowered before the run ends"
    )
    straggler_factor: Annotated[float | None, *STRAGGLER_NEEDS] = Field(
        default=None,
        gt=1,
        description="a rank that takes this many times as long as others is reported as slow; left out: none",
    )

    @property
    def answers(self) -> tuple[str, str]:
        """Return the reaction to a value that is not finite, and to a spike."""
        return self.non_finite, self.spike

    @property
    def rolls_back(self) -> bool:
        """Return whether the run may go back to a checkpoint."""
        return "roll-back" in self.answers

    @property
    def lowers_rates(self) -> bool:
        """Return whether the run may lower its rates."""
        return "lower-rate" in self.answers


# ---------------------------------------------------------------------- elastic


class ElasticRecipe(RecipeTable):
    """The reaction to the loss of a process, for example to a signal that kills it."""

    mode: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: replicas continue without a lost process, which is replaced; other layouts and"
        " rules start again from the newest checkpoint (see redundancy). off: the job ends",
    )
    max_restarts: Annotated[
        int,
        FieldNeed(lambda table: table.mode == "auto", 'with mode = "auto"', "found {t.mode}", keys=("mode",)),
    ] = Field(default=3, ge=0, description="processes that may be replaced, and restarts from a checkpoint")
    min_processes: Annotated[
        int,
        FieldNeed(lambda table: table.mode == "auto", 'with mode = "auto"', "found {t.mode}", keys=("mode",)),
    ] = Field(
        default=1, ge=1, description="replicas without which the others do not continue; -n 2:6 sets it to 2"
    )
    redundancy: Annotated[
        Literal["none", "buddy"],
        *BUDDY_NEEDS,
        FieldNeed(lambda table: table.mode == "auto", 'with mode = "auto"', "found {t.mode}", keys=("mode",)),
    ] = Field(
        default="none",
        description="buddy: each rank keeps its neighbour's part of the state in memory, so that the others"
        " continue without a lost one; none: they start again from the newest checkpoint",
    )


# ---------------------------------------------------------------------- memory

_RECOMPUTE_WORDS = ("auto", "none", "blocks", "segments")
_RECOMPUTE_EXPECTED = 'one of auto, none, blocks, segments, or numbers of blocks as "0,1,4"'


def check_recompute(text: str) -> str:
    """Check what is recomputed: a word, or ascending numbers of blocks."""
    numbers = text.split(",")
    if text in _RECOMPUTE_WORDS:
        return text
    if not all(n.isdecimal() for n in numbers) or numbers != sorted(set(numbers), key=int):
        raise value_error(expected_message(_RECOMPUTE_EXPECTED, text, _RECOMPUTE_WORDS))
    return text


class MemoryRecipe(RecipeTable):
    """Recomputation, which saves memory at the price of time, and the memory budget of a rank."""

    recompute: Annotated[
        str, AfterValidator(check_recompute), ExpectedText(_RECOMPUTE_EXPECTED), *RECOMPUTE_NEEDS
    ] = Field(
        default="auto",
        description='what backward recomputes: "none", the inside of "blocks", or of the blocks with numbers'
        ' "0,1,4", or "segments" of about sqrt(blocks) blocks, of which one input is kept: the least memory,'
        ' two more forwards. "auto": what keeps the budget in the least time, and nothing without a budget',
    )
    budget: Annotated[int | None, BeforeValidator(parse_bytes), ExpectedText(BYTES_EXPECTED)] = Field(
        default=None,
        ge=1,
        description='the most memory that a rank may need, as "2GiB": a run that needs more does not start',
    )

    @property
    def chooses(self) -> bool:
        """Return whether it is left open which blocks are recomputed."""
        return self.recompute == "auto" and self.budget is not None

    @property
    def recomputes(self) -> bool:
        """Return whether blocks are recomputed, as far as it is known."""
        return self.recompute not in ("auto", "none")


# ---------------------------------------------------------------------- debug, security, runtime


class DebugRecipe(RecipeTable):
    """Checks that end a run when they find a mistake, and the replay of another run."""

    check: bool = Field(default=True, description="compare a step under tensor, context with one process")
    bytes: bool = Field(
        default=False,
        description="compare the bytes that routes send with their closed forms, in every round",
    )
    races: bool = Field(
        default=False,
        description="find code that touches a tensor between the launch of a collective and its wait",
    )
    entropy_seed: Annotated[int | None, *ENTROPY_NEEDS] = Field(
        default=None,
        description="draw masks, keys and noise from this seed, and not from the entropy of the operating"
        " system; for tests: such a run has no privacy",
    )
    replay_arrivals: Annotated[str | None, *REPLAY_NEEDS] = Field(
        default=None,
        min_length=1,
        description="folder of a run with a server: receive the workers in the order of that run",
    )


class SecurityRecipe(RecipeTable):
    """The encryption. The key of a job is no part of its recipe: `--token-file`, or PACELINE_TOKEN."""

    tls: Annotated[Literal["auto", "on", "off"], *TLS_NEEDS] = Field(
        default="auto",
        description="encrypt what nodes exchange in the store of the job, and the channels of a server; "
        "auto: if there are several nodes",
    )
    certificate: Annotated[str | None, *CERTIFICATE_NEEDS] = Field(
        default=None,
        min_length=1,
        description="folder of `paceline certificate`, the same on every host: processes without it cannot"
        " connect; left out: one is made at the start",
    )


class OuterRecipe(RecipeTable):
    """The outer optimizer: of replicas that train alone between rounds, or of a federated server."""

    name: Annotated[Literal["sgd", "adam", "yogi", "adagrad"], *FEDERATED_NEEDS] = Field(
        default="sgd",
        description="the update rule of a server: sgd is FedAvg, or FedAvgM with momentum; the others are"
        " FedAdam, FedYogi and FedAdagrad",
    )
    lr: Annotated[float, *OUTER_NEEDS] = Field(
        default=0.7,
        gt=0,
        description="share of the mean movement that is applied; federated: 1 by default, adam, yogi and"
        " adagrad 0.01",
    )
    momentum: Annotated[
        float,
        *OUTER_NEEDS,
        FieldNeed(
            lambda table: table.name == "sgd",
            'with name = "sgd"',
            'found "{t.name}", which has betas',
            keys=("name",),
            when=lambda momentum: momentum > 0,
        ),
    ] = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="momentum of the movements: Nesterov's in diloco, heavy-ball and by default 0 in"
        " federated",
    )
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        FieldNeed(
            lambda table: table.name in ("adam", "yogi"),
            'with name = "adam" or "yogi"',
            'found "{t.name}"',
            keys=("name",),
        ),
    ] = Field(default=(0.9, 0.99), strict=False, description="decay of the first and the second moment")
    eps: Annotated[
        float,
        FieldNeed(
            lambda table: table.name != "sgd",
            'with name = "adam", "yogi" or "adagrad"',
            'found "{t.name}"',
            keys=("name",),
        ),
    ] = Field(
        default=1e-3, gt=0, description="the adaptivity tau, which is added to the root of the second moment"
    )
    fragments: Annotated[int, *FRAGMENT_NEEDS] = Field(
        default=1, ge=1, description="parts of the parameters that are averaged in turn"
    )
    delay_steps: Annotated[int, *DELAY_NEEDS] = Field(
        default=0, ge=0, description="steps that run while a part is averaged"
    )
    mixing: Annotated[float, *STREAMING_NEEDS] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of a replica's own value that stays when an average arrives",
    )

    def _fill_defaults(self) -> None:
        # An adaptive optimizer has its own moments, so a momentum that was left out means none.
        if self.name != "sgd" and "momentum" not in self.model_fields_set:
            self.__dict__["momentum"] = 0.0

    def for_rounds(self, *, of_clients: bool) -> OuterRecipe:
        """Return the table with the defaults of a rule in place of keys that are left out."""
        rate = (1.0 if self.name == "sgd" else 0.01) if of_clients else 0.7
        momentum = 0.0 if of_clients or self.name != "sgd" else 0.9
        filled = self.model_copy()
        for key, value in (("lr", rate), ("momentum", momentum)):
            # Not through the fields that are set, so that another rule takes its own defaults.
            if key not in self.model_fields_set:
                filled.__dict__[key] = value
        return filled


STEP_RANGE_EXPECTED = 'the first step and the one after the last, counted from 0, as "10:13"'


def parse_step_range(text: str) -> tuple[int, int]:
    """Return the first step of a range and the one after the last; ValueError if it is none."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise value_error(expected_message(STEP_RANGE_EXPECTED, text, ()))
    return int(first), int(end)


def require_steps_of_run(key: str, text: str, num_steps: int) -> None:
    """Require that the run takes the first step of a range.

    Args:
        key: of the recipe, which names the range.
    Raises:
        RecipeError: the run ends before it.
    """
    if parse_step_range(text)[0] >= num_steps:
        raise RecipeError(
            f'{key} = "{text}": the run has {num_steps} steps, the last is {num_steps - 1}',
            where=key,
            next_step="choose steps that the run takes, counted from 0",
        )


def check_step_range(text: str | None) -> str | None:
    if text is not None:  # a recipe that is built from the values of another one states it
        parse_step_range(text)
    return text


class RuntimeRecipe(RecipeTable):
    """The placement and speed of the processes; the result does not depend on it beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: NVIDIA GPUs if present")
    threads: int = Field(
        default=0, ge=0, description="intra-op threads per process; 0: the cores shared among local processes"
    )
    compile: bool = Field(default=False, description="compile the model with torch.compile")
    profile: Annotated[str | None, AfterValidator(check_step_range), ExpectedText(STEP_RANGE_EXPECTED)] = (
        Field(
            default=None,
            description='steps that torch.profiler records, as "10:13", for `paceline profile`, and into'
            " profile/rank-N.json of the run folder, a Chrome trace per rank; left out: none",
        )
    )
    deadline_seconds: float = Field(default=120.0, gt=0, description="seconds that any wait may take")
    setup_deadline_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="seconds until every rank has started, and until all have built task and session",
    )
    bucket_bytes: Annotated[int, *BUCKET_BYTES_NEEDS] = Field(
        default=16 * 2**20, ge=1, description="bytes of gradients that are sent together"
    )
    bucket_latency: Annotated[float | None, *BUCKET_LATENCY_NEEDS] = Field(
        default=None,
        gt=0,
        lt=1,
        description="largest share of latency in the sum of a bucket; left out: bucket_bytes as it is",
    )
    link_profile: Annotated[str | None, *LINK_PROFILE_NEEDS] = Field(
        default=None,
        min_length=1,
        description="file of `paceline bench link --out`, for route=auto and bucket_latency; left out: links"
        " are measured",
    )
