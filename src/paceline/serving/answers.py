"""Requests and answers: prompts become tokens, tokens become text, and both are JSON for HTTP.

An answer ends with a token that ends texts, with a stop string, or with the limit of tokens. Texts become
whole characters in `text_stream`; log-probabilities are held back together with the text of their tokens.

Source of the JSON: the HTTP interface of OpenAI (completions, chat completions, server-sent events), which
the client libraries of many languages speak. Parameters of other samplers (`top_k`, `min_p`,
`repeat_penalty`, `repeat_window`) are added. Invariant: a parameter that is not listed here is refused by its
name.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn

from pydantic import Field, ValidationError

from paceline.checkpoint.strict_json import StrictModel
from paceline.errors import NumericError, RequestError
from paceline.serving.engine import Engine, FinishReason, GenerationRequest, TokenEvent
from paceline.serving.load_model import ServedModel
from paceline.serving.sampling import SamplingOptions
from paceline.serving.text_stream import TextStream

if TYPE_CHECKING:
    import jinja2

_MAX_STOP_STRINGS, _MAX_STOP_CHARACTERS = 16, 256


class AnswerPart(NamedTuple):
    """A part of an answer.

    Args:
        text: that has become final.
        events: the tokens of it; a part of a character may be in an earlier part.
        finish_reason: None: the answer goes on.
    """

    text: str
    events: tuple[TokenEvent, ...]
    finish_reason: FinishReason | None


class Answer:
    """The text of one request.

    Args:
        served: the model.
        request: as the engine gets it.
        stop: strings that end the text and are not part of it.
    Raises:
        RequestError: a stop string is empty or too long, or there are too many.

    Attributes:
        num_tokens: generated so far, with the one that ends the text.
    """

    def __init__(self, served: ServedModel, request: GenerationRequest, stop: Sequence[str] = ()) -> None:
        _check_stop_strings(stop)
        self._end_tokens = served.tokenizer.end_tokens
        self._stream = TextStream(served.tokenizer.detokenizer(request.prompt), stop)
        self._events: list[TokenEvent] = []
        self.num_tokens = 0

    def push(self, event: TokenEvent) -> AnswerPart | None:
        """Return the part that is final with a token; None: there is no new text yet.

        Raises:
            NumericError: the logits of the model are not finite.
        """
        if event.finish_reason == "error":
            raise NumericError(
                f"the model's logits after {self.num_tokens} new tokens are not finite",
                next_step="use an earlier checkpoint",
            )
        self.num_tokens += 1
        reason = event.finish_reason
        if event.token in self._end_tokens:
            text, reason = self._stream.finish(), "stop"
        else:
            self._events.append(event)
            text = self._stream.push(event.token)
            if reason is not None:
                text += self._stream.finish()
            if self._stream.stopped:
                reason = "stop"
        if not text and reason is None:
            return None
        events, self._events = tuple(self._events), []
        return AnswerPart(text, events, reason)


def _check_stop_strings(stop: Sequence[str]) -> None:
    if len(stop) > _MAX_STOP_STRINGS:
        raise RequestError(
            f"there are {len(stop)} stop strings",
            parameter="stop",
            next_step=f"give at most {_MAX_STOP_STRINGS}",
        )
    for text in stop:
        if not 0 < len(text) <= _MAX_STOP_CHARACTERS:
            raise RequestError(
                f"a stop string has {len(text)} characters",
                parameter="stop",
                next_step=f"give 1 to {_MAX_STOP_CHARACTERS} characters",
            )


def encode_prompt(
    served: ServedModel, prompt: str | Sequence[int], *, add_markers: bool = True
) -> tuple[int, ...]:
    """Return the tokens of a prompt, which may be text or tokens.

    Raises:
        RequestError: the text is not Unicode, or is far too long for the context.
    """
    if not isinstance(prompt, str):
        return tuple(prompt)
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt has half of a surrogate pair at character {error.start}, which is no Unicode text",
            parameter="prompt",
            next_step="send valid Unicode",
        ) from error
    return tuple(served.tokenizer.encode(prompt, add_markers=add_markers))


MAX_TEXTS = 64
"""Most texts of one request: prompts times `n`."""
_DEFAULTS = SamplingOptions()
_DEFAULT_TOKENS = 100  # of a completion; a chat ends by itself
_NUM_SEEDS = 2**64


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        RequestError: it is not JSON; NaN and Infinity are not.
    """

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON number")

    try:
        return json.loads(data, parse_constant=refuse)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)[:200]
    raise RequestError(f"the body is not JSON: {reason}", next_step="send a JSON object")


class _StreamOptions(StrictModel):
    include_usage: bool = False


class _Body(StrictModel):
    """Parameters of completions and chats."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = _DEFAULTS.temperature
    top_p: float = _DEFAULTS.top_p
    top_k: int = _DEFAULTS.top_k
    min_p: float = _DEFAULTS.min_p
    repeat_penalty: float = _DEFAULTS.repeat_penalty
    repeat_window: int = _DEFAULTS.repeat_window
    seed: int = _DEFAULTS.seed
    n: Annotated[int, Field(ge=1)] = 1
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None

    def sampling(self, index: int, logprobs: int | None) -> SamplingOptions:
        """Return the options of one text; each has a seed of its own."""
        return SamplingOptions(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            repeat_window=self.repeat_window,
            # A seed out of range is refused by the options and not taken modulo.
            seed=(self.seed + index) % _NUM_SEEDS if 0 <= self.seed < _NUM_SEEDS else self.seed,
            logprobs=logprobs,
        )


class _CompletionBody(_Body):
    prompt: Any
    logprobs: int | None = None


class _TextContent(StrictModel):
    type: Literal["text"]
    text: str


class _ChatMessage(StrictModel):
    role: str
    content: str | list[_TextContent]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Return the message as a chat template reads it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class _ChatBody(_Body):
    messages: Annotated[list[_ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


def _validate(kind: type[Any], value: Any) -> Any:
    """Return the validated body.

    Raises:
        RequestError: names the first parameter that is wrong or unknown.
    """
    if not isinstance(value, dict):
        raise RequestError("the body is not a JSON object", next_step='send {"prompt": "..."}')
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name, kind_of_error = str(first["loc"][0])[:80], first["type"]
    place = ".".join(str(part)[:80] for part in first["loc"])
    if kind_of_error == "extra_forbidden":
        raise RequestError(
            f"there is no parameter '{place}'",
            parameter=name,
            next_step="leave it out: it would have no effect",
        )
    if kind_of_error == "missing":
        raise RequestError(f"the parameter '{place}' is missing", parameter=name, next_step="send it")
    raise RequestError(f"{place}: {first['msg']}", parameter=name, next_step="see docs/howto/serve.md")


@dataclass(frozen=True)
class PreparedRequest:
    """A request that was checked.

    Args:
        id: of the answer.
        requests: of all texts: the prompts in their order, and of each its `n` texts.
        answers: of the same texts.
        streams: whether parts are sent as server-sent events.
        includes_usage: whether the last of them has the number of tokens.
        num_logprobs: of each token; None: no log-probabilities.
        created: seconds since 1970.
        head: the first fields of a part, as JSON without the closing brace; equal in all parts.
        frames: by text, what is around the text of a part without log-probabilities; filled by `event`.
    """

    id: str
    requests: Sequence[GenerationRequest]
    answers: Sequence[Answer]
    streams: bool
    includes_usage: bool
    num_logprobs: int | None
    created: int
    head: str
    frames: dict[int, list[str]] = field(default_factory=dict)


_TEXT = "\0"  # in a frame; names of models have none
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def render_event(value: Mapping[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {_encode(value)}\n\n"


class _Api:
    """Parameters that completions and chats share."""

    prefix: ClassVar[str]
    whole: ClassVar[str]
    part: ClassVar[str]

    def __init__(self, served: ServedModel, engine: Engine) -> None:
        self.served, self._engine = served, engine

    def _prepare(
        self,
        body: _Body,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int | None,
        logprobs: int | None,
        limit: int,
    ) -> PreparedRequest:
        served, stop = self.served, [body.stop] if isinstance(body.stop, str) else body.stop or []
        if body.model is not None and body.model != served.name:
            raise RequestError(
                f"there is no model '{body.model[:80]}'", parameter="model", next_step=f"use '{served.name}'"
            )
        if len(prompts) * body.n > MAX_TEXTS:
            raise RequestError(
                f"{len(prompts)} prompts with n = {body.n} are {len(prompts) * body.n} texts",
                parameter="n",
                next_step=f"ask for at most {MAX_TEXTS}",
            )
        if limit and max_tokens is not None and max_tokens > limit:
            raise RequestError(
                f"max_tokens is {max_tokens}, and this server allows {limit}",
                parameter="max_tokens",
                next_step=f"give a number from 1 to {limit}",
            )
        requests = [
            GenerationRequest(
                prompt,
                self._within_limit(prompt, max_tokens, limit),
                body.sampling(index, logprobs),
                served.tokenizer.end_tokens,
            )
            for prompt in prompts
            for index in range(body.n)
        ]
        for request in requests:
            self._engine.check(request)
        options = body.stream_options or _StreamOptions()
        name, created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        return PreparedRequest(
            id=name,
            requests=requests,
            answers=[Answer(served, request, stop) for request in requests],
            streams=body.stream,
            includes_usage=options.include_usage,
            num_logprobs=logprobs,
            created=created,
            head=_encode(self._head(name, self.part, created))[:-1],
        )

    def _within_limit(self, prompt: tuple[int, ...], max_tokens: int | None, limit: int) -> int | None:
        """Return the number of tokens of a text; None is what the context has room for."""
        if max_tokens is not None or not limit:
            return max_tokens
        return max(1, min(limit, self._engine.context - len(prompt)))

    def render(self, prepared: PreparedRequest, parts: Sequence[Sequence[AnswerPart]]) -> dict[str, Any]:
        """Return a whole answer."""
        choices = []
        for index, own in enumerate(parts):
            text = "".join(part.text for part in own)
            events = [event for part in own for event in part.events]
            choice = self._choice(prepared, index, text, events)
            choices.append({**choice, "finish_reason": own[-1].finish_reason})
        head = self._head(prepared.id, self.whole, prepared.created)
        return {**head, "choices": choices, "usage": _usage(prepared)}

    def event(self, prepared: PreparedRequest, index: int, part: AnswerPart) -> str:
        """Return a part of an answer as a server-sent event."""
        if prepared.num_logprobs is None and part.finish_reason is None and part.text != _TEXT:
            if index not in prepared.frames:
                whole = self.event(prepared, index, AnswerPart(_TEXT, (), None))
                prepared.frames[index] = whole.split(_encode(_TEXT))
            before, after = prepared.frames[index]
            return f"{before}{_encode(part.text)}{after}"
        choice = self._delta(prepared, index, part.text, part.events)
        return self._event(prepared, [{**choice, "finish_reason": part.finish_reason}])

    def first_events(self, prepared: PreparedRequest) -> Iterator[str]:
        """Yield what comes before all parts."""
        return iter(())

    def last_events(self, prepared: PreparedRequest) -> Iterator[str]:
        """Yield what comes after all parts."""
        if prepared.includes_usage:
            yield self._event(prepared, [], _usage(prepared))

    def _event(
        self, prepared: PreparedRequest, choices: list[dict[str, Any]], usage: dict[str, int] | None = None
    ) -> str:
        fields = {"choices": choices, "usage": usage} if prepared.includes_usage else {"choices": choices}
        return f"data: {prepared.head},{_encode(fields)[1:]}\n\n"

    def _head(self, name: str, kind: str, created: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": kind,
            "created": created,
            "model": self.served.name,
            "system_fingerprint": self._engine.fingerprint,
        }

    def _choice(
        self, prepared: PreparedRequest, index: int, text: str, events: Sequence[TokenEvent]
    ) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(
        self, prepared: PreparedRequest, index: int, text: str, events: Sequence[TokenEvent]
    ) -> dict[str, Any]:
        raise NotImplementedError

    def _token_text(self, token: int) -> str:
        """Return a token as text; bytes that are part of a character are written out."""
        data = self.served.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _usage(prepared: PreparedRequest) -> dict[str, int]:
    # One prompt of several texts counts once, as in the interface that this follows.
    prompts = {id(request.prompt): len(request.prompt) for request in prepared.requests}
    num_prompt, num_new = sum(prompts.values()), sum(answer.num_tokens for answer in prepared.answers)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


class CompletionApi(_Api):
    """`/v1/completions`: a prompt of text or tokens is continued."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def prepare(self, value: Any, limit: int) -> PreparedRequest:
        """Check a request.

        Args:
            value: parsed JSON.
            limit: most tokens of a text; 0: none.
        Raises:
            RequestError: names the parameter that is wrong.
        """
        body: _CompletionBody = _validate(_CompletionBody, value)
        prompts = [encode_prompt(self.served, prompt) for prompt in _split_prompts(body.prompt)]
        max_tokens = body.max_tokens
        if max_tokens is None:
            room = self._engine.context - max((len(prompt) for prompt in prompts), default=0)
            max_tokens = max(1, min(_DEFAULT_TOKENS, room, limit or room))
        return self._prepare(body, prompts, max_tokens, body.logprobs, limit)

    def _choice(
        self, prepared: PreparedRequest, index: int, text: str, events: Sequence[TokenEvent]
    ) -> dict[str, Any]:
        logprobs = None if prepared.num_logprobs is None else self._logprobs(events)
        seed = prepared.requests[index].sampling.seed
        return {"index": index, "text": text, "logprobs": logprobs, "seed": seed}

    _delta = _choice

    def _logprobs(self, events: Sequence[TokenEvent]) -> dict[str, Any]:
        return {
            "tokens": [self._token_text(event.token) for event in events],
            "token_logprobs": [event.logprob for event in events],
            "top_logprobs": [
                {self._token_text(token): logprob for token, logprob in event.top_logprobs}
                for event in events
            ],
        }


def _split_prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts of a request: a text, tokens, or a list of these.

    Raises:
        RequestError: it is something else.
    """
    if prompt != [] and _is_prompt(prompt):
        return [prompt]
    if type(prompt) is list and prompt and all(map(_is_prompt, prompt)):
        return prompt
    raise RequestError(
        "the prompt is neither a text nor a list of tokens, nor a list of these",
        parameter="prompt",
        next_step='send "prompt": "some text"',
    )


def _is_prompt(value: Any) -> bool:
    return type(value) is str or (type(value) is list and all(type(token) is int for token in value))


class ChatApi(_Api):
    """`/v1/chat/completions`: messages become a prompt by the chat template of the model."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, served: ServedModel, engine: Engine) -> None:
        super().__init__(served, engine)
        self._template = None if served.chat_template is None else compile_template(served.chat_template)

    def prepare(self, value: Any, limit: int) -> PreparedRequest:
        """Check a request; arguments and errors as for completions."""
        body: _ChatBody = _validate(_ChatBody, value)
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise RequestError(
                "max_tokens and max_completion_tokens are the same",
                parameter="max_completion_tokens",
                next_step="send one of them",
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError(
                "top_logprobs has no effect without logprobs",
                parameter="top_logprobs",
                next_step='send "logprobs": true, too',
            )
        prompt = encode_prompt(self.served, self._render_messages(body.messages), add_markers=False)
        max_tokens = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
        return self._prepare(
            body, [prompt], max_tokens, (body.top_logprobs or 0) if body.logprobs else None, limit
        )

    def _render_messages(self, messages: Sequence[_ChatMessage]) -> str:
        if self._template is None:
            raise RequestError(
                f"the model {self.served.name} has no chat template, so it has no chats",
                parameter="messages",
                next_step="use /v1/completions, or put a chat_template.jinja into its folder",
            )
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=[message.plain() for message in messages],
                add_generation_prompt=True,
                **self.served.marker_texts,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RequestError(
                f"the chat template refuses these messages: {str(error)[:300]}",
                parameter="messages",
                next_step="send the roles in the order that the model expects",
            ) from error

    def _choice(
        self, prepared: PreparedRequest, index: int, text: str, events: Sequence[TokenEvent]
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, **self._facts(prepared, index, events)}

    def _delta(
        self, prepared: PreparedRequest, index: int, text: str, events: Sequence[TokenEvent]
    ) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, **self._facts(prepared, index, events)}

    def first_events(self, prepared: PreparedRequest) -> Iterator[str]:
        for index in range(len(prepared.requests)):
            delta = {"role": "assistant", "content": ""}
            yield self._event(prepared, [{"index": index, "delta": delta, "finish_reason": None}])

    def _facts(self, prepared: PreparedRequest, index: int, events: Sequence[TokenEvent]) -> dict[str, Any]:
        content = None if prepared.num_logprobs is None else [self._logprob(event) for event in events]
        seed = prepared.requests[index].sampling.seed
        return {"logprobs": None if content is None else {"content": content, "refusal": None}, "seed": seed}

    def _logprob(self, event: TokenEvent) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in event.top_logprobs]
        return {**self._token(event.token, event.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = list(self.served.tokenizer.token_bytes(token))
        return {"token": self._token_text(token), "logprob": logprob, "bytes": data}


def compile_template(text: str) -> jinja2.Template:
    """Compile a chat template, which comes from whoever made the model, in the sandbox of jinja2.

    Raises:
        RequestError: it is not valid.
    """

    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise RequestError(
            f"the chat template of the model is not valid: {error}", next_step="correct chat_template.jinja"
        ) from error
