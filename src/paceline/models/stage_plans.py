"""Pipeline stages of models of Hugging Face Transformers, by `model.config.model_type` and class.

The chain is the embeddings, one link per block, and the head. The first link runs the model's own forward up
to its blocks and records what each would be called with: masks, rotary tables, flags. So masks are made by
the installed version of Transformers, whatever its blocks take and return. The arguments go with the hidden
states from link to link: tensors once, however many blocks use them, and a layout that says where they
belong. The layout travels too, because it can differ between micro-batches: without padding, some versions
pass no mask.

Invariant: each block is called with the arguments that the model's forward passes to it.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from paceline.errors import TaskError


class StagePlan(NamedTuple):
    """Names of modules in the base model (`model.base_model`).

    Args:
        first: what runs before the blocks.
        blocks: the `nn.ModuleList` of the blocks.
        last: what runs after the blocks and before the head.
    """

    first: Sequence[str]
    blocks: str
    last: Sequence[str]


class HeadPlan(NamedTuple):
    """Modules of a model after its base model, called one after another; their result is `logits`.

    Args:
        output: name of the class in `transformers.modeling_outputs` that the model returns.
    """

    modules: Sequence[str]
    output: str


_DECODER = StagePlan(("embed_tokens", "rotary_emb"), "layers", ("norm",))

STAGE_PLANS: Mapping[str, StagePlan] = {
    "gpt2": StagePlan(("wte", "wpe", "drop"), "h", ("ln_f",)),
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "bert": StagePlan(("embeddings",), "encoder.layer", ()),
}

_CAUSAL = HeadPlan(("lm_head",), "CausalLMOutputWithPast")

HEAD_PLANS: Mapping[str, HeadPlan] = {
    "GPT2LMHeadModel": HeadPlan(("lm_head",), "CausalLMOutputWithCrossAttentions"),
    "LlamaForCausalLM": _CAUSAL,
    "MistralForCausalLM": _CAUSAL,
    "Qwen2ForCausalLM": _CAUSAL,
    "Qwen3ForCausalLM": _CAUSAL,
    "BertForMaskedLM": HeadPlan(("cls",), "MaskedLMOutput"),
    "BertForSequenceClassification": HeadPlan(
        ("bert.pooler", "dropout", "classifier"), "SequenceClassifierOutput"
    ),
    "BertForTokenClassification": HeadPlan(("dropout", "classifier"), "TokenClassifierOutput"),
}

_HEAD_ARGUMENTS = {
    "labels": "compute the loss from model(...).logits",
    "logits_to_keep": "slice model(...).logits in the loss",
    "return_dict": "leave return_dict out, and read model(...).logits",
}
"""Arguments that the head needs, which is on another stage than the call; what to do instead."""


def stages_of(model: nn.Module) -> list[nn.Module] | None:
    """Return the shipped chain of a model; None if there is none.

    The last link returns the output class of the model, with `logits` only.
    """
    plan = STAGE_PLANS.get(getattr(getattr(model, "config", None), "model_type", ""))
    head = HEAD_PLANS.get(type(model).__name__)
    if plan is None or head is None:
        return None
    base: nn.Module = model.get_submodule(str(model.base_model_prefix))
    blocks = base.get_submodule(plan.blocks)
    assert isinstance(blocks, nn.ModuleList)
    ends = [base.get_submodule(name) for name in plan.last]
    ends += [model.get_submodule(name) for name in head.modules]
    return [
        EmbeddingLink(model, base, plan),
        *(BlockLink(block, number) for number, block in enumerate(blocks)),
        HeadLink(ends, head.output),
    ]


class EmbeddingLink(nn.Module):
    """Link that runs a model up to its blocks, and returns hidden states, the layout and other tensors."""

    def __init__(self, model: nn.Module, base: nn.Module, plan: StagePlan) -> None:
        super().__init__()
        self.parts = nn.ModuleList(base.get_submodule(name) for name in plan.first)
        # In a tuple, so that the parameters of the other stages are not this link's.
        self._whole, self._blocks = (model, base), plan.blocks

    def forward(self, *inputs: Any, **named: Any) -> tuple[Tensor, ...]:
        """Return the arguments of `BlockLink`.

        Args:
            inputs, named: arguments of the model.
        Raises:
            TaskError: the head needs one of them, or a block is called with something that cannot be sent.
        """
        model, base = self._whole
        parameters = inspect.signature(model.forward).parameters
        passed = {**dict(zip(parameters, inputs, strict=False)), **named}
        for name, advice in _HEAD_ARGUMENTS.items():
            # 0 and None are what the model takes if the loss does not pass them; a tensor is neither, and
            # return_dict=False is not its default.
            value = passed.get(name)
            if value is not None and (isinstance(value, (Tensor, bool)) or value != 0):
                raise TaskError(
                    f"the loss passes {name} to {type(model).__name__}, but the stage that is called first"
                    " does not have the head",
                    next_step=advice,
                )
        if "use_cache" in parameters:
            # Keys and values of earlier calls are for generation; they change no result.
            inputs, named = (), {**passed, "use_cache": False}
        calls = _record_block_calls(model, base, self._blocks, inputs, named)
        return _pack(calls)


class BlockLink(nn.Module):
    """Link that runs one block with the arguments that the layout names for it."""

    def __init__(self, block: nn.Module, number: int) -> None:
        super().__init__()
        self.block, self._number = block, number

    def forward(self, hidden: Tensor, layout: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return new hidden states, and the rest as it came.

        Args:
            hidden: hidden states, shape (samples, positions, width).
            layout: bytes of the call layout, uint8, shape (bytes,).
            others: the tensors that it names.
        """
        call_layout = _read_layout(layout)
        # Nothing trains them, so no gradient of them has to be computed; the neighbour gets zeros.
        others = tuple(
            x.detach() if fixed else x for x, fixed in zip(others, call_layout["fixed"], strict=True)
        )
        inputs, named = (
            _decode(x, others) for x in call_layout["calls"][call_layout["call_of"][self._number]]
        )
        result = self.block(hidden, *inputs, **named)
        return (_first(result), layout, *others)


class HeadLink(nn.Module):
    """Link that runs what follows the blocks, and returns the output of the model."""

    def __init__(self, parts: Sequence[nn.Module], output: str) -> None:
        super().__init__()
        self.parts, self._output = nn.ModuleList(parts), output

    def forward(self, hidden: Tensor, layout: Tensor, *others: Tensor) -> Any:
        """Return the model's output, with `logits`; arguments as of `BlockLink`."""
        for part in self.parts:
            hidden = part(hidden)
        outputs = importlib.import_module("transformers.modeling_outputs")
        return getattr(outputs, self._output)(logits=hidden)


class _BlockCall(NamedTuple):
    hidden: Tensor
    inputs: tuple[Any, ...]
    named: dict[str, Any]


class _BlocksReached(BaseException):
    """Exception that ends a forward at the last block; no `except Exception` stops it."""


class _BlockStandIn(nn.Module):
    """Stand-in for a block that records its arguments; the last one ends the forward."""

    def __init__(self, block: nn.Module, calls: list[_BlockCall], *, is_last: bool) -> None:
        super().__init__()
        self._block, self._calls, self._is_last = (block,), calls, is_last

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the block, since some versions read its kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"][0], name)

    def forward(self, hidden: Any, *inputs: Any, **named: Any) -> tuple[Tensor]:
        hidden = _first(hidden)
        self._calls.append(_BlockCall(hidden, inputs, named))
        if self._is_last:
            raise _BlocksReached
        # A version whose blocks return tuples takes the first; in others the next stand-in does.
        return (hidden,)


def _record_block_calls(
    model: nn.Module, base: nn.Module, blocks_name: str, inputs: Sequence[Any], named: Mapping[str, Any]
) -> list[_BlockCall]:
    calls: list[_BlockCall] = []
    with _standing_in(base, blocks_name, calls):
        try:
            model.forward(*inputs, **named)
        except _BlocksReached:
            return calls
        except (RuntimeError, NotImplementedError) as error:
            if any(isinstance(x, Tensor) and x.is_meta for x in [*inputs, *named.values()]):
                raise TaskError(
                    f"{type(model).__name__} reads values of its inputs, such as a mask, and cannot be"
                    f" measured without them: {error}",
                    next_step="give the numbers of modules, such as stages=7,7, instead of stages=time",
                ) from error
            raise
    raise TaskError(
        f"{type(model).__name__} returned without running all of its blocks",
        next_step="pass Task(stages=lambda model: [first, ...]), or choose a strategy without pipeline",
    )


@contextmanager
def _standing_in(base: nn.Module, blocks_name: str, calls: list[_BlockCall]) -> Iterator[None]:
    """Replace the blocks by stand-ins while a `with` block runs."""
    parent_name, _, name = blocks_name.rpartition(".")
    parent = base.get_submodule(parent_name)
    blocks = parent._modules[name]
    assert isinstance(blocks, nn.ModuleList)
    number_of_last = len(blocks) - 1
    stand_ins = [_BlockStandIn(block, calls, is_last=k == number_of_last) for k, block in enumerate(blocks)]
    parent._modules[name] = nn.ModuleList(stand_ins)
    try:
        yield
    finally:
        parent._modules[name] = blocks


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _pack(calls: Sequence[_BlockCall]) -> tuple[Tensor, ...]:
    """Return the hidden states, the layout of all calls as bytes, and the other tensors."""
    others: list[Tensor] = []
    encoded: list[Any] = []
    call_of: list[int] = []
    for call in calls:
        arguments = [_encode(call.inputs, others), _encode(call.named, others)]
        # Most blocks are called alike, so their arguments are sent once.
        if arguments not in encoded:
            encoded.append(arguments)
        call_of.append(encoded.index(arguments))
    layout = {"calls": encoded, "call_of": call_of, "fixed": [not x.requires_grad for x in others]}
    content = torch.tensor(list(json.dumps(layout).encode()), dtype=torch.uint8)
    hidden = calls[-1].hidden
    content = content.to(hidden.device)
    # For links of the same stage, and for tensors without values (on the meta device).
    content.__dict__["call_layout"] = layout
    return (hidden, content, *others)


def _read_layout(content: Tensor) -> dict[str, Any]:
    """Return the layout of a chain's calls; it is read once per message, since reading waits for a GPU."""
    if "call_layout" not in content.__dict__:
        try:
            content.__dict__["call_layout"] = json.loads(bytes(content.tolist()))
        except (ValueError, NotImplementedError):
            raise TaskError(
                "a block of a Transformers model was called without the arguments of its model",
                next_step="give the numbers of modules, such as stages=7,7, instead of stages=time",
            ) from None
    layout: dict[str, Any] = content.__dict__["call_layout"]
    return layout


def _encode(value: Any, others: list[Tensor]) -> Any:
    """Return an argument as JSON values; tensors are appended to `others`, each once."""
    if type(value) in (NoneType, bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        index = next((k for k, x in enumerate(others) if x is value), len(others))
        if index == len(others):
            others.append(value)
        return {"tensor": index}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_encode(x, others) for x in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode(x, others) for key, x in value.items()}}
    raise _unsendable(value)


def _unsendable(value: Any) -> TaskError:
    return TaskError(
        f"the model passes {type(value).__name__} to its blocks, but stages can only send tensors, numbers,"
        " texts and containers of them",
        next_step="leave that argument out of the call of the model, or choose a strategy without pipeline",
    )


def _decode(value: Any, others: Sequence[Tensor]) -> Any:
    """Return the argument that `_encode` has encoded."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return others[content]
    if kind == "dict":
        return {key: _decode(x, others) for key, x in content.items()}
    items = [_decode(x, others) for x in content]
    return tuple(items) if kind == "tuple" else items


def refuse_to_stage(model: nn.Module) -> NoReturn:
    """Raise TaskError for a model that is no chain and has no shipped stages."""
    is_known = hasattr(getattr(model, "config", None), "model_type")
    shipped = f" nor one of those with shipped stages ({', '.join(HEAD_PLANS)})" if is_known else ""
    raise TaskError(
        f"a pipeline splits a chain of modules, but {type(model).__name__} is not nn.Sequential{shipped}",
        next_step="pass Task(stages=lambda model: [first, ...]), or choose a strategy without pipeline",
    )
