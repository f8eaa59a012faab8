"""How much memory tensors take while something runs, by PyTorch's own allocator on the processor."""

import gc
from collections.abc import Callable

from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """The largest sum of what is allocated during a call, and not yet freed; bytes."""
    now = most = 0
    for num_bytes in _changes(run):
        now += num_bytes
        most = max(most, now)
    return most


def allocated(run: Callable[[], object], least: int = 1024) -> list[int]:
    """The bytes of every block of at least so many that this thread allocates during a call."""
    return [num_bytes for num_bytes in _changes(run) if num_bytes >= least]


def _changes(run: Callable[[], object]) -> list[int]:
    """Bytes that this thread allocates, or (negative) frees, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]


def bytes_now() -> int:
    """Of all storages that a tensor uses; gradients belong to nobody in Python, so they are asked for."""
    gc.collect()
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if not issubclass(type(one), Tensor):
            continue
        for t in (one, one.grad if one.is_leaf else None):
            if t is not None and t.device.type == "cpu":
                found[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
    return sum(found.values())
