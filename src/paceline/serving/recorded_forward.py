"""A forward as a list of PyTorch functions: recorded once, then replayed without the model's Python code.

`ForwardRecorder` is a function mode around one forward. It keeps the functions that were called, and which
results they were called with; `RecordedForward` calls the same functions in the same order on other inputs of
the same shapes, so it computes the same bits. A small model spends much of a step in Python code.

Invariant: what is replayed depends on nothing but tensors. A forward is refused that reads values of tensors
in Python, whose shapes depend on values, or that computes where the recorder does not see it. Sizes and other
Python values stay what they were. Parameters and buffers are kept as objects, so their values may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import getitem, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_METADATA = frozenset(
    [
        *("__get__", "__len__", "__hash__", "can_cast", "dim", "element_size", "get_device", "is_complex"),
        *("is_contiguous", "is_floating_point", "is_inference", "is_same_size", "is_signed", "is_tensor"),
        *("ndimension", "nelement", "numel", "result_type", "size", "storage_offset", "stride"),
    ]
)
"""Names of functions of a tensor whose result is no tensor, and does not depend on values."""
_IDENTITIES = frozenset(
    [torch.Tensor.contiguous, torch.Tensor.float, torch.Tensor.to, torch.Tensor.type, F.dropout]
)
"""Functions that are left out of a replay where they returned their argument: they then do nothing."""


class _Call(NamedTuple):
    """One call of a replay.

    Args:
        function: takes the values of the registers as positional arguments.
        sources: registers of the arguments.
        target: register of the result.
    """

    function: Callable[..., Any]
    sources: tuple[int, ...]
    target: int


class RecordedForward:
    """A recorded forward that can be called like the model.

    Args:
        calls: in order.
        constants: values of all registers before the first call; the first ones are those of the inputs.
        result: register of the result.
    """

    def __init__(self, calls: Sequence[_Call], constants: Sequence[Any], result: int) -> None:
        self._constants, self._result = list(constants), result
        last_use = {source: i for i, call in enumerate(calls) for source in call.sources}
        computed = {call.target for call in calls} - {result}
        dead: list[list[int]] = [[] for _ in calls]
        for i, call in enumerate(calls):
            if call.target in computed:
                dead[last_use.get(call.target, i)].append(call.target)
        self._steps = [
            (call.function, _reader(call.sources), call.target, tuple(dead[i]))
            for i, call in enumerate(calls)
        ]

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the result for inputs of the recorded shapes."""
        registers = self._constants.copy()
        registers[: len(inputs)] = inputs
        for function, read, target, dead in self._steps:
            registers[target] = function(*read(registers))
            for register in dead:
                registers[register] = None  # its memory is free for the next results
        return registers[self._result]


def _reader(sources: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function of all registers that returns some of them."""
    if len(sources) > 1:
        return itemgetter(*sources)
    start, stop = (sources[0], sources[0] + 1) if sources else (0, 0)
    return itemgetter(slice(start, stop))


class ForwardRecorder(TorchFunctionMode):
    """Mode that records the functions of PyTorch that a forward calls.

    Args:
        inputs: tensors that a replay replaces.

    Attributes:
        refusal: why the forward cannot be replayed; empty if it can.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.refusal = ""
        self._calls: list[_Call] = []
        self._constants: list[Any] = []
        # Tensors are known by their ids, so all of them stay alive.
        self._registers: dict[int, int] = {}
        self._alive: list[Any] = []
        self.depth = 0
        for x in inputs:
            self._register(x)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return the context manager of the forward."""
        with _OperatorWatch(self), self:
            yield

    def refuse(self, reason: str) -> None:
        """Keep the first reason why the forward cannot be replayed."""
        self.refusal = self.refusal or reason

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function and record it, unless it is part of one that is recorded."""
        if self.depth:
            return func(*args, **(kwargs or {}))
        return self.call(func, *args, **(kwargs or {}))

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and record it as a whole if it computes."""
        self.depth += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self.depth -= 1
        name = getattr(function, "__name__", "")
        is_plain = result is not None and not _has_tensors(result)
        if is_plain and name not in _METADATA and _has_tensors([args, dict(kwargs)]):
            self.refuse(f"it reads values by {name}")
        does_nothing = function in _IDENTITIES and args and result is args[0]
        if not does_nothing and not is_plain:
            self._record(function, args, kwargs, result)
        return result

    def _record(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        named = [name for name, value in kwargs.items() if _has_tensors(value)]
        fixed = {name: value for name, value in kwargs.items() if name not in named}
        if fixed:
            function = partial(function, **fixed)
        if named:
            function = partial(_call_by_name, function, tuple(named))
        target = self._append(function, [*args, *(kwargs[name] for name in named)])
        self._keep(result, target)

    def _append(self, function: Callable[..., Any], args: Sequence[Any]) -> int:
        sources = tuple(map(self._source, args))
        target = self._register(None)
        self._calls.append(_Call(function, sources, target))
        return target

    def _source(self, value: Any) -> int:
        """Return the register of an argument; containers of tensors are built in the replay."""
        if isinstance(value, Tensor):
            known = self._registers.get(id(value))
            return self._register(value) if known is None else known
        if isinstance(value, (list, tuple)) and _has_tensors(value):
            return self._append(partial(_collect, type(value)), value)
        if _has_tensors(value):
            self.refuse(f"an argument is a {type(value).__name__} with tensors")
        return self._register(value)

    def _register(self, value: Any) -> int:
        self._constants.append(value)
        if isinstance(value, Tensor):
            self._registers[id(value)] = len(self._constants) - 1
        return len(self._constants) - 1

    def _keep(self, result: Any, register: int) -> None:
        """Remember where the tensors of a result are."""
        if isinstance(result, Tensor):
            self._alive.append(result)
            self._registers[id(result)] = register
        elif isinstance(result, (list, tuple)):
            for index, value in enumerate(result):
                if _has_tensors(value):
                    self._keep(value, self._append_item(register, index))
        elif _has_tensors(result):
            self.refuse(f"a result is a {type(result).__name__} with tensors")

    def _append_item(self, register: int, index: int) -> int:
        target = self._register(None)
        self._calls.append(_Call(getitem, (register, self._register(index)), target))
        return target

    def finish(self, result: Tensor) -> RecordedForward | None:
        """Return the recorded forward; None if it was refused.

        Args:
            result: of the forward.
        """
        register = self._registers.get(id(result))
        if register is None:
            self.refuse("its result is no result of a function")
        return None if self.refusal or register is None else self._build(register)

    def _build(self, register: int) -> RecordedForward:
        return RecordedForward(self._calls, self._constants, register)


class _OperatorWatch(TorchDispatchMode):
    """Mode that sees every operator: refuses those that no recorded function calls, and reads of values.

    Args:
        recorder: of the forward.
    """

    def __init__(self, recorder: ForwardRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operator."""
        if not self._recorder.depth:
            self._recorder.refuse(f"it calls {func} where no function of PyTorch is seen")
        if _depends_on_values(func, args):
            self._recorder.refuse(f"it calls {func}, whose result in Python depends on values")
        return func(*args, **(kwargs or {}))


def _depends_on_values(operator: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator returns a value of a tensor, or a shape that depends on one."""
    if operator is torch.ops.aten.index.Tensor:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operator.tags))


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _collect(kind: type, *values: Any) -> Any:
    return list(values) if kind is list else tuple(values)


def _call_by_name(function: Callable[..., Any], names: tuple[str, ...], *args: Any) -> Any:
    """Call a function whose last arguments have names."""
    first = len(args) - len(names)
    return function(*args[:first], **dict(zip(names, args[first:], strict=True)))
