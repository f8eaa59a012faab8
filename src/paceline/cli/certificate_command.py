"""`paceline certificate`: by which the processes of a job know each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import output

Folder = Annotated[Path, typer.Argument(help="Where three files are written.", show_default=False)]
Days = Annotated[int, typer.Option("--days", min=1, max=3650, help="How long it is valid.")]


def certificate(folder: Folder, days: Days = 365) -> None:
    """Make the certificate of a job, and an authority of its own, for channel=grpc."""
    from paceline.job.tls import KEY_FILE, JobCertificate

    JobCertificate.make(days).save(folder)
    said = (
        f"{folder} holds the certificate of a job, valid for {days} days. Copy it to every host, and set"
        f" security.certificate to that folder.\n{KEY_FILE} is the secret: keep it readable by you alone."
    )
    output().print(said, markup=False, highlight=False, soft_wrap=True)
