"""`paceline chat`: a small client of a server, for the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from paceline.cli.common_options import ServerTokenFile, read_token
from paceline.cli.console import write_text
from paceline.errors import DataError


def chat(
    url: Annotated[str, typer.Argument(help="Address of a server, such as http://127.0.0.1:8000.")],
    token_file: ServerTokenFile = "",
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
            write_text(piece)
        write_text("\n")
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
