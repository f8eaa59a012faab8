"""Published mistakes in data-parallel loops: each ends far from Paceline; fixed, it ends at its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from paceline import Loss, Task
from paceline.data import KeyedOrder
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import run_strategy
from tests.known_mistakes import data_and_seeds, gradients, steps
from tests.known_mistakes.loop import NUM_SAMPLES, SIZE, STEPS, End, Loop, Setup, build, loss_of, samples

WORLD, ROUNDING, APART = 2, 2e-6, 2e-3
MISTAKES: Mapping[str, type[Loop]] = {
    name: found
    for module in (gradients, steps, data_and_seeds)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, Loop) and "story" in vars(found)
}


def setup_of(mistake: type[Loop]) -> Setup:
    return vars(mistake).get("setup", Setup())


def ours(cluster: Cluster, setup: Setup) -> End:
    """The same training, by a recipe."""
    torch.set_num_threads(1)
    optimizer = {"name": "sgd", "momentum": 0.9}
    if setup.optimizer == "adamw":
        optimizer = {"name": "adamw", "weight_decay": setup.decay, "decay_on": "all"}
    optimizer |= {"lr": setup.lr} | ({"clip_norm": setup.clip_norm} if setup.clip_norm else {})
    recipe = Recipe(
        task="tokens",
        seed=0,
        steps=STEPS,
        batch={"size": SIZE, "shards": WORLD * setup.micro_batches, "shuffle": setup.shuffle},
        optimizer=optimizer,
        schedule={"decay": "linear"} if setup.falls else {},
        strategy=Strategy(),
    )

    def task() -> Task:
        torch.manual_seed(7)
        return Task(build(setup), samples(), lambda model, batch: Loss(*loss_of(model, batch)))

    ended = run_strategy(cluster, recipe, task)
    return End(ended.losses, ended.parameters)


def order_of(setup: Setup) -> list[list[int]]:
    """Two epochs, as the recipe has them."""
    order = KeyedOrder(NUM_SAMPLES, SIZE, 0, shuffle=setup.shuffle)
    batches = [order.batch(step).tolist() for step in range(STEPS)]
    return [batches[0] + batches[1], batches[2] + batches[3]]


def all_of_them(cluster: Cluster, loops: Mapping[str, tuple[type[Loop], Setup]]) -> dict[str, End]:
    setups = {repr(setup): setup for _, setup in loops.values()}
    found = {name: ours(cluster, setup) for name, setup in setups.items()}
    for name, (loop, setup) in loops.items():
        found[name] = loop(setup, order_of(setup)).train()
    return found


@pytest.fixture(scope="module")
def ends() -> Sequence[dict[str, End]]:
    """By rank and name, where each loop ended; `fixed NAME` is the loop without the mistake."""
    wrong = {name: (loop, setup_of(loop)) for name, loop in MISTAKES.items()}
    fixed = {
        f"fixed {name}": (steps.Wrapped if issubclass(loop, steps.Wrapped) else Loop, setup)
        for name, (loop, setup) in wrong.items()
    }
    return run_ranks(all_of_them, WORLD, wrong | fixed)


@pytest.mark.capability("Z17")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_known_mistake_ends_elsewhere_and_its_mended_twin_where_paceline_does(
    name: str, ends: Sequence[dict[str, End]]
) -> None:
    right = repr(setup_of(MISTAKES[name]))
    for end in ends:
        assert end[f"fixed {name}"].distance(end[right]) <= ROUNDING
    apart = [end[name].distance(end[right]) for end in ends]
    assert max(apart) >= APART, apart


def test_there_are_many() -> None:
    assert len(MISTAKES) >= 25
