"""Guard of freed parameters: an operation on one gathers it first or raises, and never reads freed memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

# None of these reads the values, so none of them has to gather the parameter.
_METADATA_ATTRIBUTES = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "layout",
        "grad",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "is_meta",
        "is_sparse",
        "is_complex",
        "is_cuda",
        "names",
        "is_floating_point",
        "is_contiguous",
        "numel",
        "nelement",
        "dim",
        "ndim",
        "size",
        "stride",
        "storage_offset",
        "element_size",
        "itemsize",
        "nbytes",
        "untyped_storage",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "output_nr",
        "_version",
        "is_quantized",
        "is_mkldnn",
        "retains_grad",
    ]
)


def freed_parameter_class(bring: Callable[[nn.Parameter], None]) -> type[nn.Parameter]:
    """Return the class of a parameter while it has no memory.

    Args:
        bring: called with such a parameter before an operation reads its values.
    """

    class FreedParameter(nn.Parameter):
        @classmethod
        def __torch_function__(
            cls,
            func: Any,
            types: Iterable[type],
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            if _name_of(func) not in _METADATA_ATTRIBUTES:
                for p in _parameters_in(cls, (args, kwargs or {})):
                    bring(p)
            # Without the override, so that the operation sees an ordinary tensor.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    return FreedParameter


def _name_of(func: Any) -> str:
    """Return the name of a function, or of the attribute that it gets or sets."""
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        func = func.__self__
    return str(getattr(func, "__name__", ""))


def _parameters_in(kind: type[nn.Parameter], value: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters of a class in the arguments of a call."""
    if type(value) is kind:
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _parameters_in(kind, item)
    elif isinstance(value, dict):
        yield from _parameters_in(kind, [*value.values()])
