"""A rank's keyboard: it asks, waits, and is never left waiting."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from processes import in_child, wait_until

from nbddp.wire.messages import DEBUGGER, INPUT, Answered, Asked, Report, Withdrawn
from nbddp.worker.keyboard import Keyboard

Later = Callable[[Callable[[], object]], None]


class Wire:
    """What a keyboard has posted."""

    def __init__(self) -> None:
        self.posted: list[Report] = []
        self.is_called_off = False

    @property
    def asked(self) -> Asked:
        return next(each for each in reversed(self.posted) if isinstance(each, Asked))


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def keyboard(wire: Wire) -> Keyboard:
    return Keyboard(wire.posted.append, is_called_off=lambda: wire.is_called_off)


@pytest.fixture
def later(wire: Wire) -> Iterator[Later]:
    """Does something as soon as a question is open, on another thread."""
    threads: list[threading.Thread] = []

    def do(act: Callable[[], object]) -> None:
        count = len(wire.posted)

        def run() -> None:
            assert wait_until(lambda: len(wire.posted) > count)
            act()

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield do
    for thread in threads:
        thread.join(10)


def test_an_answer_is_what_input_returns(keyboard: Keyboard, wire: Wire, later: Later) -> None:
    later(lambda: keyboard.answered(Answered(question=1, text="anna")))
    assert keyboard.ask("name? ") == "anna"
    assert wire.posted == [Asked(question=1, prompt="name? ", what=INPUT)]
    assert keyboard.asks == ""

    def answer_both() -> None:
        keyboard.answered(Answered(question=1, text="late"))  # to an older question
        keyboard.answered(Answered(question=2, text="second"))

    later(answer_both)
    assert keyboard.ask() == "second"


def test_a_secret_is_asked_for_as_one(keyboard: Keyboard, wire: Wire, later: Later) -> None:
    later(lambda: keyboard.answered(Answered(question=1, text="x")))
    assert keyboard.ask_secret() == "x"
    assert (wire.asked.is_secret, wire.asked.prompt) == (True, "Password: ")
    later(lambda: keyboard.answered(Answered(question=2, refusal="no page")))
    with pytest.raises(RuntimeError, match=r"^getpass\(\) .*: no page$"):
        keyboard.ask_secret()


def test_what_a_debugger_asks_is_known_as_such(
    keyboard: Keyboard, wire: Wire, later: Later
) -> None:
    seen: list[str] = []
    later(lambda: (seen.append(keyboard.asks), keyboard.answered(Answered(question=1, text="c"))))
    with keyboard.debugging():
        assert keyboard.ask("ipdb> ") == "c"
    assert (wire.asked.what, seen) == (DEBUGGER, [DEBUGGER])


def test_the_end_of_input_and_a_refusal_are_errors(keyboard: Keyboard, later: Later) -> None:
    later(lambda: keyboard.answered(Answered(question=1, is_end=True)))
    with pytest.raises(EOFError):
        keyboard.ask()
    later(lambda: keyboard.answered(Answered(question=2, refusal="no page")))
    with pytest.raises(RuntimeError, match=r"^input\(\) .*: no page$"):
        keyboard.ask()


def test_an_interrupt_ends_the_wait_and_takes_the_question_back(
    keyboard: Keyboard, wire: Wire, later: Later
) -> None:
    main = threading.main_thread().ident or 0
    later(lambda: (time.sleep(0.1), signal.pthread_kill(main, signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        keyboard.ask()
    assert wire.posted[-1] == Withdrawn(question=1)
    keyboard.answered(Answered(question=1, text="late"))
    wire.is_called_off = True  # as a debugger does, it asks again
    with pytest.raises(EOFError, match="interrupted"):
        keyboard.ask()
    assert len(wire.posted) == 2


def test_a_process_or_thread_of_the_ranks_own_cannot_ask(keyboard: Keyboard, wire: Wire) -> None:
    def try_it() -> None:
        with pytest.raises(RuntimeError, match=r"^input\(\) .* process or thread "):
            keyboard.ask()

    assert in_child(try_it) == 0
    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert not wire.posted
