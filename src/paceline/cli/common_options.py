"""Words of a command line as users write them, before typer reads them. It is loaded with every command.

Options that several commands share, and what they mean together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from paceline.errors import RecipeError, StrategyError

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe

NEWEST = "newest"


def fill_resume_value(arguments: Sequence[str]) -> list[str]:
    """The arguments of `paceline train`, with a value behind every `--resume` that has none."""
    found: list[str] = []
    for i, word in enumerate(arguments):
        found.append(word)
        if word == "--resume" and (i + 1 == len(arguments) or arguments[i + 1].startswith("-")):
            found.append(NEWEST)
    return found


RecipeArgument = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", show_default=False)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Change one key: --set optimizer.lr=3e-4. May be repeated.")
]
StrategyOption = Annotated[
    str | None, typer.Option("--strategy", help='How to distribute: "replicas=2", or a preset such as ddp.')
]
Processes = Annotated[
    int | None,
    typer.Option("-n", "--processes", min=1, help="Processes on this node. Default: what the strategy says."),
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Nodes in the job.")]
NodeRank = Annotated[int, typer.Option("--node-rank", min=0, help="Which node this is, from 0.")]
Rendezvous = Annotated[
    str | None, typer.Option("--rendezvous", help="HOST:PORT of node 0, where the nodes meet.")
]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="Holds the key of a job of several nodes; - is standard input. Or PACELINE_TOKEN.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Let nodes meet without a key, in a network without enemies."),
]


_MAX_KEY_BYTES = 4096


def read_token(file: str, insecure: bool, nodes: int) -> str:
    """The key of the job: of the file, or of the environment; never an argument, which others can read.

    Raises:
        RecipeError: several nodes have no key, and the user has not said that this is meant.
    """
    from paceline.job.cluster import token_from_environment

    try:
        token = _read_key(file) if file else token_from_environment()
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"the key of the job cannot be read: {error}",
            where=f"--token-file {file}",
            next_step="put one line of text into it, for example of `openssl rand -hex 32`",
        ) from error
    if nodes > 1 and not token and not insecure:
        raise RecipeError(
            f"{nodes} nodes need a key: whoever reaches the rendezvous could join the job",
            next_step="the same --token-file or PACELINE_TOKEN on every node; "
            "or --insecure in a network without enemies",
        )
    return token


def _read_key(file: str) -> str:
    if file == "-":
        text = sys.stdin.readline(_MAX_KEY_BYTES)
    else:
        if not Path(file).is_file():
            raise ValueError("there is no such file")
        with Path(file).open(encoding="utf-8") as stream:
            text = stream.readline(_MAX_KEY_BYTES)
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code that the recipe of another user's run folder names.")
]


class JobPlacement(NamedTuple):
    """How many processes of a job run where."""

    processes: int
    nodes: int
    node_rank: int
    rendezvous: str | None
    token: str
    tls: Literal["auto", "on", "off"] = "auto"


def task_directory(recipe_path: Path) -> Path:
    """Where `task = "file.py:build"` is looked for: beside the recipe."""
    return recipe_path.resolve().parent


def absolute_paths(recipe: Recipe, base_dir: Path) -> Recipe:
    """The recipe with what it reads as absolute paths, so that it can be resumed from anywhere.

    Args:
        base_dir: of the file of the task. First weights and link profiles are relative to where the user is,
            as outputs are.
    """
    if recipe.init_from is not None:
        recipe = recipe.replace(init_from=_absolute(recipe.init_from))
    if recipe.runtime.link_profile is not None:
        place = str(Path(recipe.runtime.link_profile).resolve())
        recipe = recipe.replace(runtime=recipe.runtime.replace(link_profile=place))
    file, colon, function = recipe.task.partition(":")
    if not file.endswith(".py"):
        return recipe
    return recipe.replace(task=f"{(base_dir / file).resolve()}{colon}{function}")


def read_recipe(path: Path, settings: list[str] | None, strategy: str | None) -> Recipe:
    """Load a recipe with the changes of the command line."""
    from paceline.recipe.recipe_loading import load_recipe

    return absolute_paths(load_recipe(path, settings or (), strategy), task_directory(path))


def processes_for(recipe: Recipe, asked: int | None, nodes: int) -> int:
    """Processes on each node, and a refusal before any of them starts.

    Raises:
        StrategyError: the strategy does not fit that many; names the nearest that does.
    """
    from paceline.recipe.recipe import max_sharers
    from paceline.recipe.support import num_ranks, support

    strategy = recipe.strategy
    needed = num_ranks(strategy.replace(replicas=strategy.replicas or nodes))
    world = needed if asked is None else asked * nodes
    if world % nodes:
        raise StrategyError(
            f"the strategy '{strategy}' has {world} ranks, which {nodes} nodes cannot share equally",
            next_step="say how many processes each node runs: -n",
        )
    most, called = max_sharers(recipe)
    answer = support(strategy, processes=world, shards=most, called=called)
    if not answer.ok:
        raise StrategyError(
            f"the strategy '{strategy}' on {world} processes is not supported: {answer.reason}",
            next_step=f'the nearest that is: --strategy "{answer.nearest}"',
        )
    return world // nodes


def _absolute(place: str) -> str:
    """A path from the root; a URL is one already."""
    return place if "://" in place else str(Path(place).resolve())
