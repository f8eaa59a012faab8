"""The sinks of a run: builds those that `log.sinks` names, on rank 0, and sends them the first events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.errors import RecipeError
from paceline.observe.sinks import WIRE, GuardedSink, Sink, SinkSite, WireLogSink
from paceline.recipe.registry import parse_word
from paceline.recipe.registry.sink_specs import SinkSpec
from paceline.session.companion_processes import (
    MetricsExporter,
    SinkProcess,
    check_library,
    start_system_sampler,
)
from paceline.session.run_records import run_record
from paceline.session.session import Session
from paceline.watch.run_tail import records_size


def build_sinks(
    session: Session, run_dir: Path, console: Console | None, resumed_from: str | None = None
) -> list[Sink]:
    """Build the sinks of the recipe on rank 0, and send them the events "run" and "resume".

    Those that are readers share one process, which follows `metrics.jsonl` from its present end.
    With `log.sample_seconds` this is collective, and a rank of each host starts a sampler.

    Args:
        run_dir: the folder of the run; it exists.
        console: the terminal of rank 0; None if the run prints nothing.
        resumed_from: the checkpoint with which the run goes on; None for a new run.
    Returns:
        The sinks in the order of `log.sinks`, then processes; on other ranks none but perhaps a sampler.
    Raises:
        RecipeError: the module of a sink cannot be imported, or the exporter cannot listen.
        MissingExtraError: the library of a sink, of the exporter or of the sampler is not installed.
    """
    sampler = start_system_sampler(session, run_dir)
    processes: list[Sink] = [] if sampler is None else [sampler]
    if not session.is_first:
        return processes
    site = SinkSite(
        run_dir=run_dir,
        level=session.recipe.log.level,
        rotate_bytes=session.recipe.log.rotate_bytes,
        console=console,
        first_step=session.state.step,
        last_step=session.num_steps,
        tokens_per_sample=session.task.num_tokens_per_sample,
        steps_per_epoch=session.work.steps_per_epoch,
        recipe=dict(_flatten(session.recipe.model_dump())),
    )
    parsed = {text: parse_word(SinkSpec, text) for text in session.recipe.log.sinks}
    readers = [text for text, word in parsed.items() if word.spec.is_reader]
    for text in readers:
        check_library(parsed[text].spec)
    start_bytes = records_size(run_dir)  # before a sink of the job appends to them
    built = [_build_sink(*word, site) for word in parsed.values() if not word.spec.is_reader]
    sinks = [sink for sink in built if sink is not None]
    address = session.recipe.log.prometheus
    exporter = MetricsExporter(run_dir, address) if address is not None else None
    if exporter is not None:
        processes.append(exporter)
    if readers:
        processes.append(SinkProcess(readers, site, start_bytes))
    if session.recipe.log.wire:
        sinks.append(WireLogSink(run_dir / WIRE, site.warn))
    for sink in sinks:
        sink.event("run", run_record(session))
        if exporter is not None:
            sink.event("exporter", {"address": exporter.address})
        if resumed_from is not None:
            sink.event("resume", {"step": session.state.step, "checkpoint": resumed_from})
    return [*sinks, *processes]


def _build_sink(spec: SinkSpec, argument: object, site: SinkSite) -> Sink | None:
    try:
        build: Any = spec.load()
    except (ImportError, AttributeError) as error:
        raise RecipeError(
            f"the sink '{spec.word}' cannot be loaded from {spec.build}: {error}",
            where="log.sinks",
            next_step="install what it needs, or remove it from log.sinks",
        ) from error
    sink: Sink | None = build(site, argument)
    return sink if sink is None or spec.handles_errors else GuardedSink(spec.word, sink, site.warn)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield plain values by dotted key; what a library cannot take as a value is written as text."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, value if isinstance(value, (bool, int, float, str)) else str(value)
