"""Find a task by name, file or module, build it, and check what it returned.

Invariant: the same spec, options and seed give the same weights and data on every rank: `build` runs under
a random state of its own, seeded with key(seed, "build"), and leaves the caller's state as it was. Errors
of the user's code pass through with their traceback; errors of the contract are `TaskError`s.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from paceline.data.sample_reader import seeded_generators
from paceline.errors import TaskError
from paceline.recipe.toml_text import closest_word
from paceline.state.keys import key
from paceline.task import Task, held_out_sets, require_samples

BuildFunction = Callable[..., Any]

SHIPPED: Mapping[str, str] = {
    "byte-gpt": "paceline.tasks.byte_gpt:build",
    "digits": "paceline.tasks.digits:build",
    "rl": "paceline.rl.rl_task:build",
    "sum": "paceline.tasks.sum:build",
}


def load_task(
    spec: str,
    options: Mapping[str, Any],
    seed: int,
    base_dir: str | Path,
    cache_dir: str | Path,
    recipe: Any = None,
) -> Task:
    """Build the task that a recipe names.

    Args:
        spec: a shipped name, "file.py:function" or "package.module:function".
        options: keyword arguments of the function. Parameters named `seed`, `base_dir`, `cache_dir` and
            `recipe` are also filled in.
        seed: the seed of the run.
        base_dir: folder of the recipe, to which paths and modules are relative.
        cache_dir: folder for prepared data, such as tokenised text.
        recipe: of the run; None: a function that takes it cannot be called.
    Returns:
        The task; a returned tuple (model, data, loss) is converted.
    Raises:
        TaskError: there is no such function, the options do not fit, or it returned no task.
    """
    build = find_build(spec, Path(base_dir).resolve())
    return run_build(build, spec, options, seed, base_dir, cache_dir, recipe)


def run_build(
    build: BuildFunction,
    spec: str,
    options: Mapping[str, Any],
    seed: int,
    base_dir: str | Path,
    cache_dir: str | Path,
    recipe: Any = None,
) -> Task:
    """Call a build function with seeded generators, and check its result; arguments as in `load_task`.

    Random numbers of torch, `random` and `numpy.random` follow from the seed, so all ranks draw the same.
    """
    run_values = {"seed": seed, "base_dir": Path(base_dir).resolve(), "cache_dir": Path(cache_dir)}
    if recipe is not None:
        run_values["recipe"] = recipe
    arguments = fit_arguments(build, spec, options, run_values)
    with seeded_generators(key(seed, "build"), np.random.MT19937()):
        torch.manual_seed(key(seed, "build"))  # also seeds the generators of other devices
        built = build(**arguments)
    return check_task(built, spec)


def load_samples(
    spec: str, options: Mapping[str, Any], seed: int, base_dir: str | Path, cache_dir: str | Path
) -> Any:
    """Load samples from a function; arguments and errors as in `load_task`.

    Returns:
        Samples, or several sets of them by name.
    """
    folder = Path(base_dir).resolve()
    build = find_build(spec, folder, makes="samples")
    run_values = {"seed": seed, "base_dir": folder, "cache_dir": Path(cache_dir)}
    arguments = fit_arguments(build, spec, options, run_values)
    with seeded_generators(key(seed, "samples"), np.random.MT19937()):
        samples = build(**arguments)
    for name, source in held_out_sets(samples).items():
        require_samples(f"{spec} {name}".strip(), source)
    return samples


def find_build(spec: str, base_dir: Path, makes: str = "Task") -> BuildFunction:
    """Import the function that a spec names; `base_dir` is absolute."""
    source, colon, function = SHIPPED.get(spec, spec).rpartition(":")
    if not (colon and source and function):
        raise TaskError(
            f"there is no task {spec!r}{_did_you_mean(spec, SHIPPED)}",
            where="task",
            next_step=f"choose one of {', '.join(SHIPPED)}, or name your own: "
            '"file.py:function" or "package.module:function"',
        )
    module = _load_file(base_dir / source) if source.endswith(".py") else _load_module(source, base_dir)
    build = getattr(module, function, None)
    if not callable(build):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise TaskError(
            f"{source} has no function {function!r}{_did_you_mean(function, functions)}",
            where=f"task = {spec!r}",
            next_step=f"define `def {function}(...) -> {makes}` at the top level of {source}",
        )
    return build


def fit_arguments(
    build: BuildFunction, spec: str, options: Mapping[str, Any], run_values: Mapping[str, Any]
) -> dict[str, Any]:
    """Match options and the values of the run with the parameters of `build`."""
    parameters = inspect.signature(build).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in options:
        if option not in names and not takes_any:
            raise TaskError(
                f"the task takes no option {option!r}{_did_you_mean(option, names)}",
                where=f"options.{option}, task = {spec!r}",
                next_step=f"it takes: {', '.join(names) or 'no options'}",
            )
    arguments = {name: run_values[name] for name in names if name in run_values} | dict(options)
    for name in names:
        if name not in arguments and parameters[name].default is inspect.Parameter.empty:
            raise TaskError(
                f"the task needs an option {name!r}, which has no default",
                where=f"options, task = {spec!r}",
                next_step=f"set options.{name} in the recipe, or --set options.{name}=...",
            )
    return arguments


def check_task(built: Any, spec: str) -> Task:
    """Convert the result of a build function, a Task or (model, data, loss), to a task."""
    if isinstance(built, Task):
        task = built
    elif isinstance(built, tuple) and len(built) == 3:
        task = Task(*built)
    else:
        kind = f"a tuple of {len(built)}" if isinstance(built, tuple) else type(built).__name__
        raise TaskError(
            f"the build function returned {kind}, not a Task",
            where=f"task = {spec!r}",
            next_step="return Task(model=..., data=..., loss=...) or (model, data, loss)",
        )
    if not callable(task.loss):
        raise TaskError(
            f"the task's loss is {type(task.loss).__name__}, which cannot be called",
            where=f"task = {spec!r}",
            next_step="write `def loss(model, batch) -> Loss`",
        )
    return task


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(
            f"there is no file {path}",
            where="task",
            next_step="give the path of the task relative to the folder of the recipe",
        )
    name = f"{path.stem}_{key('task file', str(path)):016x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{path} is not a Python file", where="task")
    module = importlib.util.module_from_spec(spec)
    _search_in(path.parent)
    sys.modules[name] = module  # before it runs, as import does: dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str, base_dir: Path) -> ModuleType:
    _search_in(base_dir)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise TaskError(
            f"there is no module {name!r}",
            where="task",
            next_step=f"install it, or put it below {base_dir}, the folder of the recipe",
        ) from error


def _search_in(folder: Path) -> None:
    """Allow imports of modules next to the task, as `python file.py` does."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    near = closest_word(name, names)
    return f"; did you mean {near!r}?" if near else ""
