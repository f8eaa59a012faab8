"""What a run with noise is built from: the ledger of releases, secret draws, and parts of plain training.

In federated rounds the rule adds the noise (`federated/rounds.py`). With `unit = "sample"` the training step
stays as it is, and four of its parts are exchanged: batches are Poisson draws, a runner clips the gradient
of each sample, a step without samples is a step, and the sum is divided by the expected number of samples
after noise was added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.comm.group_collectives import broadcast_text
from paceline.comm.net import Net
from paceline.data.build_feed import run_length
from paceline.data.poisson_batches import PoissonWork
from paceline.data.sample_order import KeyedOrder
from paceline.data.task_data import prepare_data
from paceline.errors import RecipeError, TaskError
from paceline.federated.cohorts import CohortWork, build_order_of_clients
from paceline.job.mesh import Mesh
from paceline.parallel.per_sample_gradients import PerSampleRunner
from paceline.parallel.session_context import Components
from paceline.parallel.sync_batchnorm import batch_norms_of
from paceline.privacy.accountant import NoisyRelease, check_delta
from paceline.privacy.entropy import KNOWN_ENTROPY, Entropy
from paceline.privacy.noise import PrivateDraws
from paceline.privacy.privacy_ledger import PrivacyLedger
from paceline.privacy.private_sum import PrivateSum
from paceline.recipe.recipe import Recipe
from paceline.session.session import Session, share_with_all
from paceline.sync.update import PendingUpdate, UpdatePart
from paceline.task import Task

LEDGER_KEY = "privacy"
_WITHOUT_NOISE = ("training losses and metrics of each round", "numbers of samples of each round")
_ASSUMPTIONS = (
    "the server, or the ranks of the job, are trusted: they see what has no noise yet, and who takes part",
    "the noise is rounded to a grid, and accounted as if it were not",
)
_OF_CLIENTS = "clients that are late or lost are accounted as if they had taken part"


def plan_release(recipe: Recipe, num_units: int) -> tuple[NoisyRelease, float]:
    """Return what a round of a recipe releases, and the units of its sum on average; pure.

    Args:
        num_units: clients or samples of the run.
    Raises:
        RecipeError: there are fewer units than a sum should have.
    """
    noise, size = recipe.private.noise, float(recipe.batch.size)
    if recipe.strategy.sync_spec.trains_clients:
        cohort = recipe.federated.cohort_size
        if not cohort.rate:
            size = float(min(cohort.number, num_units))
            if size == num_units:
                return NoisyRelease(noise, "all"), size
            return NoisyRelease(noise, "fixed", size=int(size), num_units=num_units), size
        size = cohort.rate * num_units
    if size > num_units:
        raise RecipeError(
            f"Poisson batches of {size:g} samples on average need as many, and there are {num_units}",
            where="batch.size",
            next_step=f"set batch.size to at most {num_units}",
        )
    if size == num_units:
        return NoisyRelease(noise, "all"), size
    return NoisyRelease(noise, "poisson", rate=size / num_units), size


class PrivacyPlan(NamedTuple):
    """What a run will release.

    Args:
        release: of a round, with the noise of the recipe.
        num_rounds: of the run.
        num_units: clients or samples.
        unit: "client" or "sample".
    """

    release: NoisyRelease
    num_rounds: int
    num_units: int
    unit: str


def plan_run(recipe: Recipe, build_task: Callable[[], Task]) -> PrivacyPlan:
    """Return what a run of a recipe releases, also of one that has no noise yet.

    Args:
        build_task: called only if samples must be counted.
    """
    if recipe.strategy.sync_spec.trains_clients:
        num_units, rounds = _num_clients(recipe), recipe.steps
        if rounds is None:
            work = CohortWork(build_order_of_clients(recipe, prepare_data(build_task(), recipe)))
            rounds = run_length(recipe, work.steps_per_epoch)
        return PrivacyPlan(plan_release(recipe, num_units)[0], rounds, num_units, "client")
    num_units = len(prepare_data(build_task(), recipe).data)
    rounds = run_length(recipe, -(-num_units // recipe.batch.size))
    return PrivacyPlan(plan_release(recipe, num_units)[0], rounds, num_units, "sample")


def _num_clients(recipe: Recipe) -> int:
    # How many clients of a network will connect is not known, and a divisor must not depend on it.
    clients = recipe.federated.clients
    return clients if isinstance(clients, int) else recipe.federated.at_least


def build_private_sum(
    recipe: Recipe,
    task: Task,
    mesh: Mesh,
    net: Net,
    device: torch.device,
    warn: Callable[[str], None],
) -> PrivateSum | None:
    """Return the noise of the sums of a run; None if it has none; collective.

    Raises:
        MissingExtraError: dp-accounting is not installed.
        TaskError: the model has BatchNorm, the task orders its samples, or it keeps something of clients.
        RecipeError: there are fewer samples than a batch should have.
    """
    private = recipe.private
    if not private.is_on:
        return None
    _refuse_task(recipe, task)
    num_units = _num_clients(recipe) if private.unit == "client" else len(task.data)
    release, expected = plan_release(recipe, num_units)
    if warning := check_delta(private.delta, num_units):
        warn(warning)
    entropy = Entropy(recipe.debug.entropy_seed)
    if entropy.is_known:
        warn(f"warning: {KNOWN_ENTROPY} (debug.entropy_seed)")
    ledger = PrivacyLedger(
        delta=private.delta,
        budget=private.budget,
        unit=private.unit,
        clip_norm=private.clip_norm,
        without_noise=_WITHOUT_NOISE,
        assumptions=(*_ASSUMPTIONS, *([_OF_CLIENTS] if private.unit == "client" else [])),
        warning=KNOWN_ENTROPY if entropy.is_known else "",
    )
    # In memory only, on every rank: a resumed run takes another one.
    secret = broadcast_text(entropy.of("privacy").bytes(32).hex(), mesh.world, net, device)
    draws = PrivateDraws(bytes.fromhex(secret))
    return PrivateSum(ledger, draws, clip_norm=private.clip_norm, release=release, expected=expected)


def _refuse_task(recipe: Recipe, task: Task) -> None:
    norms = batch_norms_of(task.model)
    if norms:
        raise TaskError(
            f"the model has {type(norms[0]).__name__}, whose statistics mix samples and would be released"
            " without noise",
            where="private.noise",
            next_step="replace it by nn.GroupNorm",
        )
    if task.keeper is not None:
        raise TaskError(
            "what a keeper keeps of clients (Task(keeper=...)) would be released without noise",
            where="private.noise",
            next_step="leave out the keeper",
        )
    if recipe.private.unit == "sample" and (task.order is not None or task.sampler is not None):
        raise TaskError(
            'unit = "sample" draws batches by chance, and the task orders its samples itself',
            where="private.unit",
            next_step="give the task map-style data without a sampler",
        )


# -- plain training


def with_private_samples(components: Components, private: PrivateSum) -> Components:
    """Return the constructors of a session whose training step protects samples."""
    whole: Any = partial(PerSampleRunner, clip_norm=private.clip_norm)
    return replace(
        components,
        work=_poisson_work(private),
        whole=whole,
        update=lambda parts: _private_parts(components.update(parts), private),
    )


def _poisson_work(private: PrivateSum) -> Any:
    def build(order: KeyedOrder, shards: int, seed: int, rank: int, num_ranks: int) -> PoissonWork:
        max_samples = -(-order.size // shards)
        return PoissonWork(private.draws, order.num_samples, order.size, max_samples, seed, rank, num_ranks)

    return build


def _private_parts(parts: Mapping[str, UpdatePart], private: PrivateSum) -> dict[str, UpdatePart]:
    """Return the parts of an update with noise: a step without samples is a step too, and is released."""
    changed = {name: part for name, part in parts.items() if name != "empty"}
    changed["divide"] = partial(add_noise_and_divide, private)
    return changed


def add_noise_and_divide(private: PrivateSum, record: PendingUpdate) -> None:
    """Add noise to the summed gradients, and divide by the expected number of samples: an update part."""
    grads = record.grads
    tensors = [grad for grad in grads.tensors.values() if grad is not None]
    private.add_noise(tensors, record.state.step, grads.scale)
    norms = torch._foreach_norm([*grads.flats]) if grads.norms else ()
    record.grads = replace(grads, norms=norms)
    record.divisor = grads.scale * private.expected
    record.multiplier = 1.0 / record.divisor


# -- the run folder


def open_ledger(session: Session, folder: Path) -> None:
    """Continue the list of releases in a run folder, equal on all ranks; collective."""
    private = session.private
    if private is None:
        return
    text = private.ledger.open(folder) if session.is_first else ""
    private.ledger.merge(share_with_all(session, text))
    session.session_base.layout.exit_callbacks.append(private.ledger.close)
