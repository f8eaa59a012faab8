"""`paceline bench kernels`: the time of each form of the fused operations, and which one is used."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.cli.console import error_output, output, print_json, print_plain
from paceline.errors import DeviceError

_VOCABULARY, _WIDTH = 4096, 512


def kernels(
    values: Annotated[
        int, typer.Option("--values", min=2**16, help="Values of the largest argument of each operation.")
    ] = 2**20,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the forms of fused operations: plain, compiled, and in Triton on a GPU.

    Times are of forward and backward together, the least of five, without the first, which compiles.
    """
    import torch

    from paceline.models import FORMS, FusedOperations

    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise DeviceError(f"--device {device}: there is no such device here", next_step="--device cpu")
    console = error_output() if as_json else output()
    operations = FusedOperations(lambda text: print_plain(text, console))
    torch.manual_seed(0)
    for name, args in _examples(values, torch.device(device)):
        operations.apply(name, *args)
    rows = [
        {"operation": kind[0], "form": choice.form, "seconds": choice.seconds, "refused": choice.refused}
        for kind, choice in operations.choices.items()
    ]
    if as_json:
        print_json({"device": device, "values": values, "operations": rows})
        return
    print_plain("".join(text.rjust(14) for text in ("operation", *FORMS, "in use")), console)
    for row in rows:
        times = [f"{1e3 * row['seconds'][f]:.3g} ms" if f in row["seconds"] else "-" for f in FORMS]
        print_plain("".join(text.rjust(14) for text in (row["operation"], *times, row["form"])), console)


def _examples(values: int, device: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Return arguments of each operation."""
    import torch

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, device=device, requires_grad=True)

    rows, chunk = values // _WIDTH, max(1, values // _VOCABULARY)
    targets = torch.randint(_VOCABULARY, (chunk,), device=device)
    return [
        ("bias_relu", (draw(rows, _WIDTH), draw(rows, _WIDTH))),
        ("rms_norm", (draw(rows, _WIDTH), draw(_WIDTH), 1e-6)),
        ("softmax_loss", (draw(chunk, _VOCABULARY).detach(), targets, -100)),
    ]
