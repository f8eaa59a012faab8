"""The handle: its result is made once, by the first wait; a failure is raised by every wait."""

import threading
from typing import Any

import pytest

from paceline.comm import Handle
from paceline.comm.handle import join_handles
from paceline.errors import CommunicationError


class Counted:
    """Makes a result, and notes how it was asked for one."""

    def __init__(self, result: Any = None, error: Exception | None = None) -> None:
        self.result, self.error = result, error
        self.asked: list[tuple[float | None, bool]] = []
        self.thread: int | None = None

    def __call__(self, deadline_seconds: float | None, exposed: bool) -> Any:
        self.asked.append((deadline_seconds, exposed))
        self.thread = threading.get_ident()
        if self.error is not None:
            raise self.error
        return self.result


@pytest.mark.parametrize("result", [object(), None])
def test_nothing_is_made_before_the_first_wait_and_nothing_after_it(result: object) -> None:
    made = Counted(result)
    handle = Handle(made)
    assert made.asked == []
    assert [handle.wait() for _ in range(3)] == [result] * 3
    assert made.asked == [(None, True)]


@pytest.mark.parametrize("error", [CommunicationError("a peer is gone", next_step="look"), KeyError("x")])
def test_a_failure_is_raised_by_every_wait_and_what_follows_is_not_called(error: Exception) -> None:
    made, calls = Counted(error=error), []
    handle = Handle(made)
    following = handle.then(calls.append)
    for each in (following, following, handle):
        with pytest.raises(type(error)) as caught:
            each.wait()
        assert caught.value is error
    assert len(made.asked) == 1 and calls == []


def test_of_several_all_have_ended_when_one_has_failed() -> None:
    """What is under way writes to memory that others take afterwards."""
    error, other = (CommunicationError(text, next_step="look") for text in ("the first", "another"))
    parts = [Counted(1), Counted(error=error), Counted(error=other), Counted(4)]
    handle = join_handles([Handle(part) for part in parts])
    for _ in range(2):
        with pytest.raises(CommunicationError) as caught:
            handle.wait()
        assert caught.value is error and all(len(part.asked) == 1 for part in parts)
    assert join_handles([Handle(Counted(1)), Handle(Counted(2))]).wait() == 2


def test_what_is_ready_needs_no_wait() -> None:
    result = object()
    handle = Handle.ready(result)
    assert handle.wait(0.0) is result
    assert handle.then(lambda found: (found, 1)).wait() == (result, 1)


def test_the_deadline_and_who_waits_reach_whoever_makes_the_result() -> None:
    made = Counted(3)
    following = Handle(made).then(lambda n: n + 1).then(lambda n: 10 * n)
    assert following.wait(0.25, exposed=False) == 40
    assert made.asked == [(0.25, False)]


def test_what_follows_is_made_once_and_leaves_the_first_result_alone() -> None:
    made, calls = Counted([1]), []
    first = Handle(made)
    following = first.then(lambda found: calls.append(found) or [*found, 2])
    other = first.then(len)
    assert calls == []
    assert following.wait() is following.wait()
    assert (following.wait(), other.wait(), first.wait()) == ([1, 2], 1, [1])
    assert (len(calls), len(made.asked)) == (1, 1)


def test_a_function_that_fails_is_called_once_and_the_first_result_is_kept() -> None:
    made, calls = Counted(1), []

    def fail(n: int) -> None:
        calls.append(n)
        raise ValueError("no")

    first = Handle(made)
    following = first.then(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            following.wait()
    assert (calls, first.wait(), len(made.asked)) == ([1], 1, 1)


def test_the_result_is_made_on_the_thread_that_waits() -> None:
    made, seen = Counted(1), []
    following = Handle(made).then(lambda n: seen.append(threading.get_ident()))
    waiting = threading.Thread(target=following.wait)
    waiting.start()
    waiting.join()
    assert seen == [made.thread]
    assert made.thread != threading.get_ident()
