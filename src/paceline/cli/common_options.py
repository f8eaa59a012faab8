"""Options and arguments that several commands share, and what they mean together.

Invariant: this module imports only typer and the errors, since the help of every command loads it; recipes
and the job are imported inside the functions that need them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from paceline.errors import RecipeError, StrategyError, format_count

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe

NEWEST = "newest"
_MAX_KEY_BYTES = 4096

RecipeArgument = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one key of the recipe: --set optimizer.lr=3e-4. Repeatable."),
]
StrategyOption = Annotated[
    str | None,
    typer.Option("--strategy", help='How to distribute the training: "replicas=2", or a preset such as ddp.'),
]
Processes = Annotated[
    int | None,
    typer.Option(
        "-n", "--processes", min=1, help="Processes on this node. Default: what the strategy needs."
    ),
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Number of nodes in the job.")]
NodeRank = Annotated[int, typer.Option("--node-rank", min=0, help="Rank of this node, from 0.")]
Rendezvous = Annotated[
    str | None, typer.Option("--rendezvous", help="HOST:PORT of node 0, where the nodes connect.")
]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the secret key of a multi-node job; - reads standard input. Or set PACELINE_TOKEN.",
    ),
]
ServerTokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the access token of the server; - reads standard input. Or set PACELINE_TOKEN.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Let nodes connect without a key. Only for a network that you trust."),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code that another user's run folder names in its recipe.")
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Output folder. If it exists, its unfinished runs are completed.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help='"accuracy>=0.95" or "loss<=0.3". Default: the lowest loss that all runs reach.',
    ),
]


@dataclass(frozen=True)
class NodeArgs:
    """The options that say on which nodes a job runs, as the user gave them."""

    processes: int | None
    nodes: int
    node_rank: int
    rendezvous: str | None
    token_file: str
    insecure: bool

    def placement(self, processes: int, tls: Literal["auto", "on", "off"] = "auto") -> JobPlacement:
        """Return this node's share of the job, with the key of the job.

        Args:
            processes: number of processes on each node.
        Raises:
            RecipeError: a job of several nodes has no key, or the key cannot be read.
            CommunicationError: `srun` or `mpirun` runs this command several times, as a job of one node.
        """
        from paceline.job.cluster import process_environment, refuse_foreign_tasks

        refuse_foreign_tasks(process_environment(), self.nodes)
        token = read_token(self.token_file, self.insecure, self.nodes)
        return JobPlacement(processes, self.nodes, self.node_rank, self.rendezvous, token, tls)


class JobPlacement(NamedTuple):
    """The number of processes on each node, and how the nodes connect."""

    processes: int
    nodes: int
    node_rank: int
    rendezvous: str | None
    token: str
    tls: Literal["auto", "on", "off"] = "auto"


def fill_resume_value(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `paceline train` with a value after every `--resume` that has none."""
    filled: list[str] = []
    for i, word in enumerate(arguments):
        filled.append(word)
        # click has no option with an optional value, so the default is written out before it parses
        if word == "--resume" and (i + 1 == len(arguments) or arguments[i + 1].startswith("-")):
            filled.append(NEWEST)
    return filled


def read_token(file: str, insecure: bool, nodes: int) -> str:
    """Return the key of the job, from a file or from PACELINE_TOKEN.

    It is never a command-line argument, since other users can read those.

    Raises:
        RecipeError: a job of several nodes has no key and `insecure` is not set, or the key cannot be read.
    """
    from paceline.job.cluster import token_from_environment

    try:
        token = _read_key(file) if file else token_from_environment()
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"cannot read the key of the job: {error}",
            where=f"--token-file {file}",
            next_step="write one line of text to the file, for example with `openssl rand -hex 32`",
        ) from error
    if nodes > 1 and not token and not insecure:
        raise RecipeError(
            f"a job on {nodes} nodes needs a key: without it, anyone who reaches the rendezvous could join",
            next_step="pass the same --token-file or PACELINE_TOKEN on every node, "
            "or --insecure on a network that you trust",
        )
    return token


def _read_key(file: str) -> str:
    if file == "-":
        text = sys.stdin.readline(_MAX_KEY_BYTES)
    else:
        if not Path(file).is_file():
            raise ValueError("the file does not exist")
        # Only the beginning, in case the option names some large file by mistake.
        with Path(file).open(encoding="utf-8") as stream:
            text = stream.readline(_MAX_KEY_BYTES)
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


def task_directory(recipe_path: Path) -> Path:
    """Return the folder in which `task = "file.py:build"` is looked up: that of the recipe."""
    return recipe_path.resolve().parent


def absolute_paths(recipe: Recipe, base_dir: Path) -> Recipe:
    """Return the recipe with absolute paths of all inputs, so that it can be resumed from any folder.

    Args:
        base_dir: folder of the task's file. Initial weights and link profiles are relative to the current
            folder, as outputs are.
    """
    if recipe.init_from is not None:
        recipe = recipe.replace(init_from=_absolute(recipe.init_from))
    if recipe.runtime.link_profile is not None:
        profile = str(Path(recipe.runtime.link_profile).resolve())
        recipe = recipe.replace(runtime=recipe.runtime.replace(link_profile=profile))
    if recipe.task == "byte-gpt":
        options = dict(recipe.options)
        for name in {"text", "tokenizer"} & options.keys():
            values = options[name]
            is_list = isinstance(values, list | tuple)
            places = [_absolute_input(value, base_dir) for value in (values if is_list else [values])]
            options[name] = places if is_list else places[0]
        recipe = recipe.replace(options=options)
    file, colon, function = recipe.task.partition(":")
    if not file.endswith(".py"):
        return recipe
    return recipe.replace(task=f"{(base_dir / file).resolve()}{colon}{function}")


def _absolute_input(value: Any, base_dir: Path) -> Any:
    """Return the place of a text or a tokenizer; "stdlib" and URLs stay as they are."""
    is_path = isinstance(value, str) and value != "stdlib" and "://" not in value
    return str(base_dir.resolve() / value) if is_path else value


def read_recipe(path: Path, settings: list[str] | None, strategy: str | None) -> Recipe:
    """Load a recipe and apply the overrides of the command line."""
    from paceline.recipe.recipe_loading import load_recipe

    return absolute_paths(load_recipe(path, settings or (), strategy), task_directory(path))


def processes_for(recipe: Recipe, processes: int | None, nodes: int) -> int:
    """Return the number of processes on each node, after checking that the strategy fits it.

    Args:
        processes: as the user asked for on each node; None: as many as the strategy needs.
    Raises:
        StrategyError: the strategy does not fit that many processes; names the nearest one that does.
    """
    from paceline.recipe.recipe import max_sharers
    from paceline.recipe.support import num_ranks, support

    strategy = recipe.strategy
    # Without a number of replicas, every node has one.
    needed = num_ranks(strategy.replace(replicas=strategy.replicas or nodes))
    world_size = needed if processes is None else processes * nodes
    if world_size % nodes:
        raise StrategyError(
            f"the strategy '{strategy}' has {format_count(world_size, 'rank')}, which cannot be divided"
            f" equally among {nodes} nodes",
            next_step="pass the number of processes on each node: -n",
        )
    shards, limit_key = max_sharers(recipe)
    answer = support(strategy, processes=world_size, shards=shards, limit_key=limit_key)
    if not answer.ok:
        raise StrategyError(
            f"the strategy '{strategy}' on {format_count(world_size, 'process')} is not supported:"
            f" {answer.reason}",
            next_step=f'use the nearest supported strategy: --strategy "{answer.nearest}"',
        )
    return world_size // nodes


def _absolute(location: str) -> str:
    """Return a path from the root; a URL is absolute already."""
    return location if "://" in location else str(Path(location).resolve())
