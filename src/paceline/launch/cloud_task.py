"""Task files of SkyPilot for machines of clouds, and what they cost by the user's own price file. Pure.

SkyPilot chooses and starts the machines; each node runs `paceline train` with its rank from SkyPilot's
variables. Invariants: the key of the job is a secret that only `sky` gets, and the run is in a bucket, so
that a job on spot machines continues elsewhere. It knows no prices.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import RecipeError, format_count
from paceline.launch.job_target import (
    HEADER,
    PORT,
    JobTarget,
    NodeResources,
    plan_resources,
    train_words,
    yaml_lines,
)
from paceline.recipe.recipe import Recipe

_EXPECTED = '[[machine]] name = "m-4", cpus = 4, memory_gib = 16, gpus = 0, hour = 0.20, spot = 0.07'


def render_sky(recipe: Recipe, target: JobTarget) -> dict[str, str]:
    """Return the task file of a job."""
    need = plan_resources(recipe, target)
    if need.gpus and not target.option("gpu"):
        raise RecipeError(
            'runtime.device = "cuda" needs the name of a GPU', next_step="--option gpu=A100 (`sky gpus list`)"
        )
    bucket = target.option("bucket")
    if not bucket:
        raise RecipeError(
            "machines of a cloud share no disk, and a run needs a place that outlives them",
            next_step="--option bucket=NAME: a bucket that SkyPilot creates or has, mounted at /runs",
        )
    resources: dict[str, Any] = {"cpus": f"{need.cpus}+"}
    if need.memory_mib:
        resources["memory"] = f"{-(-need.memory_mib // 1024)}+"
    if need.gpus:
        resources["accelerators"] = f"{target.option('gpu')}:{need.gpus}"
    if target.option("infra"):
        resources["infra"] = target.option("infra")
    if is_spot(target):
        resources |= {"use_spot": True, "job_recovery": {"max_restarts_on_errors": 3}}
    words = train_words(recipe, target, recipe_path=target.recipe_path, run_dir=f"/runs/{target.name}")
    run = " ".join(map(shlex.quote, [*words, "-n", str(target.processes)]))
    if target.nodes > 1:
        run += (
            ' --nodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK"'
            f' --rendezvous "$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"'
        )
    task = {
        "name": target.name,
        "num_nodes": target.nodes,
        "resources": resources,
        "workdir": target.option("workdir", "."),
        "file_mounts": {"/runs": {"name": bucket, "mode": "MOUNT"}},
        # the value is given to `sky`, by which it reaches the machines; it is in no file
        "secrets": {"PACELINE_TOKEN": None},
        "setup": target.option("setup", "pip install paceline"),
        "run": run,
    }
    return {f"{target.name}.yaml": HEADER + "".join(yaml_lines(task))}


def is_spot(target: JobTarget) -> bool:
    """Return whether a job asks for machines that can be taken away."""
    return target.option("spot", "no") in ("yes", "true", "1", "")


@dataclass(frozen=True)
class CloudMachine:
    """A machine in the user's price file.

    Args:
        name: as its cloud calls it.
        cpus, memory_gib, gpus: of one machine.
        hour: price of an hour, in the user's currency.
        spot: price of an hour if it can be taken away; 0: it is not sold so.
        gpu: name of its GPUs.
    """

    name: str
    cpus: int
    memory_gib: float
    hour: float
    gpus: int = 0
    spot: float = 0.0
    gpu: str = ""

    def fits(self, need: NodeResources, gpu: str) -> bool:
        """Return whether a node of a job fits on it."""
        has_gpus = self.gpus >= need.gpus and (not need.gpus or not self.gpu or self.gpu == gpu)
        return self.cpus >= need.cpus and self.memory_gib * 1024 >= need.memory_mib and has_gpus


def read_machines(text: str, where: str) -> list[CloudMachine]:
    """Return the machines of a price file, which is TOML.

    Raises:
        RecipeError: it is not a price file; names the machine and the key.
    """
    try:
        table = tomllib.loads(text)["machine"]
        known = {field.name for field in fields(CloudMachine)}
        for machine in table:
            unknown = machine.keys() - known
            if unknown:
                raise TypeError(f"{machine.get('name', 'a machine')} has the unknown key {min(unknown)!r}")
        return [CloudMachine(**machine) for machine in table]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(f"this is no price file: {error}", where=where, next_step=_EXPECTED) from error


def describe_cost(machines: Sequence[CloudMachine], need: NodeResources, target: JobTarget) -> str:
    """Return a line with the cheapest machine of a price file on which a node fits, and the hourly cost.

    Raises:
        RecipeError: none is large enough, or none of those is sold as a spot machine.
    """
    spot, gpu = is_spot(target), target.option("gpu")
    priced = [machine for machine in machines if machine.fits(need, gpu) and (machine.spot or not spot)]
    if not priced:
        wanted = (
            f"{format_count(need.cpus, 'core')}, {need.memory_mib:,} MiB, {format_count(need.gpus, 'GPU')}"
        )
        raise RecipeError(
            f"no {'spot ' * spot}machine of the price file has {wanted}",
            where="--prices",
            next_step="add one, or ask for less on each node: fewer processes (-n)",
        )
    cheapest = min(priced, key=lambda machine: machine.spot if spot else machine.hour)
    hour = cheapest.spot if spot else cheapest.hour
    return (
        f"{target.nodes} x {cheapest.name}{' (spot)' * spot}: {target.nodes * hour:.4g} an hour"
        f" ({hour:.4g} each), by the price file"
    )
