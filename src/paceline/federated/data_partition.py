"""Partitions of the samples of one data set among clients: keyed functions of the labels, without torch.

Invariant: every sample belongs to exactly one client, and the result depends on the arguments only. It does
not depend on the number of processes, and `natural` alone can have a client without samples, which is then
none of the values of its column.

Sources: McMahan et al. 2017, arXiv:1602.05629, section 3 (shards of sorted labels); Hsu et al. 2019,
arXiv:1909.06335, and Li et al. 2022, arXiv:2102.02079, section 4 (Dirichlet shares of each label).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError, format_count
from paceline.recipe.federated_recipe import parse_partition
from paceline.state.keys import key

SampleIndices = NDArray[np.int64]
_MAX_DRAWS = 1000


def partition(
    labels: Sequence[Any] | NDArray[Any],
    how: str,
    clients: int,
    seed: int,
    *,
    on_redraw: Callable[[int], None] = lambda draw: None,
) -> list[SampleIndices]:
    """Divide samples among clients.

    Args:
        labels: one for each sample; of "iid" and "quantity" only their number counts, and of "natural" they
            are the client of each sample.
        how: "iid"; "labels:L": the samples sorted by label are cut into L * clients shards, of which each
            client gets L; "dirichlet:A": the clients' shares of each label are drawn from a Dirichlet
            distribution with concentration A; "quantity:S": sizes are log-normal with sigma S; "natural".
        clients: number of clients; of "natural" the number of different values.
        seed: of the run.
        on_redraw: receives the number of the draw that is tried next, where a Dirichlet draw has left a
            client without samples.
    Returns:
        The indices of each client's samples, int64, ascending; of "natural" by the sorted values.
    Raises:
        DataError: there are more clients than samples or shards, or no draw leaves every client a sample.
        ValueError: `how` is no partition.
    """
    rule, column = parse_partition(how), np.asarray(labels)
    if len(column) < clients:
        raise DataError(
            f"{format_count(len(column), 'sample')} cannot be divided among {clients} clients: some would"
            " have none",
            where="federated.clients",
            next_step=f"set federated.clients to {len(column)} or less",
        )
    parts = _RULES[rule.word](column, rule.number, clients, key(seed, "partition", how), on_redraw)
    return [np.sort(part).astype(np.int64, copy=False) for part in parts]


_Redraw = Callable[[int], None]


def _generator(partition_key: int, *purpose: int | str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key(partition_key, *purpose)))


def _cut(order: SampleIndices, sizes: NDArray[np.int64]) -> list[SampleIndices]:
    return np.split(order, np.cumsum(sizes)[:-1])


def _even_sizes(total: int, parts: int) -> NDArray[np.int64]:
    ends = np.arange(parts + 1, dtype=np.int64) * total // parts
    return np.diff(ends)


def _iid(
    column: NDArray[Any], number: float, clients: int, partition_key: int, on_redraw: _Redraw
) -> list[SampleIndices]:
    order = _generator(partition_key, "order").permutation(len(column))
    return _cut(order, _even_sizes(len(column), clients))


def _by_label(
    column: NDArray[Any], number: float, clients: int, partition_key: int, on_redraw: _Redraw
) -> list[SampleIndices]:
    """Deal shards of the samples sorted by label; samples of one label are in a keyed order."""
    num_shards = int(number) * clients
    if num_shards > len(column):
        raise DataError(
            f"labels:{int(number)} cuts {format_count(len(column), 'sample')} into {num_shards} shards, so"
            " some would be empty",
            where="federated.partition",
            next_step=f"lower federated.clients to {len(column) // int(number)}, or the number of labels",
        )
    shuffled = _generator(partition_key, "order").permutation(len(column))
    by_label = shuffled[np.argsort(column[shuffled], kind="stable")]
    shards = _cut(by_label, _even_sizes(len(column), num_shards))
    dealt = _generator(partition_key, "shards").permutation(num_shards).reshape(clients, int(number))
    return [np.concatenate([shards[shard] for shard in row]) for row in dealt]


def _dirichlet(
    column: NDArray[Any], number: float, clients: int, partition_key: int, on_redraw: _Redraw
) -> list[SampleIndices]:
    """Draw the clients' shares of each label; again with the next key while a client has no sample."""
    _, label_numbers = np.unique(column, return_inverse=True)
    for draw in range(_MAX_DRAWS):
        if draw:
            on_redraw(draw)
        parts = _draw_dirichlet(label_numbers, number, clients, key(partition_key, "draw", draw))
        if all(map(len, parts)):
            return parts
    raise DataError(
        f"{_MAX_DRAWS} draws of dirichlet:{number:g} have each left one of {clients} clients without samples",
        where="federated.partition",
        next_step="use fewer clients, or a larger concentration",
    )


def _draw_dirichlet(
    label_numbers: NDArray[Any], alpha: float, clients: int, draw_key: int
) -> list[SampleIndices]:
    generator, parts = _generator(draw_key), [list[SampleIndices]() for _ in range(clients)]
    for label in range(int(label_numbers.max()) + 1):
        members = np.flatnonzero(label_numbers == label)
        generator.shuffle(members)
        shares = generator.dirichlet(np.full(clients, alpha))
        ends = np.minimum(np.round(np.cumsum(shares) * len(members)), len(members)).astype(np.int64)
        # The last end by hand: shares add up to 1 only up to rounding, and no sample may be left over.
        for part, piece in zip(parts, np.split(members, ends[:-1]), strict=True):
            part.append(piece)
    return [np.concatenate(pieces) for pieces in parts]


def _by_quantity(
    column: NDArray[Any], number: float, clients: int, partition_key: int, on_redraw: _Redraw
) -> list[SampleIndices]:
    """Give every client one sample, and divide the others in proportion to log-normal numbers."""
    weights = np.exp(number * _generator(partition_key, "sizes").standard_normal(clients))
    ends = np.round(np.cumsum(weights) / weights.sum() * (len(column) - clients)).astype(np.int64)
    sizes = 1 + np.diff(ends, prepend=0)
    return _cut(_generator(partition_key, "order").permutation(len(column)), sizes)


def _natural(
    column: NDArray[Any], number: float, clients: int, partition_key: int, on_redraw: _Redraw
) -> list[SampleIndices]:
    values, client_numbers = np.unique(column, return_inverse=True)
    if len(values) != clients:
        raise DataError(
            f"the samples belong to {format_count(len(values), 'client')}, and federated.clients = {clients}",
            where="federated.clients",
            next_step=f"set federated.clients = {len(values)}",
        )
    order = np.argsort(client_numbers, kind="stable")
    return _cut(order, np.bincount(client_numbers, minlength=clients).astype(np.int64))


_RULES: Mapping[str, Callable[..., list[SampleIndices]]] = {
    "iid": _iid,
    "labels": _by_label,
    "dirichlet": _dirichlet,
    "quantity": _by_quantity,
    "natural": _natural,
}
