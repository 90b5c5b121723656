"""An interrupt that is held back waits, and is not lost."""

from __future__ import annotations

import signal

import pytest

from nbddp.interrupts import interrupt_held_back


@pytest.mark.parametrize(("times", "is_done"), [(1, True), (2, False)])
def test_held_back_the_first_interrupt_waits_and_the_second_does_not(
    times: int, is_done: bool
) -> None:
    done = []

    def work() -> None:
        with interrupt_held_back():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert bool(done) == is_done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt_held_back():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_wait_may_look_whether_an_interrupt_has_come() -> None:
    seen = []

    def work(error: Exception) -> None:
        with interrupt_held_back(raises_second=False) as held:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
                seen.append(held.times)
            raise error

    with pytest.raises(KeyboardInterrupt):  # whoever takes the error would go on
        work(ValueError("refused"))
    assert seen == [1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
