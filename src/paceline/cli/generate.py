"""`paceline generate`, `serve` and `chat`: text from the weights of a run or a folder."""

from __future__ import annotations

import gc
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli.common_options import (
    AsJson,
    JobPlacement,
    ServerTokenFile,
    TaskOf,
    Trust,
    WeightsOf,
    read_token,
)
from paceline.cli.console import (
    discard_warning,
    error_output,
    print_json,
    print_plain,
    print_warning,
    write_text,
)
from paceline.errors import DataError, MissingExtraError, StrategyError, format_count

if TYPE_CHECKING:
    from paceline.job.cluster import Cluster
    from paceline.recipe.strategy import Strategy
    from paceline.serving import Engine, SamplingOptions
    from paceline.serving.answers import AnswerPart
    from paceline.serving.kv_cache import SlotSettings
    from paceline.serving.load_model import ServedModel

Source = Annotated[
    Path,
    typer.Argument(
        help="A run, a checkpoint in it, a file of `paceline export`, or a Hugging Face folder.",
        show_default=False,
    ),
]
TokenizerOf = Annotated[
    str | None,
    typer.Option("--tokenizer", help="A tokenizer.json or a folder with one. Default: that of the model."),
]
Slots = Annotated[
    int | None,
    typer.Option(
        "--slots", min=1, max=4096, help="Texts at a time. Default: serve.slots, 8.", show_default=False
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk",
        min=1,
        help="Tokens of a prompt that are processed at a time. Default: serve.chunk, 64.",
        show_default=False,
    ),
]
Attention = Annotated[
    Literal["masked", "by_slot"] | None,
    typer.Option(
        help="Attention over the whole cache under a mask, or slot by slot at its own length. Default:"
        " serve.attention, by_slot.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="Threads of the processor; part of the fingerprint. Default: 1 for less than 100 million"
        " parameters, else PyTorch's.",
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=2,
        help="Longest text, in tokens. Default: serve.context, that of the model.",
        show_default=False,
    ),
]
Processes = Annotated[
    int,
    typer.Option("-n", "--processes", min=1, help="Number of processes that share the texts or the model."),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help='How they do: "replicas=2", "pipeline=2", "tensor=2", "shard=2 zero=3". Default: as replicas.',
    ),
]


_GRACE_SECONDS = 5.0  # after the time for running texts, until all processes have ended
_MANY_REQUESTS = 2**31  # the queue of a server has a limit of its own
_MANY_PARAMETERS = 10**8  # from here on a matrix product is long enough for several threads


@dataclass(frozen=True)
class _ModelArgs:
    """The arguments of the model, as the user gave them."""

    source: Path
    task: str | None
    weights: Any
    tokenizer: str | None
    trust: bool
    slots: int | None
    chunk: int | None
    attention: Any
    context: int | None
    threads: int | None
    processes: int
    strategy: str | None

    @property
    def starts_processes(self) -> bool:
        """True if this process is to start those that run the model."""
        from paceline.job.cluster import Cluster, current_place, refuse_engine_tasks

        if Cluster.of_worker() is not None:
            return False
        refuse_engine_tasks(current_place(), "a server or paceline generate")
        return self.processes > 1 or self.strategy is not None

    def start_processes(self, *more: str, grace_seconds: float) -> int:
        """Run this command in every process, of which the first one prints; returns the exit code.

        Args:
            more: further arguments.
            grace_seconds: time to end after a signal.
        """
        from paceline.cli.relaunch import build_job
        from paceline.launch.launcher import launch
        from paceline.launch.shutdown import ShutdownTimeouts
        from paceline.recipe.tables import RuntimeRecipe

        # Called for its errors: a strategy that does not fit fails before a process starts.
        _serving_strategy(self.strategy, self.processes)
        self.require_own_source()
        job = build_job(
            (sys.executable, "-m", "paceline", *sys.argv[1:], *more),
            JobPlacement(self.processes, 1, 0, None, ""),
            self.threads or 0,
            timeouts=ShutdownTimeouts(
                stuck_seconds=RuntimeRecipe().deadline_seconds, grace_seconds=grace_seconds
            ),
        )
        outcome = launch(job)
        # A signal ends a server, which is no failure; it prints a report if a rank did not obey.
        return outcome.exit_code if outcome.failures or outcome.report else 0

    def require_own_source(self) -> None:
        """Refuse another user's run folder, whose recipe may name code, unless it is trusted."""
        if (self.source / "recipe.toml").is_file() or self.source.parent.name == "checkpoints":
            from paceline.cli.resume import require_own_run

            require_own_run(self.source, self.trust)

    @contextmanager
    def opened(self, max_queued: int) -> Iterator[tuple[ServedModel, Engine | None]]:
        """Load the model, and build its engine; None on ranks but the first, when that has closed it."""
        from paceline.job.cluster import Cluster, change_environment
        from paceline.launch.worker_guard import guard

        # Before transformers is imported: it then asks no hub, whatever a folder names.
        change_environment({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
        cluster = Cluster.of_worker()
        if cluster is None:
            import torch

            from paceline.serving import build_engine

            self.require_own_source()
            served = self._load(print_warning)
            torch.set_num_threads(self._num_threads(served))
            sizes = asdict(self.slot_settings(served, print_warning))
            del sizes["rows"]
            yield served, build_engine(served.model, **sizes, max_queued=max_queued)
            return
        with guard(cluster), self._on_ranks(cluster, max_queued) as opened:
            yield opened

    def _on_ranks(
        self, cluster: Cluster, max_queued: int
    ) -> AbstractContextManager[tuple[ServedModel, Engine | None]]:
        from paceline.serving.rank_engine import engine_on_ranks

        warn = print_warning if cluster.global_rank == 0 else discard_warning
        return engine_on_ranks(
            lambda: self._load(warn),
            _serving_strategy(self.strategy, cluster.world_size),
            cluster,
            lambda served: self.slot_settings(served, warn),
            num_threads=self._num_threads,
            max_queued=max_queued,
            on_follow=_ignore_signals,
        )

    def _load(self, warn: Callable[[str], None]) -> ServedModel:
        from paceline.serving.load_model import load_served_model

        return load_served_model(
            self.source, task=self.task, weights=self.weights, tokenizer=self.tokenizer, warn=warn
        )

    def _num_threads(self, served: ServedModel) -> int:
        import torch

        is_small = sum(p.numel() for p in served.model.parameters()) < _MANY_PARAMETERS
        # Not measured, as in a training: equal commands have to give equal fingerprints.
        return self.threads or (1 if is_small else torch.get_num_threads())

    def slot_settings(self, served: ServedModel, warn: Callable[[str], None]) -> SlotSettings:
        """Return the settings of the recipe, with the options in place of its keys; warns of other bits."""
        from paceline.recipe.tables import ServeRecipe
        from paceline.serving.kv_cache import SlotSettings

        known = served.settings or ServeRecipe()
        options = {name: getattr(self, name) for name in ServeRecipe.model_fields}
        chosen = known.replace(**{name: value for name, value in options.items() if value is not None})
        changes = "" if served.settings is None else chosen.changes_from(known)
        if changes:
            warn(f"not the settings of the recipe, so texts may have other bits: {changes}")
        return SlotSettings.from_recipe(chosen, served.context)


def _serving_strategy(requested: str | None, num_processes: int) -> Strategy:
    """Return how processes share a model that generates: by default each has the whole model.

    Raises:
        StrategyError: the strategy does not fit the number of processes, splits sequences, or has terms about
            training.
    """
    from paceline.recipe.strategy import Strategy
    from paceline.recipe.support import resolve_inference_strategy

    strategy = resolve_inference_strategy(Strategy(), requested or f"replicas={num_processes}", num_processes)
    if strategy.context > 1:
        raise StrategyError(
            "generation does not support context, in which every rank has some positions of a sequence",
            next_step="use replicas, shard=N zero=3, tensor=N or pipeline=N",
        )
    return strategy


def generate(
    source: Source,
    prompts: Annotated[list[str], typer.Argument(help="Texts to continue.", show_default=False)],
    max_tokens: Annotated[int, typer.Option(help="Most tokens that are added to each.")] = 100,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0: the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Sample among so many likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest with this probability.")] = 0.9,
    min_p: Annotated[float, typer.Option(help="Leave out tokens below this part of the likeliest.")] = 0.0,
    repeat_penalty: Annotated[float, typer.Option(help="Make recent tokens less likely; 1: no.")] = 1.0,
    repeat_window: Annotated[int, typer.Option(help="How many tokens are recent.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the draws: equal seeds give equal texts.")] = 299792458,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer. Repeatable.")] = None,
    slots: Slots = None,
    chunk: Chunk = None,
    attention: Attention = None,
    context: Context = None,
    threads: Threads = None,
    processes: Processes = 1,
    strategy: Layout = None,
    weights: WeightsOf = None,
    task: TaskOf = None,
    tokenizer: TokenizerOf = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Continue prompts with the model of a run or a folder.

    A single prompt appears on the terminal as it grows. A text does not depend on the other prompts.
    """
    from paceline.serving import SamplingOptions

    sampling = SamplingOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        repeat_window=repeat_window,
        seed=seed,
    )
    args = _ModelArgs(
        source,
        task,
        weights,
        tokenizer,
        trust,
        slots,
        chunk,
        attention,
        context,
        threads,
        processes,
        strategy,
    )
    if args.starts_processes:
        sys.exit(args.start_processes(grace_seconds=_GRACE_SECONDS))
    _generate(args, prompts, max_tokens, sampling, stop or [], as_json=as_json)


def _generate(
    args: _ModelArgs,
    prompts: Sequence[str],
    max_tokens: int,
    sampling: SamplingOptions,
    stop: Sequence[str],
    *,
    as_json: bool,
) -> None:
    """Continue prompts in this process, or follow the one that prints."""
    started = time.perf_counter()
    with args.opened(max_queued=len(prompts)) as (served, engine):
        if engine is None:
            return
        loaded = time.perf_counter()
        streams = len(prompts) == 1 and not as_json
        if streams:
            write_text(prompts[0])
        texts: list[list[AnswerPart]] = [[] for _ in prompts]
        for index, part in _continue(served, engine, prompts, max_tokens, sampling, stop):
            texts[index].append(part)
            if streams:
                write_text(part.text)
        seconds = time.perf_counter() - loaded
    times = {"load_seconds": loaded - started, "seconds": seconds}
    settings = asdict(args.slot_settings(served, discard_warning))
    settings |= {"slots": engine.num_slots, "fingerprint": engine.fingerprint}
    _show(served, settings, prompts, texts, times, as_json)


def _continue(
    served: ServedModel,
    engine: Engine,
    prompts: Sequence[str],
    max_tokens: int,
    sampling: SamplingOptions,
    stop: Sequence[str],
) -> Iterator[tuple[int, AnswerPart]]:
    """Yield the parts of all texts, with the index of their prompt."""
    from paceline.serving import GenerationRequest
    from paceline.serving.answers import Answer, encode_prompt

    running = {}
    for index, prompt in enumerate(prompts):
        tokens = encode_prompt(served, prompt)
        request = GenerationRequest(tokens, max_tokens, sampling, served.tokenizer.end_tokens)
        ticket = engine.submit(request)
        running[ticket.request_id] = index, ticket, Answer(served, request, stop)
    while not engine.is_idle:
        for event in engine.step():
            index, ticket, answer = running[event.request_id]
            part = None if ticket.finish_reason == "cancelled" else answer.push(event)
            if part is not None:
                yield index, part
                if part.finish_reason is not None:
                    engine.cancel(ticket)


def _show(
    served: ServedModel,
    settings: dict[str, Any],
    prompts: Sequence[str],
    texts: Sequence[Sequence[AnswerPart]],
    times: dict[str, float],
    as_json: bool,
) -> None:
    """Print the texts that were not streamed, and the speed."""
    answers: list[dict[str, Any]] = [
        {
            "prompt": prompt,
            "text": "".join(part.text for part in parts),
            "tokens": sum(len(part.events) for part in parts),
            "finish_reason": parts[-1].finish_reason,
        }
        for prompt, parts in zip(prompts, texts, strict=True)
    ]
    count = sum(answer["tokens"] for answer in answers)
    rate = count / times["seconds"] if times["seconds"] else 0.0
    if as_json:
        facts = {"model": served.name, "source": served.source, **settings}
        speed = {"tokens_per_second": rate, **times}
        print_json({**facts, **speed, "answers": answers})
        return
    if len(prompts) == 1:
        write_text("\n")
    else:
        for answer in answers:
            print_plain(f"{answer['prompt']}{answer['text']}\n")
    print_plain(
        f"{format_count(count, 'token')} in {times['seconds']:.2f} s, {rate:.0f} tokens per second; loaded in"
        f" {times['load_seconds']:.2f} s; fingerprint {settings['fingerprint']}",
        error_output(),
    )


def serve(
    source: Source,
    host: Annotated[str, typer.Option(help="Address to listen at; others than this host need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8000,
    token_file: ServerTokenFile = "",
    slots: Slots = None,
    chunk: Chunk = None,
    attention: Attention = None,
    context: Context = None,
    threads: Threads = None,
    max_queued: Annotated[int, typer.Option(min=0, help="Texts that may wait for a slot.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of a text; 0: the context.")] = 0,
    request_seconds: Annotated[float, typer.Option(min=0.1, help="Longest time of an answer.")] = 600.0,
    stop_seconds: Annotated[
        float, typer.Option(min=0.0, help="Time for running texts after SIGTERM.")
    ] = 30.0,
    processes: Processes = 1,
    strategy: Layout = None,
    weights: WeightsOf = None,
    task: TaskOf = None,
    tokenizer: TokenizerOf = None,
    trust: Trust = False,
) -> None:
    """Serve completions and chats over HTTP until Ctrl-C or SIGTERM.

    The access token is the line in --token-file, or PACELINE_TOKEN.
    """
    args = _ModelArgs(
        source,
        task,
        weights,
        tokenizer,
        trust,
        slots,
        chunk,
        attention,
        context,
        threads,
        processes,
        strategy,
    )
    if args.starts_processes:
        sys.exit(_serve_on_ranks(args, host, token_file, stop_seconds + _GRACE_SECONDS))
    limits = {
        "max_queued": max_queued,
        "max_tokens": max_tokens,
        "request_seconds": request_seconds,
        "stop_seconds": stop_seconds,
    }
    _serve_here(args, (host, port), token_file, limits)


def _serve_here(
    args: _ModelArgs, address: tuple[str, int], token_file: str, limits: Mapping[str, Any]
) -> None:
    """Serve in this process, or follow the one that does."""
    try:
        from paceline.serving.server import GenerationServer, ServerLimits
    except ImportError as error:
        raise MissingExtraError(
            f"paceline serve needs starlette, uvicorn, jinja2 and prometheus-client: {error}",
            next_step="pip install 'paceline[serve]'",
        ) from error
    rank = _global_rank()
    if rank:
        with args.opened(_MANY_REQUESTS):
            return  # rank 0 has ended
    # Workers of a job have its key in PACELINE_TOKEN, and get that of the server in a file.
    token = "" if rank == 0 and not token_file else read_token(token_file, insecure=True, nodes=1)
    with _listen(*address) as listener:
        name = listener.getsockname()[0]
        is_loopback = _is_loopback(name)
        _require_token(name, token, is_loopback=is_loopback)
        with args.opened(_MANY_REQUESTS) as (served, engine):
            assert engine is not None
            server = GenerationServer(
                served,
                engine,
                token,
                ServerLimits(**limits),
                is_loopback=is_loopback,
                ends_with_engine=rank is not None,
            )
            _announce(served, engine, listener)
            gc.freeze()  # what the libraries have made stays, so no request pays for a look at it
            _ignore_signals()  # uvicorn raises the one that ended it again; a clean shutdown is no failure
            server.run(sockets=[listener])
            if rank is not None and server.thread.error is not None:
                raise server.thread.error


def _serve_on_ranks(args: _ModelArgs, host: str, token_file: str, grace_seconds: float) -> int:
    """Start the processes of a server; returns the exit code."""
    token = read_token(token_file, insecure=True, nodes=1)
    _require_token(host, token, is_loopback=_is_loopback(host) or host == "localhost")
    if not token:
        return args.start_processes(grace_seconds=grace_seconds)
    # Not an argument, which other users can read.
    with NamedTemporaryFile("w", prefix="paceline-token-") as file:
        file.write(token)
        file.flush()
        return args.start_processes("--token-file", file.name, grace_seconds=grace_seconds)


def _global_rank() -> int | None:
    """Return the rank of this process; None if it is the only one."""
    from paceline.job.cluster import Cluster

    cluster = Cluster.of_worker()
    return None if cluster is None else cluster.global_rank


def _announce(served: ServedModel, engine: Engine, listener: socket.socket) -> None:
    from paceline.job.addresses import format_address

    name, number = listener.getsockname()[:2]
    print_plain(
        f"serving {served.name} ({served.source}) with {format_count(engine.num_slots, 'slot')} of"
        f" {engine.context} tokens at http://{format_address(name, number)}/v1"
    )
    sys.stdout.flush()


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _require_token(address: str, token: str, *, is_loopback: bool) -> None:
    """Raise a DataError if other hosts reach the server and nothing keeps them out."""
    if not is_loopback and not token:
        raise DataError(
            f"other hosts reach {address}, so the server needs an access token",
            next_step="pass --token-file FILE, for example made with `openssl rand -hex 32`",
        )


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        DataError: it cannot listen there.
    """
    from paceline.job.addresses import listen_at

    try:
        return listen_at(host, port, backlog=2048)
    except OSError as error:
        raise DataError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}",
            next_step="choose another --port, or --port 0 for any that is free",
        ) from error
