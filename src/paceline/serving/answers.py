"""An answer: the tokens that an engine generates for a request, as text.

It ends with a token that ends texts, with a stop string, or with the limit of tokens. Texts become whole
characters in `text_stream`; log-probabilities are held back together with the text of their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import RequestError
from paceline.serving.engine import FinishReason, GenerationRequest, TokenEvent
from paceline.serving.load_model import ServedModel
from paceline.serving.sampling import SamplingOptions
from paceline.serving.text_stream import TextStream

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
        """Return the part that is final with a token; None: there is no new text yet."""
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


def generation_request(
    served: ServedModel, prompt: tuple[int, ...], max_tokens: int | None, sampling: SamplingOptions
) -> GenerationRequest:
    """Return the request for an engine; it ends with the end tokens of the model."""
    return GenerationRequest(prompt, max_tokens, sampling, served.tokenizer.end_tokens)
