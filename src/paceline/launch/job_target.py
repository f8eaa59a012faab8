"""The target of a job that another engine starts: where it runs, what it needs, and its words. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.errors import RecipeError
from paceline.recipe.recipe import Recipe

PORT = 29_500
MARGIN_SECONDS = 30
"""Time after `checkpoint.grace_seconds` in which the processes of a job end."""

HEADER = "# Rendered by `paceline submit`; the same recipe and options give the same file.\n"
SECRET_NAME = re.compile(r"(^|[_.])(token|secret|password|passwd|credential\w*|api_?key)$", re.IGNORECASE)
_MIB = 2**20
_PROCESS_MIB = 700
"""Memory of a process besides its tensors: Python, PyTorch, threads and their buffers."""


@dataclass(frozen=True)
class JobTarget:
    """The engine that starts a job, and the nodes and processes that it gets there.

    Args:
        engine: a key of `RENDERERS`.
        name: name of the job and of its files: lower-case letters, digits and dashes.
        nodes, processes: number of nodes, and of processes on each.
        command: the words that start Paceline on a node.
        recipe_path: the recipe, as nodes find it.
        run_dir: folder of the run, which all nodes share.
        arguments: options of `paceline train`, after those that this module writes.
        options: options of the engine by name; see `OPTIONS`.
        hosts: hosts in order, for mpi and ssh.
        planned_bytes: planned peak of the tensors of a rank; 0: not planned.
    """

    engine: str
    name: str
    nodes: int
    processes: int
    command: tuple[str, ...]
    recipe_path: str
    run_dir: str
    arguments: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    hosts: tuple[str, ...] = ()
    planned_bytes: int = 0

    def option(self, name: str, default: str = "") -> str:
        """Return an option of the engine."""
        return dict(self.options).get(name, default)

    def number(self, name: str, default: float) -> float:
        """Return an option of the engine that is a number.

        Raises:
            RecipeError: it is none.
        """
        text = self.option(name, str(default))
        try:
            return float(text)
        except ValueError as error:
            raise RecipeError(
                f"--option {name}={text}: not a number", next_step=f"--option {name}={default:g}"
            ) from error


@dataclass(frozen=True)
class NodeResources:
    """What a job requests on each node.

    Args:
        cpus: number of cores: one for each thread of each process.
        gpus: number of GPUs: one for each process, if the recipe wants GPUs.
        memory_mib: planned memory with a quarter more, and that of the processes; 0: not planned.
    """

    cpus: int
    gpus: int
    memory_mib: int


def plan_resources(recipe: Recipe, target: JobTarget) -> NodeResources:
    """Return what each node needs for its ranks."""
    of_tensors = math.ceil(1.25 * target.planned_bytes / _MIB)
    return NodeResources(
        cpus=target.processes * max(1, recipe.runtime.threads),
        gpus=target.processes if recipe.runtime.device == "cuda" else 0,
        memory_mib=target.processes * (of_tensors + _PROCESS_MIB) if target.planned_bytes else 0,
    )


def train_words(recipe: Recipe, target: JobTarget, *, recipe_path: str, run_dir: str) -> list[str]:
    """Return the words of `paceline train` that start or continue the run."""
    strategy = str(recipe.strategy)
    words = [*target.command, "train", recipe_path, "--auto-resume", "--set", f"run_dir={run_dir}"]
    return [*words, *(["--strategy", strategy] if strategy else []), *target.arguments]


def yaml_lines(value: Any, indent: int = 0) -> Iterator[str]:
    """Yield the lines of a mapping as YAML; texts are quoted as in JSON, which YAML reads alike."""
    space = "  " * indent
    for name, item in value.items():
        key = f"{space}{json.dumps(name) if '/' in name else name}:"
        match item:
            case {**entries} if entries:
                yield f"{key}\n"
                yield from yaml_lines(item, indent + 1)
            case [{}, *_]:
                yield f"{key}\n"
                for part in item:
                    first, *rest = yaml_lines(part, indent + 2)
                    yield f"{space}  - {first.lstrip()}"
                    yield from rest
            case _:
                yield f"{key} {json.dumps(item)}\n"
