"""An interrupt that is held back waits, and is not lost."""

from __future__ import annotations

import signal

import pytest

from nbddp.interrupts import OneInterrupt, interrupt_held_back


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


def interrupt(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("times", [1, 3])
def test_where_interrupts_are_let_in_one_strikes_and_nothing_after_it(times: int) -> None:
    done = []

    def work() -> None:
        with OneInterrupt() as one:
            interrupt(times)
            done.append("begun")
            try:
                with one.let_in():
                    done.append("never")
            finally:
                interrupt(times)
                with one.let_in():
                    interrupt(times)
                done.append("ended")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["begun", "ended"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_was_not_let_in_strikes_when_all_is_over() -> None:
    def work(error: Exception) -> None:
        with OneInterrupt() as one:
            with one.let_in():
                pass
            interrupt()
            raise error

    with pytest.raises(KeyboardInterrupt):  # whoever takes the error would go on
        work(ValueError("refused"))


def test_who_hears_interrupts_and_raises_nothing_hears_all_of_them() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    try:
        with OneInterrupt() as one, one.let_in():
            interrupt(3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(heard) == 3
