"""`paceline certificate`: create the TLS certificate of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import print_plain
from paceline.errors import format_count

Folder = Annotated[Path, typer.Argument(help="Folder for the three files.", show_default=False)]
Days = Annotated[int, typer.Option("--days", min=1, max=3650, help="Days for which it is valid.")]


def certificate(folder: Folder, days: Days = 365) -> None:
    """Create a certificate for a job, and its own certificate authority, for channel=grpc."""
    from paceline.job.tls import KEY_FILE, JobCertificate

    JobCertificate.make(days).save(folder)
    print_plain(
        f"{folder} holds the certificate of a job, valid for {format_count(days, 'day')}. Copy the folder to"
        f" every host and set security.certificate to it.\n"
        f"{KEY_FILE} is secret: nobody else should be able to read it."
    )
