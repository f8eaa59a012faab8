"""The table `[federated]`: the clients of a run, who takes part in a round, and their local training.

The words of a partition and the forms of a cohort are parsed here, for the validation of a recipe and for the
code that divides data and draws cohorts (`paceline.federated`). Plain values without torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from paceline.recipe.constraints import FEDERATED_NEEDS
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


class FederatedRecipe(RecipeTable):
    """The clients of sync=federated:E, and what each of them does in a round."""

    clients: Annotated[int, *FEDERATED_NEEDS] = Field(
        default=100,
        ge=1,
        description='clients among which the data is divided; with "natural" those of the task',
    )
    partition: Annotated[
        str, AfterValidator(_check_partition), ExpectedText(PARTITION_EXPECTED), *FEDERATED_NEEDS
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
            lambda table: table.num_positions >= 1,
            keys=("clients",),
            reason="expected a cohort of one client or more, found {t.cohort} of clients = {t.clients}, which"
            " rounds to 0",
            when=lambda cohort: True,
            is_conflict=True,
            next_step="set federated.cohort to a number of clients, or to a larger fraction",
        ),
        FieldNeed(
            lambda table: table.num_positions <= table.clients,
            keys=("clients",),
            reason="expected at most federated.clients = {t.clients}, found {t.cohort}: a client takes part"
            " once in a round",
            when=lambda cohort: True,
            is_conflict=True,
            next_step="set federated.cohort to at most {t.clients}, or raise federated.clients",
        ),
    ] = Field(
        default=10,
        description='clients of a round: a number, a fraction as 0.1, or each by chance: "poisson:0.1"',
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

    held_out: Annotated[float, *FEDERATED_NEEDS] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the samples of each client that it keeps from training; evaluations then report"
        " `clients.` metrics on them",
    )
    vectorize: Annotated[int, *FEDERATED_NEEDS] = Field(
        default=0,
        ge=0,
        description="clients that train as one batched computation (torch.func), with plain SGD; 0: one"
        " after another",
    )

    @property
    def cohort_size(self) -> CohortSize:
        """Return the size of a cohort."""
        return parse_cohort(self.cohort, self.clients)

    @property
    def num_positions(self) -> int:
        """Return the number of positions of a cohort: under "poisson" one for each client."""
        return self.cohort_size.number if not self.cohort_size.rate else self.clients

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
