"""Options and arguments that several commands share, and what they mean together.

Invariant: this module imports only typer and the errors, since the help of every command loads it; recipes
and the job are imported inside the functions that need them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from paceline.errors import RecipeError, StrategyError, format_count

if TYPE_CHECKING:
    from paceline.job.cluster import Cluster
    from paceline.job.engines import EnginePlace
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


def _parse_process_bounds(text: str) -> str:
    """Check the text of `-n N` or `-n LEAST:MOST`."""
    numbers = text.split(":")
    if len(numbers) > 2 or not all(n.isdecimal() and int(n) >= 1 for n in numbers):
        raise typer.BadParameter(f"{text} is neither a number of at least 1 nor LEAST:MOST")
    if int(numbers[0]) > int(numbers[-1]):
        raise typer.BadParameter(f"{text} has a least number above the most")
    return text


ProcessBounds = Annotated[
    str | None,
    typer.Option(
        "-n",
        "--processes",
        metavar="N|LEAST:MOST",
        parser=_parse_process_bounds,
        help="Processes on this node. Default: what the strategy needs. 2:6 starts 6, and continues with as"
        " few as 2 (elastic.min_processes).",
        show_default=False,
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
TaskOf = Annotated[
    str | None,
    typer.Option("--task", help='Task of the run, "file.py:function", if it was trained from a script.'),
]
WeightsOf = Annotated[
    Literal["average", "last"] | None,
    typer.Option(
        help="Which weights, if the run keeps an average of them. Default: the average.", show_default=False
    ),
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

    def worker(self, tls: Literal["auto", "on", "off"] = "auto") -> Cluster | None:
        """Return this process in its job if a launcher or an engine started it as a rank; else None.

        Under an engine, the options for the rendezvous and the key are those of this rank.

        Raises:
            RecipeError: `-n` or `--nodes` contradicts the engine.
            CommunicationError: as for `Cluster.from_env`.
        """
        from paceline.job.cluster import Cluster, change_environment, current_place
        from paceline.job.engines import RENDEZVOUS

        place = current_place()
        if place is None or place.engine == "torchrun":
            return Cluster.of_worker()
        if self._launches_in(place):
            return None
        if self.processes is not None and self.processes != place.local_world_size:
            raise RecipeError(
                f"-n {self.processes} asks for {format_count(self.processes, 'process')} on this node, and"
                f" {place.command} has started {place.local_world_size}",
                where=f"the variables of {place.engine}: {place.settings}",
                next_step="leave -n out; or start one task on each node, and Paceline starts -n there",
            )
        # Without a key, `Cluster.from_env` refuses several nodes.
        key = read_token(self.token_file, self.insecure, 1) or (place.job if self.insecure else "")
        given = {RENDEZVOUS: self.rendezvous, "PACELINE_TOKEN": key, "PACELINE_TLS": tls}
        change_environment({name: value for name, value in given.items() if value})
        return Cluster.from_env()

    def on_engine(self) -> NodeArgs:
        """Return the options of a launcher: under an engine with one task on each node, from its variables.

        Raises:
            RecipeError: `--nodes` or `--node-rank` contradicts the engine.
            CommunicationError: the rendezvous cannot be found.
        """
        from paceline.job.addresses import format_address
        from paceline.job.cluster import current_place, process_environment
        from paceline.job.engines import store_endpoint_of

        place = current_place()
        if place is None or not self._launches_in(place):
            return self
        if self.rendezvous and (self.nodes, self.node_rank) == (place.world_size, place.global_rank):
            return self
        if self.nodes > 1 and (self.rendezvous or self.nodes != place.world_size):
            raise RecipeError(
                f"--nodes {self.nodes} --node-rank {self.node_rank}, but this is task {place.global_rank} of"
                f" {place.world_size} of {place.command}",
                where=f"the variables of {place.engine}: {place.settings}",
                next_step="leave both options out; one task on each node is one node of the job",
            )
        rendezvous = self.rendezvous or format_address(*store_endpoint_of(place, process_environment()))
        return replace(self, nodes=place.world_size, node_rank=place.global_rank, rendezvous=rendezvous)

    def _launches_in(self, place: EnginePlace) -> bool:
        """Return whether this process starts the ranks of its node, rather than be one of them."""
        asks_for_ranks = self.nodes > 1 or (self.processes or 1) > 1
        return place.starts_launchers or (place.has_one_task_per_node and asks_for_ranks)

    def placement(self, processes: int, tls: Literal["auto", "on", "off"] = "auto") -> JobPlacement:
        """Return this node's share of the job, with the key of the job.

        Args:
            processes: number of processes on each node.
        Raises:
            RecipeError: a job of several nodes has no key, or the key cannot be read.
        """
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


def read_task_options(options: list[str] | None) -> dict[str, Any]:
    """Return the options of `--option KEY=VALUE`, with values as in a recipe.

    Raises:
        RecipeError: one of them is no such text.
    """
    from paceline.recipe.recipe_loading import apply_override

    values: dict[str, Any] = {}
    for text in options or ():
        _, problem = apply_override(values, f"options.{text}")
        if problem is not None:
            raise RecipeError(f"--option {text}: {problem.message}", next_step="use --option KEY=VALUE")
    arguments: dict[str, Any] = values.get("options", {})
    return arguments
