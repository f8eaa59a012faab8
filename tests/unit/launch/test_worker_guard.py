"""Memory that is used up has one message, however the system or torch says it."""

import errno
import signal
from pathlib import Path

import pytest

from paceline.errors import CheckpointError, CommunicationError, DataError, MemoryLimitError, NumericError
from paceline.launch.worker_guard import (
    ErrorReport,
    advise_after_signal,
    explain_address_space,
    explain_error,
    explain_memory,
)


class OutOfMemoryError(RuntimeError):
    """As torch.cuda raises it; told by its name, because the launcher has no torch."""


TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
SHARED = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
BUS = "killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory."


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError(TORCH), "out of memory"),
        (OutOfMemoryError("CUDA out of memory."), "out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory"),
        (RuntimeError(SHARED), "this host is out of shared memory"),
        (DataError(f"sample 3 cannot be read: RuntimeError: {SHARED}"), "this host is out of shared memory"),
        (DataError(f"the loader failed: {BUS}"), "this host is out of shared memory"),
    ],
)
def test_it_is_recognised(error: Exception, said: str) -> None:
    found = explain_memory(error)
    assert isinstance(found, MemoryLimitError) and found.what.startswith(said)
    report = ErrorReport.of(error)
    assert (report.type, report.exit_code) == ("MemoryLimitError", 7)
    assert "next:" in report.details


@pytest.mark.parametrize(
    "error",
    [ValueError("shared memory"), RuntimeError("boom"), OSError(errno.ENOSPC, "No space left on device")],
)
def test_others_are_left_alone(error: Exception) -> None:
    assert explain_memory(error) is None


def test_a_cause_counts() -> None:
    error = ValueError("while it built")
    error.__cause__ = MemoryError()
    assert explain_memory(error) is not None


def test_an_error_while_memory_was_out_counts_as_well() -> None:
    """A library that fails after its import has run out of memory, and an error that hides it."""
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise SystemError("error return without exception set")  # noqa: B904
    except SystemError as error:
        found = ErrorReport.of(error)
    assert (found.type, found.exit_code) == ("MemoryLimitError", 7)
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("something else") from None
    except ValueError as error:
        assert explain_memory(error) is None


def test_an_end_without_a_report_under_a_small_ulimit_is_named() -> None:
    for code in (1, -signal.SIGABRT, -signal.SIGSEGV):
        found = explain_address_space(code, 600_000 * 1024)
        assert found is not None and "ulimit -v allows 586 MiB" in found.what and found.next_step
        assert explain_address_space(code, -1) is None and explain_address_space(code, 2**34) is None
    assert explain_address_space(-signal.SIGKILL, 600_000 * 1024) is None


def test_memory_that_is_out_in_a_library_has_no_frames_of_it() -> None:
    import json

    class Empty:
        def read(self) -> str:
            raise MemoryError

    try:
        json.load(Empty())
    except MemoryError as error:
        shown = ErrorReport.of(error).details
    assert "raise MemoryError" in shown, "this frame is the user's"
    assert "Traceback" not in ErrorReport.of(MemoryError()).details


def test_an_error_of_ours_reads_without_its_traceback_but_not_without_the_users() -> None:
    plain = ErrorReport.of(NumericError("not finite", where="step 3", next_step="lower it"))
    assert plain.details == "where: step 3\nnext:  lower it"
    refused = CheckpointError("cannot write", next_step="free space")
    refused.__cause__ = OSError(28, "No space left on device")
    assert ErrorReport.of(refused).details == "next:  free space"
    rotten = DataError("sample 3 cannot be read", next_step="repair it")
    rotten.__cause__ = ValueError("mouldy")
    details = ErrorReport.of(rotten).details
    assert "ValueError: mouldy" in details and "next:  repair it" in details
    assert ErrorReport.of(ValueError("boom")).details == "ValueError: boom\n"


def test_signals_that_mean_memory_have_a_next_step() -> None:
    assert "dmesg" in advise_after_signal(signal.SIGKILL)
    assert "/dev/shm" in advise_after_signal(signal.SIGBUS)
    assert advise_after_signal(signal.SIGTERM) == ""


def test_the_users_frames_are_shown_and_ours_are_folded(tmp_path: Path) -> None:
    """A task that raises deep inside the data loader's and PyTorch's frames."""
    import runpy

    script = tmp_path / "task.py"
    script.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return self.deeper(x)\n"
        "    def deeper(self, x):\n"
        "        raise ValueError('the shape is odd')\n"
        "def call():\n"
        "    try:\n"
        "        return Net()(torch.ones(1))\n"
        "    except ValueError as error:\n"
        "        raise KeyError('no batch') from error\n"
    )
    call = runpy.run_path(str(script))["call"]
    try:
        call()
    except KeyError as error:
        shown = ErrorReport.of(error).details
    assert "return self.deeper(x)" in shown and "raise ValueError('the shape is odd')" in shown
    assert "_call_impl" not in shown and "frames of Paceline and libraries hidden" in shown
    assert shown.index("ValueError: the shape is odd") < shown.index("This caused:") < shown.index("KeyError")


def test_a_mistake_of_ours_is_shown_with_all_frames() -> None:
    from paceline.data.work import split_evenly

    try:
        split_evenly(1, 0, 0)
    except ZeroDivisionError as error:
        shown = ErrorReport.of(error).details
        assert "work.py" in shown and "folded" not in shown
    else:
        raise AssertionError("it should be an error")


def test_a_lost_loader_worker_is_a_named_error_wherever_it_is_noticed() -> None:
    found = explain_error(RuntimeError("DataLoader worker (pid 80) is killed by signal: Killed. "))
    assert isinstance(found, DataError) and "loader.workers" in str(found)
    assert explain_error(RuntimeError("another DataLoader worker")) is None
    wait = CommunicationError("all_reduce failed")
    wait.__cause__ = RuntimeError("DataLoader worker (pid 80) is killed by signal: Hangup. ")
    assert isinstance(explain_error(wait), DataError)
    assert not ErrorReport.of(wait).connection, "it is the cause, and no other rank is"


def test_limits_of_the_system_are_named() -> None:
    files = explain_error(OSError(errno.EMFILE, "Too many open files"))
    assert isinstance(files, MemoryLimitError) and "ulimit -n" in str(files)
    for error in (RuntimeError("can't start new thread"), ImportError("x.so: failed to map segment from it")):
        assert isinstance(explain_error(error), MemoryLimitError)
