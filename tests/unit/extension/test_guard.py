"""What becomes of a hook that fails, or is slow."""

import logging
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from processes import wait_until

from nbddp.extension import guard
from nbddp.extension.guard import MAX_FAILURES, Guard


class Hooks:
    """Hooks of an extension: ``before_cell`` fails as often as it should."""

    def __init__(self, errors: Iterator[BaseException | None]) -> None:
        self.errors, self.calls = errors, 0

    def before_cell(self, number: int) -> int:
        self.calls += 1
        if error := next(self.errors):
            raise error
        return number

    def close(self) -> str:
        return "closed"


class Guarded:
    """A guard, the attempt of its ranks, and what it told the user."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.told: list[str] = []
        self.attempt = 1
        self.hooks = Hooks(iter(errors))
        self.guard = Guard(self.told.append, lambda: self.attempt)

    def call(self, **how: bool) -> int:
        return self.guard.call("odd", "before_cell", partial(self.hooks.before_cell, 7), **how) or 0


def test_a_hook_that_fails_is_logged_each_time_told_once_and_then_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guarded = Guarded(*[ValueError("no such\nfile")] * 9)
    assert [guarded.call() for _ in range(5)] == [0] * 5
    assert guarded.hooks.calls == MAX_FAILURES == 3
    assert [record.exc_info is not None for record in caplog.records] == [True] * 3
    [told] = guarded.told
    assert told.startswith("the extension odd failed in its hook before_cell (ValueError: no such)")
    assert guarded.guard.call("odd", "close", guarded.hooks.close) == "closed"
    guarded.attempt = 2
    assert guarded.call() == 0
    assert (guarded.hooks.calls, len(guarded.told)) == (4, 2)


def test_a_hook_that_works_again_stays_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, guard.__name__)
    error = ValueError("odd")
    guarded = Guarded(error, error, None, error, error, None)
    assert [guarded.call() for _ in range(6)] == [0, 0, 7, 0, 0, 7]
    assert len(guarded.told) == 1


def test_a_slow_hook_has_its_effect_and_is_then_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "SLOW", 0.0)
    guarded = Guarded(*[None] * 9)
    assert [guarded.call(may_be_slow=True) for _ in range(5)] == [7] * 5
    assert [guarded.call() for _ in range(5)] == [7, 7, 7, 0, 0]
    assert len(caplog.records) == 3
    assert "it took 0.0 s" in guarded.told[0]


def test_an_interrupt_ends_a_hook_and_is_no_failure() -> None:
    guarded = Guarded(KeyboardInterrupt(), None)
    with pytest.raises(KeyboardInterrupt):
        guarded.call()
    assert (guarded.call(), guarded.told) == (7, [])


def test_an_interrupt_waits_for_no_slow_hook_and_for_no_other_hook_of_its_extension(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "URGENT", 2)
    guarded, may_end, has_ended = Guarded(*[None] * 9), threading.Event(), threading.Event()

    def facts() -> int:
        may_end.wait()
        has_ended.set()
        raise OSError("late")

    assert guarded.call(is_urgent=True) == 7
    assert guarded.guard.call("odd", "facts", facts, is_urgent=True) is None
    assert (
        "in its hook facts (TimeoutError: it is slow, and an interrupt waits for it)"
        in guarded.told[0]
    )
    assert (guarded.call(), guarded.call(is_urgent=True)) == (0, 0)
    assert guarded.guard.call("other", "close", guarded.hooks.close) == "closed"
    may_end.set()
    assert has_ended.wait(60)
    assert wait_until(lambda: guarded.call() != 0)
    # the thread of the hook logs it after that
    assert wait_until(lambda: caplog.messages[-1] == "the extension odd failed after an interrupt")


def test_an_interrupt_waits_for_no_hook_of_which_the_last_call_was_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, guard.__name__)
    monkeypatch.setattr(guard, "SLOW", 0.0)
    guarded = Guarded(*[None] * 9)
    assert guarded.call(may_be_slow=True) == guarded.call(is_urgent=True) == 7
    assert guarded.call(is_urgent=True) == 0
