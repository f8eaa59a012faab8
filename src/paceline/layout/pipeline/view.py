"""Stand-ins for the model on a stage, so that the user writes one loss for every layout.

The first stage runs the loss until it calls the model: that is what goes into the pipeline, whatever the loss
does to the batch before. The last stage answers that call with what came out. The loss must call the model
once, and must not look into it: a stage holds a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from torch import nn

from paceline.errors import TaskError
from paceline.layout.placed import Ask


class Call(NamedTuple):
    """The arguments of a model."""

    inputs: tuple[Any, ...]
    named: dict[str, Any]


def asked(loss: Ask, batch: Any, *, training: bool) -> Call:
    """See `Asks.of`."""
    return Asks().of(loss, batch, training=training)


class _Asked(BaseException):
    """Ends the loss where it calls the model; no `except Exception` of the user's takes it for an error."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class _StandIn(nn.Module):
    def named_modules(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Parameters, buffers and modules are all found through this."""
        raise TaskError(
            "the loss looks at the model's parameters or modules, and a stage holds a part of them",
            next_step="use optimizer.weight_decay or l2 for a penalty, or choose a strategy without pipeline",
        )


class Asks(_StandIn):
    """Finds out what a model is called with; for any number of batches."""

    def of(self, loss: Ask, batch: Any, *, training: bool) -> Call:
        """What the loss, or whatever else asks, calls the model with, for a batch.

        Raises:
            TaskError: it never does, or it looks at the model's parameters before.
        """
        self.training = training
        try:
            loss(self, batch)
        except _Asked as found:
            return found.call
        raise TaskError(
            "the loss never called the model", next_step="call it: loss(model, batch) computes model(...)"
        )

    def forward(self, *inputs: Any, **named: Any) -> NoReturn:
        raise _Asked(Call(inputs, named))


class Answers(_StandIn):
    """Answers the call of the loss with what the pipeline has computed; for any number of batches.

    Raises:
        TaskError: a second call; it would be answered with the result of the first.
    """

    def __init__(self, answer: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._answer = answer

    def by(self, answer: Callable[[], Any], *, training: bool) -> Answers:
        """Itself, for the next batch.

        Args:
            answer: makes what came out of the model.
        """
        self._answer, self.training = answer, training
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        answer, self._answer = self._answer, None
        if answer is None:
            raise TaskError(
                "the loss calls the model twice, and a pipeline runs a batch once",
                next_step="put both parts into one batch, or choose a strategy without pipeline",
            )
        return answer()
