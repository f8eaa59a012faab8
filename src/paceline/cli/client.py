"""`paceline client`: a client of federated rounds, with data of its own.

The client is this process. It connects to a job that was started with `channel=grpc` and
`federated.clients = "network"`, and ends when the run is complete. Several names are several clients, each
a process that an executor starts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from paceline.cli.common_options import Nodes, TokenFile, read_task_options, read_token
from paceline.cli.console import print_plain
from paceline.cli.executor_choice import Engine, build_executor, signals_to
from paceline.errors import RecipeError, format_count

Address = Annotated[
    str, typer.Argument(metavar="HOST:PORT", help="Where the job listens: federated.listen of its recipe.")
]
TaskOfClient = Annotated[
    str,
    typer.Option("--task", help='The task with the data of this client: "file.py" or "file.py:function".'),
]
Names = Annotated[
    list[str],
    typer.Option(
        "--name", help="Name of this client, by which the server knows it again. Repeatable: see --on."
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="An argument of the task's function: --option path=own.csv. Repeatable. With several clients,"
        " {name} in it is the name of each.",
    ),
]
On = Annotated[
    Engine | None,
    typer.Option(
        "--on",
        help="Start a process for each --name: here, as tasks of Slurm or as actors of Ray, on --nodes."
        " Default with several names: local.",
        show_default=False,
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-option",
        help="Option of the engine: partition=cpu, wait=SECONDS, address=HOST:6379. Repeatable.",
    ),
]
Certificate = Annotated[
    Path | None,
    typer.Option("--certificate", help="Folder of `paceline certificate`, a copy of that of the server."),
]
Identity = Annotated[
    Path | None,
    typer.Option(
        "--identity",
        help="Private key of this client, of `paceline certificate --client NAME`; {name} as in --option.",
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option(
        "--keys", help="File with the public keys of all clients, for a secure sum; with --identity."
    ),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="Send updates without encryption. Only in a network that you trust.")
]
Deadline = Annotated[
    float,
    typer.Option("--deadline", min=1.0, help="Seconds for which the server may be gone or send nothing."),
]


def client(
    address: Address,
    task: TaskOfClient,
    names: Names,
    token_file: TokenFile = "",
    options: Options = None,
    certificate: Certificate = None,
    identity: Identity = None,
    keys: Keys = None,
    plain: Plain = False,
    deadline: Deadline = 3600.0,
    on: On = None,
    nodes: Nodes = 1,
    engine_options: EngineOptions = None,
) -> None:
    """Train on this client's data in the federated rounds of a job, until the run is complete."""
    host, port = _split(address)
    token = read_token(token_file, insecure=False, nodes=1)
    if not token:
        raise RecipeError(
            "a client needs the key of the job",
            next_step="pass the file that the job was started with: --token-file KEY; or set PACELINE_TOKEN",
        )
    if (identity is None) != (keys is None):
        raise RecipeError(
            "a secure sum needs the private key of this client and the public keys of all",
            next_step="pass both: --identity NAME.key --keys FILE",
        )
    from paceline.comm.channel.grpc_protocol import require_grpc

    require_grpc()
    if on is not None or len(names) > 1:
        flags = {"--certificate": certificate, "--keys": keys, "--identity": identity, "--deadline": deadline}
        words = [address, "--task", task, *(["--plain"] if plain else [])]
        words += [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
        words += [text for option in options or () for text in ("--option", option)]
        _run_on(on or "local", nodes, engine_options or [], names, words, token)
    (name,) = names
    from paceline.federated.secure_masks import ClientIdentity
    from paceline.job.tls import JobCertificate
    from paceline.session.federated_client import ClientSettings, FederatedClient

    settings = ClientSettings(
        host=host,
        port=port,
        name=name,
        token=token,
        task=task,
        base_dir=Path.cwd(),
        options=read_task_options(options),
        certificate=None if certificate is None else JobCertificate.read(certificate),
        allows_plain=plain,
        deadline_seconds=deadline,
        identity=None if identity is None or keys is None else ClientIdentity.read(name, identity, keys),
    )
    running = FederatedClient(settings, print_plain)
    running.run()
    print_plain(f"the run is complete: {name} has returned {running.num_works} updates")


def _split(address: str) -> tuple[str, int]:
    from paceline.recipe.log_recipe import split_address

    try:
        return split_address(address)
    except ValueError:
        raise RecipeError(
            f"expected HOST:PORT, found '{address}'", next_step="paceline client 10.0.0.1:29600 ..."
        ) from None


def _run_on(
    engine: Engine,
    nodes: int,
    engine_options: Sequence[str],
    names: Sequence[str],
    words: Sequence[str],
    token: str,
) -> NoReturn:
    """Run each client as a process of an executor, and exit with the first exit code that is not 0.

    Args:
        words: of each client after `paceline client`; "{name}" stands for its name.
        token: the key of the job, which is in no command line and no file.
    """
    from paceline.launch.executor import ExecutorProcess, NodeRequest, run_independent

    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise RecipeError(f"two clients have the name '{repeated}'", where="--name", next_step="rename one")
    if len(names) % nodes:
        raise RecipeError(
            f"{format_count(len(names), 'client')} cannot be divided among {format_count(nodes, 'node')}",
            where="--nodes",
            next_step="a number of nodes that divides the number of names",
        )
    per_node, processes = len(names) // nodes, dict[str, ExecutorProcess]()
    for number, name in enumerate(names):
        own = [word.replace("{name}", name) for word in words]
        processes[name] = ExecutorProcess(
            "client", number // per_node, ("client", *own, "--name", name), {"PACELINE_TOKEN": token}
        )
    request, stops = NodeRequest(nodes, per_node, per_node), list[int]()
    executor = build_executor(engine, engine_options, "--engine-option")
    with signals_to(stops.append):
        ends = run_independent(executor, request, processes, _write, lambda: bool(stops))
    failed = {name: end for name, end in ends.items() if end.code}
    failed |= {name: end for name, end in ends.items() if end.is_lost}
    if failed and not stops:
        print_plain(
            f"{format_count(len(failed), 'client')} of {len(names)} failed: {', '.join(failed)};"
            " the same command with these names connects them again"
        )
    codes = [abs(end.code) + 128 * (end.code < 0) if end.code else 137 for end in failed.values()]
    sys.exit((codes or [0])[0])


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
