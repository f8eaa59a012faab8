"""The table `[federated]`: the clients of a run, who takes part in a round, and their local training.

The words of a partition and the forms of a cohort are parsed here, for the validation of a recipe and for the
code that divides data and draws cohorts (`paceline.federated`). Plain values without torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from paceline.recipe.constraints import FEDERATED_NEEDS
from paceline.recipe.log_recipe import check_address
from paceline.recipe.validation import (
    ExpectedText,
    FieldNeed,
    RecipeTable,
    expected_message,
    value_error,
)


class PartitionRule(NamedTuple):
    """How samples are divided among clients: a word, and its number if it has one."""

    word: str
    number: float


PARTITION_EXPECTED = (
    '"iid", "labels:L" with at most L label shards per client, "dirichlet:A" with A > 0, "quantity:S" with'
    ' S >= 0, or "natural"'
)
_WORDS_WITHOUT_NUMBER = ("iid", "natural")
_SMALLEST = {"labels": 1.0, "dirichlet": math.nextafter(0.0, 1.0), "quantity": 0.0}


def parse_partition(text: str) -> PartitionRule:
    """Parse the text of a partition, such as "dirichlet:0.3"; ValueError if it is none."""
    word, colon, number = text.partition(":")
    if word in _WORDS_WITHOUT_NUMBER and not colon:
        return PartitionRule(word, 0.0)
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    is_allowed = word in _SMALLEST and _SMALLEST[word] <= value < math.inf
    if not is_allowed or (word == "labels" and not value.is_integer()):
        raise value_error(expected_message(PARTITION_EXPECTED, text, (*_WORDS_WITHOUT_NUMBER, *_SMALLEST)))
    return PartitionRule(word, value)


def _check_partition(text: str) -> str:
    parse_partition(text)
    return text


_COHORT_EXPECTED = 'a number of clients >= 1, a fraction of them as 0.1, or "poisson:0.1"'
_POISSON = "poisson"


class CohortSize(NamedTuple):
    """The size of a cohort.

    Args:
        number: of clients; 0 if each client takes part by chance.
        rate: the probability with which each client takes part; 0 if the number is fixed.
    """

    number: int
    rate: float


def parse_cohort(value: int | float | str, clients: int) -> CohortSize:
    """Return the size of a cohort of some clients; ValueError if the value is none."""
    word, _, text = value.partition(":") if isinstance(value, str) else ("", "", "")
    try:
        rate = float(text) if word == _POISSON else float(value)
    except ValueError:
        rate = math.nan
    is_number = type(value) is int and value >= 1
    if isinstance(value, bool) or not (is_number or 0.0 < rate <= 1.0):
        raise value_error(expected_message(_COHORT_EXPECTED, value))
    if word == _POISSON:
        return CohortSize(0, rate)
    return CohortSize(int(value) if is_number else round(rate * clients), 0.0)


def _check_cohort(value: Any) -> Any:
    if not isinstance(value, int | float | str):
        raise value_error(expected_message(_COHORT_EXPECTED, value))
    parse_cohort(value, 1)
    return value


_CLIENTS_EXPECTED = 'a number of clients >= 1, or "network"'


def _check_clients(value: Any) -> Any:
    if value != NETWORK_CLIENTS and (type(value) is not int or value < 1):
        raise value_error(expected_message(_CLIENTS_EXPECTED, value, (NETWORK_CLIENTS,)))
    return value


NETWORK_CLIENTS = "network"
"""The value of `federated.clients` with which clients connect over a network."""
MAX_NETWORK_COHORT = 256
"""Largest cohort of clients of a network that is drawn with a probability."""


def _network_need(only: str, reason: str) -> FieldNeed:
    return FieldNeed(
        lambda table: table.is_networked,
        only,
        reason=f"expected only {only}: {reason}",
        keys=("clients",),
    )


NETWORK_NEEDS = (
    _network_need('with clients = "network"', "simulated clients are cut from the data of the job"),
    *FEDERATED_NEEDS,
)
DEADLINE_NEEDS = (
    _network_need('with clients = "network"', "simulated clients take turns on a rank, so none is late"),
    FieldNeed(
        lambda table: not table.buffer,
        "without buffer",
        "with which a round waits for no particular client",
        keys=("buffer",),
    ),
    *FEDERATED_NEEDS,
)
BUFFER_NEEDS = (
    _network_need('with clients = "network"', "simulated clients take turns, so none runs ahead"),
    *FEDERATED_NEEDS,
)
SIMULATED_NEEDS = (
    *FEDERATED_NEEDS,
    FieldNeed(
        lambda table: not table.is_networked,
        'without clients = "network"',
        "whose clients bring their own data",
        keys=("clients",),
    ),
)
CLIENTS_NEEDS = (
    *FEDERATED_NEEDS,
    FieldNeed(
        lambda recipe: recipe.strategy.channel_spec.uses_certificate,
        keys=("strategy.channel",),
        scope="recipe",
        when=lambda clients: clients == NETWORK_CLIENTS,
        reason='expected channel=grpc with clients = "network", found channel={t.strategy.channel}',
        is_conflict=True,
        next_step="add channel=grpc to the strategy",
    ),
    FieldNeed(
        lambda recipe: recipe.steps is not None,
        keys=("steps",),
        scope="recipe",
        when=lambda clients: clients == NETWORK_CLIENTS,
        reason='expected steps in place of epochs with clients = "network": nobody knows all samples',
        is_conflict=True,
        next_step="set steps to the number of rounds",
    ),
    FieldNeed(
        lambda recipe: not recipe.schedule.follows_evaluations,
        keys=("schedule.decay",),
        scope="recipe",
        when=lambda clients: clients == NETWORK_CLIENTS,
        reason='expected another schedule.decay than "plateau" with clients = "network": clients see no'
        " evaluation",
        is_conflict=True,
    ),
    FieldNeed(
        lambda recipe: (
            not recipe.strategy.sync_spec.trains_clients or not recipe.strategy.channel_spec.uses_certificate
        ),
        keys=("strategy.channel",),
        scope="recipe",
        when=lambda clients: clients != NETWORK_CLIENTS,
        reason="expected no channel={t.strategy.channel} with simulated clients, which send no messages",
        is_conflict=True,
        next_step='leave out channel, or set federated.clients = "network"',
    ),
)


def _why_codes_are_not_added(recipe: Any) -> str:
    """Return why the encoded parts of clients have no sum."""
    specs = [word.spec for word in recipe.strategy.codec_words]
    if any(spec.sparsifies for spec in specs):
        why = "each client keeps other values"
    elif all(spec.exact for spec in specs):
        why = "compressed bytes have no sum"
    else:
        why = "codes have a scale or a basis of each client"
    return (
        f"expected codec=fp32 with a secure sum, found codec={recipe.strategy.codec}: {why}, so what clients"
        " encode cannot be added under masks"
    )


SECURE_NEEDS = (
    *FEDERATED_NEEDS,
    FieldNeed(
        lambda recipe: not recipe.strategy.is_coded,
        keys=("strategy.codec",),
        scope="recipe",
        reason=_why_codes_are_not_added,
        is_conflict=True,
        next_step="leave out codec, and set federated.ring = 32 to halve the bytes",
    ),
    FieldNeed(
        lambda table: not table.is_networked or table.secure == "masks",
        keys=("clients",),
        reason='expected secure = "masks" or "none" with clients = "network", found "{t.secure}": a sum'
        " without masks is there to compare those of simulated clients",
        is_conflict=True,
        next_step='set federated.secure = "masks"',
    ),
    FieldNeed(
        lambda table: not table.buffer,
        keys=("buffer",),
        reason="expected no buffer with a secure sum: updates of several rounds have no masks in common",
        is_conflict=True,
        next_step="leave out federated.buffer",
    ),
)


def _secure_need(met: Any, only: str) -> FieldNeed:
    return FieldNeed(met, only, 'found secure = "{t.secure}"', keys=("secure",))


RING_NEEDS = (
    _secure_need(lambda table: table.secure != "none", 'with secure = "masks" or "ring"'),
    *FEDERATED_NEEDS,
)
MASK_NEEDS = (_secure_need(lambda table: table.secure == "masks", 'with secure = "masks"'), *FEDERATED_NEEDS)


def _check_neighbours(value: int) -> int:
    if value % 2:
        raise value_error(expected_message(_NEIGHBOURS_EXPECTED, value))
    return value


_NEIGHBOURS_EXPECTED = "an even number >= 2, or 0 for all clients"


class FederatedRecipe(RecipeTable):
    """The clients of sync=federated:E, and what each of them does in a round."""

    clients: Annotated[
        int | str, BeforeValidator(_check_clients), ExpectedText(_CLIENTS_EXPECTED), *CLIENTS_NEEDS
    ] = Field(
        default=100,
        description='clients among which the data is divided; with "natural" those of the task; "network":'
        " those that `paceline client` connects, each with data of its own",
    )
    partition: Annotated[
        str, AfterValidator(_check_partition), ExpectedText(PARTITION_EXPECTED), *SIMULATED_NEEDS
    ] = Field(
        default="iid",
        description="how samples are divided among clients: iid; labels:L (L shards of the samples sorted by"
        " label); dirichlet:A (label shares drawn with concentration A); quantity:S (sizes with log-normal"
        " sigma S); natural (Task(clients=...))",
    )
    cohort: Annotated[
        int | float | str,
        BeforeValidator(_check_cohort),
        ExpectedText(_COHORT_EXPECTED),
        *FEDERATED_NEEDS,
        FieldNeed(
            lambda table: table.is_networked or table.num_positions >= 1,
            keys=("clients",),
            reason="expected a cohort of one client or more, found {t.cohort} of clients = {t.clients}, which"
            " rounds to 0",
            when=lambda cohort: True,
            is_conflict=True,
            next_step="set federated.cohort to a number of clients, or to a larger fraction",
        ),
        FieldNeed(
            lambda table: (
                not table.is_networked
                or type(table.cohort) is int
                or (table.cohort_size.rate > 0 and not table.buffer)
            ),
            keys=("clients",),
            reason='expected a number of clients or, without buffer, "poisson:Q" with clients = "network",'
            " found {t.cohort}: nobody knows how many will connect",
            is_conflict=True,
            next_step="set federated.cohort to the most clients that a round may have",
        ),
        FieldNeed(
            lambda table: table.is_networked or table.num_positions <= table.clients,
            keys=("clients",),
            reason="expected at most federated.clients = {t.clients}, found {t.cohort}: a client takes part"
            " once in a round",
            when=lambda cohort: True,
            is_conflict=True,
            next_step="set federated.cohort to at most {t.clients}, or raise federated.clients",
        ),
    ] = Field(
        default=10,
        description='clients of a round: a number, a fraction as 0.1, or each by chance: "poisson:0.1"; of a'
        " network at most so many, and all if fewer have connected",
    )
    batch: Annotated[
        int,
        *FEDERATED_NEEDS,
        FieldNeed(
            lambda table: not table.full, "without full", "with which a step uses all samples", keys=("full",)
        ),
    ] = Field(default=10, ge=1, description="samples of a local step")
    local_steps: Annotated[int, *FEDERATED_NEEDS] = Field(
        default=0, ge=0, description="steps of each client in a round; 0: E passes over its samples"
    )
    full: Annotated[bool, *FEDERATED_NEEDS] = Field(
        default=False, description="a local step uses all samples of the client"
    )
    weights: Annotated[Literal["samples", "equal"], *FEDERATED_NEEDS] = Field(
        default="samples", description="weight of a client in the mean: its samples, or the same for all"
    )
    proximal: Annotated[float, *FEDERATED_NEEDS] = Field(
        default=0.0,
        ge=0,
        description="mu of FedProx: mu (weights - weights at the start of the round) is added to gradients",
    )
    clip_norm: Annotated[float, *FEDERATED_NEEDS] = Field(
        default=0.0, ge=0, description="largest norm of the whole update of a client; 0: no clip"
    )

    at_least: Annotated[int, *NETWORK_NEEDS] = Field(
        default=1, ge=1, description="clients that must be connected for a round to begin"
    )
    listen: Annotated[str, AfterValidator(check_address), *NETWORK_NEEDS] = Field(
        default="127.0.0.1:0", description='"HOST:PORT" at which clients connect; port 0: any'
    )
    deadline_seconds: Annotated[float, *DEADLINE_NEEDS] = Field(
        default=0.0,
        ge=0,
        description="time after which a round leaves out the clients that have not returned; 0: it waits",
    )
    buffer: Annotated[int, *BUFFER_NEEDS] = Field(
        default=0,
        ge=0,
        description="updates that are applied as one when so many have arrived, of whatever round; 0: rounds",
    )
    age: Annotated[
        int,
        FieldNeed(lambda table: table.buffer > 0, "with buffer", "which is 0", keys=("buffer",)),
        *FEDERATED_NEEDS,
    ] = Field(
        default=4,
        ge=0,
        description="largest number of rounds by which an update in the buffer may be late; older ones are"
        " dropped",
    )

    @property
    def is_networked(self) -> bool:
        """Return whether clients connect over a network, with data of their own."""
        return self.clients == NETWORK_CLIENTS

    held_out: Annotated[float, *SIMULATED_NEEDS] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the samples of each client that it keeps from training; evaluations then report"
        " `clients.` metrics on them",
    )
    vectorize: Annotated[int, *SIMULATED_NEEDS] = Field(
        default=0,
        ge=0,
        description="clients that train as one batched computation (torch.func), with plain SGD; 0: one"
        " after another",
    )

    secure: Annotated[Literal["none", "ring", "masks"], *SECURE_NEEDS] = Field(
        default="none",
        description="what the server receives: each update; masks: only their sum (secure aggregation); ring:"
        " each update, added as the same fixed-point numbers, to compare with masks",
    )
    threshold: Annotated[float, *MASK_NEEDS] = Field(
        default=0.67,
        gt=0.5,
        le=1,
        description="share of the clients that hold a secret which must stay until the end of the round",
    )
    neighbours: Annotated[
        int, AfterValidator(_check_neighbours), ExpectedText(_NEIGHBOURS_EXPECTED), *MASK_NEEDS
    ] = Field(
        default=0,
        ge=0,
        description="clients with which each one shares masks and secrets; 0: all of the cohort",
    )
    ring: Annotated[Literal[64, 32], *RING_NEEDS] = Field(
        default=64, description="bits of a fixed-point number in the sum"
    )
    fraction_bits: Annotated[int, *RING_NEEDS] = Field(
        default=32, ge=8, le=48, description="bits of it behind the binary point"
    )
    largest: Annotated[float, *RING_NEEDS] = Field(
        default=8.0,
        gt=0,
        description="largest magnitude of a value of an update, before it is weighted; a larger one ends the"
        " run",
    )

    @property
    def cohort_size(self) -> CohortSize:
        """Return the size of a cohort; of a network the largest."""
        return parse_cohort(self.cohort, self.clients if isinstance(self.clients, int) else 0)

    @property
    def num_positions(self) -> int:
        """Return the number of positions of a cohort: under "poisson" one for each client, and of a buffer
        one for each update.
        """
        if self.buffer:
            return self.buffer
        if self.cohort_size.rate:
            return int(self.clients) if isinstance(self.clients, int) else MAX_NETWORK_COHORT
        return self.cohort_size.number

    @property
    def num_groups(self) -> int:
        """Return the number of groups of positions; the clients of a group run on one rank."""
        return -(-self.num_positions // max(1, self.vectorize))

    def block(self, groups: range) -> range:
        """Return the positions of some groups."""
        size = max(1, self.vectorize)
        return range(
            min(groups.start * size, self.num_positions), min(groups.stop * size, self.num_positions)
        )

    @property
    def partition_rule(self) -> PartitionRule:
        """Return the partition, parsed."""
        return parse_partition(self.partition)
