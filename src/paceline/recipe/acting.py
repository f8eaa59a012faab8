"""When a key of a recipe acts: what else has to be so that it changes anything.

Invariant: a key that is set to something else than its default and cannot act is an error that names what it
needs. Each table says so of its own keys in `needs`, the recipe of what reaches over several tables. What
only the task or the number of processes can tell is said when a session is built (`training.idle`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import BaseModel

from paceline.recipe.problems import Conflict

HELD_OUT = "with held-out data"
_SUMMED = "where several ranks sum gradients"
HERE: Mapping[str, str] = MappingProxyType(
    {
        "batch.sync_batchnorm": "where the model has BatchNorm",
        "evaluate.every_steps": HELD_OUT,
        "evaluate.batch": HELD_OUT,
        "evaluate.max_samples": HELD_OUT,
        "security.tls": "with a server, or where a job has several nodes",
        "tensor": "where the strategy has tensor",
        "strategy.balance": "where several replicas share a batch",
        "strategy.codec": _SUMMED,
        "strategy.route": "where several ranks send each other tensors",
        "runtime.bucket_bytes": _SUMMED,
        "runtime.bucket_latency": "where ranks of several hosts sum gradients",
        "runtime.link_profile": "where ranks of several hosts sum gradients",
    }
)
"""When a key acts, of those that a recipe alone cannot tell."""


class Need(NamedTuple):
    """What a key needs to act.

    Args:
        of: the keys that decide, from the same table on, dotted.
        met: whether a table gives it.
        acts: when it acts, in a few words: "with workers".
        found: what was found instead; `{t}` is the table.
    """

    of: tuple[str, ...]
    met: Callable[[Any], bool]
    acts: str
    found: str

    def conflict(self, name: str, table: BaseModel) -> Conflict:
        """Of the key `name`, which is set and cannot act."""
        return Conflict(
            (name, *self.of), f"expected only {self.acts}, {self.found.format(t=table)}", idle=True
        )


def find_idle(table: Any) -> Iterator[Conflict]:
    """The keys of a table that are set and cannot act."""
    for name, need in table.needs.items():
        if not need.met(table) and value_at(table, name) != default_at(type(table), name):
            yield need.conflict(name, table)


def value_at(table: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        table = getattr(table, part)
    return table


def default_at(model: type[BaseModel], key: str) -> Any:
    """The default of a dotted key."""
    *tables, name = key.split(".")
    for part in tables:
        inside: Any = model.model_fields[part].annotation
        model = inside
    return model.model_fields[name].get_default(call_default_factory=True)


def when_it_acts(model: type[BaseModel], key: str) -> str:
    """When a dotted key acts, in a few words; empty: always."""
    return next((need.acts for name, need in needs_of(model) if name == key), HERE.get(key, ""))


def needs_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Need]]:
    """Every need of a model and of its tables, each by its dotted key."""
    for name, need in getattr(model, "needs", {}).items():
        yield prefix + name, need
    for name, field in model.model_fields.items():
        inside: Any = field.annotation
        if isinstance(inside, type) and issubclass(inside, BaseModel):
            yield from needs_of(inside, f"{prefix}{name}.")
