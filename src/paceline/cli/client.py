"""`paceline client`: a client of federated rounds, with data of its own.

The client is this process. It connects to a job that was started with `channel=grpc` and
`federated.clients = "network"`, and ends when the run is complete.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common_options import TokenFile, read_task_options, read_token
from paceline.cli.console import print_plain
from paceline.errors import RecipeError

Address = Annotated[
    str, typer.Argument(metavar="HOST:PORT", help="Where the job listens: federated.listen of its recipe.")
]
TaskOfClient = Annotated[
    str,
    typer.Option("--task", help='The task with the data of this client: "file.py" or "file.py:function".'),
]
Name = Annotated[str, typer.Option("--name", help="Name of this client, by which the server knows it again.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="An argument of the task's function: --option path=own.csv. Repeatable."),
]
Certificate = Annotated[
    Path | None,
    typer.Option("--certificate", help="Folder of `paceline certificate`, a copy of that of the server."),
]
Identity = Annotated[
    Path | None,
    typer.Option("--identity", help="Private key of this client, of `paceline certificate --client NAME`."),
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
    name: Name,
    token_file: TokenFile = "",
    options: Options = None,
    certificate: Certificate = None,
    identity: Identity = None,
    keys: Keys = None,
    plain: Plain = False,
    deadline: Deadline = 3600.0,
) -> None:
    """Train on this client's data in the federated rounds of a job, until the run is complete."""
    from paceline.recipe.log_recipe import split_address

    try:
        host, port = split_address(address)
    except ValueError:
        raise RecipeError(
            f"expected HOST:PORT, found '{address}'", next_step="paceline client 10.0.0.1:29600 ..."
        ) from None
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
