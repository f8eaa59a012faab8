"""`paceline certificate`: create the TLS certificate of a job, or the keys of clients of secure sums."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import print_plain
from paceline.errors import format_count

Folder = Annotated[Path, typer.Argument(help="Folder for the files.", show_default=False)]
Days = Annotated[int, typer.Option("--days", min=1, max=3650, help="Days for which it is valid.")]
Clients = Annotated[
    list[str] | None,
    typer.Option(
        "--client", help="Create no certificate, but the key of this client for secure sums. Repeatable."
    ),
]


def certificate(folder: Folder, days: Days = 365, clients: Clients = None) -> None:
    """Create a certificate for a job, and its own certificate authority, for channel=grpc."""
    if clients:
        from paceline.federated.secure_masks import PUBLIC_KEYS_FILE, ClientIdentity

        for name in clients:
            path = ClientIdentity.make(folder, name)
            print_plain(f"{path} is secret: only client {name} should have it.")
        print_plain(
            f"{folder / PUBLIC_KEYS_FILE} has the public keys. Give every client the lines of all clients in"
            " one file, by a way that the server of the run cannot change."
        )
        return
    from paceline.job.tls import KEY_FILE, JobCertificate

    JobCertificate.make(days).save(folder)
    print_plain(
        f"{folder} holds the certificate of a job, valid for {format_count(days, 'day')}. Copy the folder to"
        f" every host and set security.certificate to it.\n"
        f"{KEY_FILE} is secret: nobody else should be able to read it."
    )
