"""Activation recomputation (memory.recompute): discard activations and compute them again in backward.

Invariant: a repetition computes what the forward computed, bit by bit, and leaves no trace: it runs with the
random numbers, function modes and buffers of the forward, and a forward that changes a persistent buffer
(such as the running statistics of BatchNorm) changes it once.

With "segments", the input of every s-th block of a chain is kept. A block whose input is the untouched
result of the block before it keeps nothing. When backward reaches a segment, its blocks run once more from
the kept input, which gives the inputs of all of them; then each block runs again for its own backward, and
its input is freed. With L blocks in segments of sqrt(L), that is memory for about 2 sqrt(L) inputs and one
block, for two more forwards instead of one. Whatever the model does between two blocks is not repeated, so a
result that went through anything else, or was written to, begins a segment. A call knows only its own
forward: forwards may be nested, on any thread.

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, sections 4.2, 4.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointError, checkpoint, get_device_states, set_device_states

from paceline.errors import TaskError
from paceline.parallel.rng_state import RngStates

ContextManager = AbstractContextManager[Any]
CheckpointContexts = Callable[[], tuple[ContextManager, ContextManager]]
_BufferPlace = tuple[dict[str, Tensor | None], str]


def checkpoint_contexts(block: nn.Module, modes: Sequence[ContextManager]) -> CheckpointContexts | None:
    """Return the `context_fn` of a checkpoint for one forward; None while the model is compiled.

    Args:
        modes: function modes around the forward; backward runs outside of them, so they are entered again.
    """
    if torch.compiler.is_compiling():
        return partial(_make_contexts, [], modes) if modes else None
    return partial(_make_contexts, list(_persistent_buffers(block)), modes)


def has_checkpoint_contexts(context_fn: object) -> bool:
    """Return whether a checkpoint was given what `checkpoint_contexts` returned."""
    return isinstance(context_fn, partial) and context_fn.func is _make_contexts


def _make_contexts(
    places: Sequence[_BufferPlace], modes: Sequence[ContextManager]
) -> tuple[ContextManager, ContextManager]:
    first = _ForwardContext(places)
    return first, _RecomputeContext(first, modes)


class _ForwardContext(AbstractContextManager[None]):
    """Context manager of the forward, which copies the buffers and generator states before it.

    Attributes:
        before: copies of the buffers, with their places.
        generators: states of the global generators; None if the forward has used at most PyTorch's, which the
            checkpoint itself restores.
    """

    def __init__(self, places: Sequence[_BufferPlace]) -> None:
        self._places = places
        self.before: list[tuple[_BufferPlace, Tensor]] = []
        self.generators: RngStates | None = None

    def __enter__(self) -> None:
        self.generators = RngStates.current()
        held = [(buffer_place, buffer_place[0][buffer_place[1]]) for buffer_place in self._places]
        # Copies, since version counters do not show the changes: BatchNorm does not count its writes.
        self.before = [(buffer_place, b.detach().clone()) for buffer_place, b in held if b is not None]

    def __exit__(self, *_: object) -> None:
        assert self.generators is not None
        if not {"random", "numpy.random"} & {*RngStates.current().advanced(self.generators)}:
            self.generators = None


class _RecomputeContext(AbstractContextManager[None]):
    """Context manager of the repetition, with the function modes, buffers and generators of the forward."""

    def __init__(self, first: _ForwardContext, modes: Sequence[ContextManager]) -> None:
        self._first, self._modes = first, modes

    def __enter__(self) -> None:
        self._stack = ExitStack()
        for mode in self._modes:
            self._stack.enter_context(mode)
        self._current_buffers = [
            (buffer_place, buffer_place[0][buffer_place[1]]) for buffer_place, _ in self._first.before
        ]
        for (table, name), copy in self._first.before:
            # A clone each time: in a segment, a block may be repeated more than once.
            table[name] = copy.clone()
        if self._first.generators is not None:
            self._current_generators = RngStates.current()
            self._first.generators.restore()

    def __exit__(self, *error: Any) -> None:
        if self._first.generators is not None:
            self._current_generators.restore()
        # The repetition must not change the buffers a second time.
        for (table, name), b in self._current_buffers:
            table[name] = b
        self._stack.__exit__(*error)


def _persistent_buffers(block: nn.Module) -> Iterator[_BufferPlace]:
    for module in block.modules():
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                yield module._buffers, name


_ORIGIN_ATTRIBUTE = "_paceline_made_by"
_CONTAINER_TYPES = (tuple, list, dict)


@dataclass(frozen=True)
class _TensorOrigin:
    """Call that made a tensor, the index among its results, and the tensor's version at that time."""

    link: BlockCall
    index: int
    version: int


@dataclass(frozen=True)
class _RecomputedArgument:
    """Argument that is a result of an earlier call, so it can be computed again."""

    link: BlockCall
    index: int
    requires_grad: bool

    def tensor(self) -> Tensor:
        return self.link.results()[self.index].detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class _SavedArgument:
    """Argument that is kept in memory."""

    value: Tensor
    version: int
    requires_grad: bool

    def tensor(self) -> Tensor:
        if self.value._version != self.version:
            raise RuntimeError(
                "an input of a recomputed block was changed in place before backward needed it"
            )
        return self.value.detach().requires_grad_(self.requires_grad)


class BlockCall:
    """One call of a block in one forward, which keeps as little as is needed to compute its arguments again.

    Args:
        run: the block's forward.
        longest: number of blocks in a segment.
        contexts: context managers of the forward and of its repetitions; see `checkpoint_contexts`.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        longest: int,
        contexts: CheckpointContexts | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._run = run
        context_managers: tuple[ContextManager, ContextManager] = (
            contexts() if contexts else (nullcontext(), nullcontext())
        )
        self._first, self._repeated = context_managers
        self._passed: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._arguments_kept = _map_nested(Tensor, (args, kwargs), lambda t: _recomputed_or_saved(t, longest))
        self._before = {
            argument.link for argument in _iterate_nested(_RecomputedArgument, self._arguments_kept)
        }
        self.depth = 1 + max((link.depth for link in self._before), default=0)
        tensors = list(_iterate_nested(Tensor, (args, kwargs)))
        # checkpoint reads the device from its arguments; an empty tensor keeps no activation alive.
        self.at = tensors[0].new_empty(0) if tensors else torch.empty(0)
        self._random = self._random_state(), get_device_states(*tensors)
        self._results: list[Tensor] | None = None

    def __call__(self, _at: Tensor) -> Any:
        """Run the block, first with the arguments of the model and later with recomputed arguments."""
        # Dropped before the first run: holding the arguments would keep the activations alive.
        first_arguments, self._passed = self._passed, None
        if first_arguments is not None:
            with self._first:
                return self._run(*first_arguments[0], **first_arguments[1])
        args, kwargs = self._arguments()
        for link in self._before:
            # Only this call needed these results; its arguments keep them until its own backward ends.
            link.forget()
        return self._again(args, kwargs)

    def mark(self, results: Any) -> Any:
        """Mark the results, so that the next block can find the call that made them."""
        for index, t in enumerate(_iterate_nested(Tensor, results)):
            # A leaf may outlive this forward, so it is kept instead.
            if t.grad_fn is not None:
                setattr(t, _ORIGIN_ATTRIBUTE, _TensorOrigin(self, index, t._version))
        return results

    def results(self) -> list[Tensor]:
        """Return the results of the block, computed again if they are not in memory."""
        if self._results is None:
            args, kwargs = self._arguments()
            with saved_tensors_hooks(_save_nothing, _refuse_unpack):
                self._results = [t.detach() for t in _iterate_nested(Tensor, self._again(args, kwargs))]
        return self._results

    def forget(self) -> None:
        """Free the results; they are computed again if they are needed once more."""
        self._results = None

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run with the random numbers, modes and buffers of the forward."""
        cpu, (devices, states) = self._random
        with self._repeated, torch.random.fork_rng(devices):
            torch.set_rng_state(cpu)
            set_device_states(devices, states)
            return self._run(*args, **kwargs)

    def _random_state(self) -> Tensor:
        """Return the state of the CPU generator, uint8 [5056]; blocks that draw nothing share one tensor."""
        state = torch.get_rng_state()
        known = (link._random[0] for link in self._before)
        return next((earlier for earlier in known if torch.equal(earlier, state)), state)

    def _arguments(self) -> Any:
        return _map_nested(
            (_RecomputedArgument, _SavedArgument), self._arguments_kept, lambda argument: argument.tensor()
        )


def _recomputed_or_saved(t: Tensor, longest: int) -> _RecomputedArgument | _SavedArgument:
    origin = getattr(t, _ORIGIN_ATTRIBUTE, None)
    if origin is not None and origin.version == t._version and origin.link.depth < longest:
        return _RecomputedArgument(origin.link, origin.index, t.requires_grad)
    return _SavedArgument(t.detach(), t._version, t.requires_grad)


def _save_nothing(t: Tensor) -> None:
    """Save nothing; gradients stay on, so that the kernels are those of the forward."""


def _refuse_unpack(saved: None) -> Tensor:
    raise AssertionError("internal error: backward through a forward that only recomputes inputs")


def _iterate_nested(kind: Any, value: Any) -> Iterator[Any]:
    """Yield the objects of a type in nested arguments or results, in order."""
    if isinstance(value, kind):
        yield value
    elif type(value) in _CONTAINER_TYPES:
        for item in value.values() if type(value) is dict else value:
            yield from _iterate_nested(kind, item)


def _map_nested(kind: Any, value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested arguments with all objects of a type replaced; other objects stay as they are."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {name: _map_nested(kind, item, change) for name, item in value.items()}
    return (
        type(value)(_map_nested(kind, item, change) for item in value)
        if type(value) in (tuple, list)
        else value
    )


def explain_checkpoint_error(error: CheckpointError) -> TaskError:
    """Return the error to raise for a block that, computed again in backward, does something else."""
    return TaskError(
        "a block that is computed again in backward does not do what it did in the forward: it reads"
        f" something that has changed since, such as a list or a sum of auxiliary losses: {error}",
        next_step="let the block return its auxiliary loss, or set memory.recompute to the numbers of other"
        " blocks",
    )


Forward = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
BlockRunner = Callable[[Forward, CheckpointContexts | None, Args, Kwargs], Any]
"""Function that runs a forward with its arguments, such that backward computes it again in its contexts."""


def recompute_blocks(
    model: nn.Module, choose: Callable[[nn.Module], Iterable[nn.Module]] | None, how: str = "blocks"
) -> int:
    """Discard the activations inside each block after its forward, and compute them again in backward.

    Args:
        model: changed in place; names of parameters stay.
        choose: returns the blocks of a model; by default the entries of every `nn.ModuleList`.
        how: "blocks" keeps the input of every block and runs it twice; "0,1,4" does so for the blocks with
            these numbers; "segments" keeps about sqrt(L) of the inputs of L blocks and runs most blocks
            three times.
    Returns:
        Number of blocks that are recomputed.
    Raises:
        TaskError: there are no blocks, or fewer than `how` names.
    Exactness: bitwise. Keyed dropout draws the same masks, the state of PyTorch's generator is restored, and
        buffers that the forward changes are changed once.
    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
    """
    blocks = recomputed_blocks(model, choose)
    if not blocks:
        raise TaskError(
            f'memory.recompute = "{how}", but the model has no nn.ModuleList and the task names no blocks',
            next_step='pass Task(blocks=...), or set memory.recompute = "none"',
        )
    if how not in _RUNNER_BY_WORD:
        blocks = [blocks[number] for number in _parse_block_numbers(how, len(blocks))]
    run = _RUNNER_BY_WORD.get(how, _checkpoint_each_block)(len(blocks))
    for block in blocks:
        block.__class__ = _recomputed_class(type(block), run)
    return len(blocks)


def _parse_block_numbers(written: str, num_blocks: int) -> list[int]:
    numbers = [int(n) for n in written.split(",")]
    if numbers[-1] >= num_blocks:
        raise TaskError(
            f"memory.recompute names block {numbers[-1]}, but the model has blocks 0 to {num_blocks - 1}",
            next_step='set memory.recompute = "auto"',
        )
    return numbers


def recomputed_blocks(
    model: nn.Module, choose: Callable[[nn.Module], Iterable[nn.Module]] | None
) -> list[nn.Module]:
    """Return the blocks of a model: those that `choose` returns, or the entries of every `nn.ModuleList`."""
    return list(dict.fromkeys((choose or _module_lists)(model)))


def outermost_blocks(
    model: nn.Module, choose: Callable[[nn.Module], Iterable[nn.Module]] | None
) -> dict[int, nn.Module]:
    """Return by number the blocks that are inside no other block."""
    blocks = recomputed_blocks(model, choose)
    inside = {module for block in blocks for module in block.modules() if module is not block}
    return {number: block for number, block in enumerate(blocks) if block not in inside}


def _module_lists(model: nn.Module) -> Iterable[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module


def _recomputed_class(kind: type[nn.Module], run: BlockRunner) -> type[nn.Module]:
    """Return a subclass whose forward is recomputed; unlike a replaced method it also works in copies."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return run(plain, checkpoint_contexts(self, _get_current_function_mode_stack()), args, kwargs)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def _checkpoint_block(plain: Forward, contexts: CheckpointContexts | None, args: Args, kwargs: Kwargs) -> Any:
    around: dict[str, Any] = {"context_fn": contexts} if contexts else {}
    return checkpoint(plain, *args, use_reentrant=False, **around, **kwargs)


def _checkpoint_in_segments(num_blocks: int) -> BlockRunner:
    # The square root, rounded up.
    longest = math.isqrt(num_blocks - 1) + 1

    def run(plain: Forward, contexts: CheckpointContexts | None, args: Args, kwargs: Kwargs) -> Any:
        link = BlockCall(plain, longest, contexts, args, kwargs)
        # `_again` restores the random state, as it must do where only inputs are computed again.
        return link.mark(checkpoint(link, link.at, use_reentrant=False, preserve_rng_state=False))

    return run


def _checkpoint_each_block(_num_blocks: int) -> BlockRunner:
    return _checkpoint_block


_RUNNER_BY_WORD: Mapping[str, Callable[[int], BlockRunner]] = {
    "blocks": _checkpoint_each_block,
    "segments": _checkpoint_in_segments,
}
