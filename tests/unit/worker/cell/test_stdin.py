"""A rank's keyboard: it asks, waits, and is never left waiting."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from processes import in_child, wait_until

from nbddp.wire.messages import (
    DEBUGGER,
    INPUT,
    InputCancelled,
    InputReply,
    InputRequested,
    MessageFromRank,
)
from nbddp.worker.cell.stdin import StdinProxy


class Typing(StdinProxy):
    """A keyboard, and what it has posted."""

    def __init__(self) -> None:
        self.posted: list[MessageFromRank] = []
        self.was_interrupted = False
        self._threads: list[threading.Thread] = []
        super().__init__(self.posted.append, is_interrupted=lambda: self.was_interrupted)

    @property
    def asked(self) -> InputRequested:
        return next(each for each in reversed(self.posted) if isinstance(each, InputRequested))

    def later(self, *acts: InputReply | Callable[[], object]) -> None:
        """Answer, or do something, on another thread as soon as a question is open."""
        count = len(self.posted)

        def run() -> None:
            assert wait_until(lambda: len(self.posted) > count)
            for act in acts:
                self.receive_reply(act) if isinstance(act, InputReply) else act()

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)


@pytest.fixture
def keyboard() -> Iterator[Typing]:
    keyboard = Typing()
    yield keyboard
    keyboard.join()


def test_an_answer_is_what_input_returns(keyboard: Typing) -> None:
    keyboard.later(InputReply(question=1, text="anna"))
    assert keyboard.ask("name? ") == "anna"
    assert keyboard.posted == [InputRequested(question=1, prompt="name? ", what=INPUT)]
    assert keyboard.waiting_for == ""
    keyboard.later(InputReply(question=1, text="late"), InputReply(question=2, text="second"))
    assert keyboard.ask() == "second"


def test_a_secret_is_asked_for_as_one(keyboard: Typing) -> None:
    keyboard.later(InputReply(question=1, text="x"))
    assert keyboard.ask_secret() == "x"
    assert (keyboard.asked.is_secret, keyboard.asked.prompt) == (True, "Password: ")
    keyboard.later(InputReply(question=2, refusal="no page"))
    with pytest.raises(RuntimeError, match=r"^getpass\(\) .*: no page$"):
        keyboard.ask_secret()


def test_what_a_debugger_asks_is_known_as_such(keyboard: Typing) -> None:
    seen: list[str] = []
    keyboard.later(lambda: seen.append(keyboard.waiting_for), InputReply(question=1, text="c"))
    keyboard.is_debugging = True
    assert keyboard.ask("ipdb> ") == "c"
    assert (keyboard.asked.what, seen) == (DEBUGGER, [DEBUGGER])


def test_the_end_of_input_and_a_refusal_are_errors(keyboard: Typing) -> None:
    keyboard.later(InputReply(question=1, is_end=True))
    with pytest.raises(EOFError):
        keyboard.ask()
    keyboard.later(InputReply(question=2, refusal="no page"))
    with pytest.raises(RuntimeError, match=r"^input\(\) .*: no page$"):
        keyboard.ask()


def test_an_interrupt_ends_the_wait_and_takes_the_question_back(keyboard: Typing) -> None:
    main = threading.main_thread().ident or 0
    keyboard.later(lambda: time.sleep(0.1), lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        keyboard.ask()
    assert keyboard.posted[-1] == InputCancelled(question=1)
    keyboard.receive_reply(InputReply(question=1, text="late"))
    keyboard.was_interrupted = True  # as a debugger does, it asks again
    with pytest.raises(EOFError, match="interrupted"):
        keyboard.ask()
    assert len(keyboard.posted) == 2


def test_a_process_or_thread_of_the_ranks_own_cannot_ask(keyboard: Typing) -> None:
    def try_it() -> None:
        with pytest.raises(RuntimeError, match=r"^input\(\) .* process or thread "):
            keyboard.ask()

    assert in_child(try_it) == 0
    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert not keyboard.posted
