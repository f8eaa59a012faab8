"""`paceline generate`, `serve` and `chat`: text from the weights of a run or a folder."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli.common_options import AsJson, Trust, read_token
from paceline.cli.console import error_output, print_json, print_plain
from paceline.errors import DataError, MissingExtraError, format_count

if TYPE_CHECKING:
    from paceline.recipe.tables import ServeRecipe
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
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the access token of the server; - reads standard input. Or set PACELINE_TOKEN.",
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

    def load(self, max_queued: int) -> tuple[ServedModel, Engine, SlotSettings]:
        """Load the model, and build its engine.

        Args:
            max_queued: most texts that wait for a slot.
        """
        from paceline.job.cluster import change_environment

        # Before transformers is imported: it then asks no hub, whatever a folder names.
        change_environment({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
        import torch

        from paceline.serving import build_engine
        from paceline.serving.kv_cache import SlotSettings
        from paceline.serving.load_model import load_served_model

        if (self.source / "recipe.toml").is_file() or self.source.parent.name == "checkpoints":
            from paceline.cli.resume import require_own_run

            require_own_run(self.source, self.trust)
        served = load_served_model(
            self.source, task=self.task, weights=self.weights, tokenizer=self.tokenizer, warn=_warn
        )
        is_small = sum(p.numel() for p in served.model.parameters()) < _MANY_PARAMETERS
        # Not measured, as in a training: equal commands have to give equal fingerprints.
        torch.set_num_threads(self.threads or (1 if is_small else torch.get_num_threads()))
        slots = SlotSettings.from_recipe(self._settings(served.settings), served.context)
        engine = build_engine(
            served.model,
            context=slots.context,
            slots=slots.slots,
            chunk=slots.chunk,
            attention=slots.attention,
            max_queued=slots.slots + max_queued,
        )
        return served, engine, slots

    def _settings(self, of_recipe: ServeRecipe | None) -> ServeRecipe:
        """Return the settings of the recipe, with the options in place of its keys; warns of other bits."""
        from paceline.recipe.tables import ServeRecipe

        known = of_recipe or ServeRecipe()
        options = {name: getattr(self, name) for name in ServeRecipe.model_fields}
        chosen = known.replace(**{name: value for name, value in options.items() if value is not None})
        changes = "" if of_recipe is None else chosen.changes_from(known)
        if changes:
            _warn(f"not the settings of the recipe, so texts may have other bits: {changes}")
        return chosen


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

    started = time.perf_counter()
    sampling = SamplingOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        repeat_window=repeat_window,
        seed=seed,
    )
    args = _ModelArgs(source, task, weights, tokenizer, trust, slots, chunk, attention, context, threads)
    served, engine, settings = args.load(max_queued=len(prompts))
    loaded = time.perf_counter()
    streams = len(prompts) == 1 and not as_json
    if streams:
        _write(prompts[0])
    texts: list[list[AnswerPart]] = [[] for _ in prompts]
    for index, part in _continue(served, engine, prompts, max_tokens, sampling, stop or []):
        texts[index].append(part)
        if streams:
            _write(part.text)
    seconds = time.perf_counter() - loaded
    _show(
        served,
        {**asdict(settings), "fingerprint": engine.fingerprint},
        prompts,
        texts,
        {"load_seconds": loaded - started, "seconds": seconds},
        as_json,
    )


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
        _write("\n")
    else:
        for answer in answers:
            print_plain(f"{answer['prompt']}{answer['text']}\n")
    print_plain(
        f"{format_count(count, 'token')} in {times['seconds']:.2f} s, {rate:.0f} tokens per second; loaded in"
        f" {times['load_seconds']:.2f} s; fingerprint {settings['fingerprint']}",
        error_output(),
    )


def _write(text: str) -> None:
    """Write text to the terminal at once; its control characters are written out."""
    from paceline.observe.terminal_text import escape_controls

    sys.stdout.write(escape_controls(text))
    sys.stdout.flush()


def _warn(text: str) -> None:
    print_plain(text, error_output())  # standard output may be JSON


def serve(
    source: Source,
    host: Annotated[str, typer.Option(help="Address to listen at; others than this host need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8000,
    token_file: TokenFile = "",
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
    weights: WeightsOf = None,
    task: TaskOf = None,
    tokenizer: TokenizerOf = None,
    trust: Trust = False,
) -> None:
    """Serve completions and chats over HTTP until Ctrl-C or SIGTERM.

    The access token is the line in --token-file, or PACELINE_TOKEN.
    """
    try:
        from paceline.serving.server import GenerationServer, ServerLimits
    except ImportError as error:
        raise MissingExtraError(
            f"paceline serve needs starlette, uvicorn, jinja2 and prometheus-client: {error}",
            next_step="pip install 'paceline[serve]'",
        ) from error
    from paceline.job.addresses import format_address

    token = read_token(token_file, insecure=True, nodes=1)
    with _listen(host, port) as listener:
        name, number = listener.getsockname()[:2]
        is_loopback = name.startswith("127.") or name == "::1"
        _require_token(name, token, is_loopback=is_loopback)
        args = _ModelArgs(source, task, weights, tokenizer, trust, slots, chunk, attention, context, threads)
        served, engine, _ = args.load(max_queued)
        limits = ServerLimits(
            max_queued=max_queued,
            max_tokens=max_tokens,
            request_seconds=request_seconds,
            stop_seconds=stop_seconds,
        )
        server = GenerationServer(served, engine, token, limits, is_loopback=is_loopback)
        slots_text = format_count(engine.forward.num_slots, "slot")
        print_plain(
            f"serving {served.name} ({served.source}) with {slots_text} of"
            f" {engine.context} tokens at http://{format_address(name, number)}/v1"
        )
        sys.stdout.flush()
        # uvicorn raises the signal that ended it again; a clean shutdown is no failure.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.signal(signal.SIGINT, lambda number, frame: None)
        server.run(sockets=[listener])


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


def chat(
    url: Annotated[str, typer.Argument(help="Address of a server, such as http://127.0.0.1:8000.")],
    token_file: TokenFile = "",
    system: Annotated[str, typer.Option(help="First message, of the role system.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    temperature: Annotated[float, typer.Option(help="Divides the logits.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 299792458,
) -> None:
    """Chat with the model of a server, until the end of the input or Ctrl-C."""
    token = read_token(token_file, insecure=True, nodes=1)
    messages = [{"role": "system", "content": system}] if system else []
    body: dict[str, Any] = {"temperature": temperature, "seed": seed, "stream": True}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        messages.append({"role": "user", "content": text})
        answer = ""
        for piece in _request_chat(url, token, {**body, "messages": messages}):
            answer += piece
            _write(piece)
        _write("\n")
        messages.append({"role": "assistant", "content": answer})


_CHAT_SECONDS = 120.0


def _request_chat(url: str, token: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield the pieces of an answer.

    Raises:
        DataError: the server cannot be reached, or refuses.
    """
    import urllib.error
    import urllib.request

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    place = f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
    try:
        request = urllib.request.Request(place, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=_CHAT_SECONDS) as answer:
            for line in answer:
                data = line.removeprefix(b"data: ").strip()
                if data and data != b"[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise DataError(event["error"]["message"], where=url)
                    yield event["choices"][0]["delta"].get("content", "")
    except urllib.error.HTTPError as error:
        raise DataError(_message_of(error.read()) or str(error), where=url) from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot reach the server: {error}", where=url, next_step="start one: paceline serve RUN"
        ) from error


def _message_of(body: bytes) -> str:
    """Return the message of an answer that is an error; empty if it has none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
