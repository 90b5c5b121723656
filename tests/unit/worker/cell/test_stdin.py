"""A rank's keyboard: it asks, waits, and is never left waiting."""

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


class RecordingStdin(StdinProxy):
    """A standard input, and the messages it posted."""

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
def stdin() -> Iterator[RecordingStdin]:
    stdin = RecordingStdin()
    yield stdin
    stdin.join()


def test_input_returns_the_answer_to_its_question(stdin: RecordingStdin) -> None:
    stdin.later(InputReply(question=1, text="anna"))
    assert stdin.ask("name? ") == "anna"
    assert stdin.posted == [InputRequested(question=1, prompt="name? ", what=INPUT)]
    assert stdin.waiting_for == ""
    stdin.later(InputReply(question=1, text="late"), InputReply(question=2, text="second"))
    assert stdin.ask() == "second"


def test_questions_of_getpass_are_secret_and_those_of_a_debugger_are_marked(
    stdin: RecordingStdin,
) -> None:
    seen: list[str] = []
    stdin.later(InputReply(question=1, text="x"))
    assert stdin.ask_secret() == "x"
    assert (stdin.asked.is_secret, stdin.asked.prompt) == (True, "Password: ")
    stdin.later(lambda: seen.append(stdin.waiting_for), InputReply(question=2, text="c"))
    stdin.is_debugging = True
    assert stdin.ask("ipdb> ") == "c"
    assert (stdin.asked.what, seen) == (DEBUGGER, [DEBUGGER])


def test_refused_and_ended_input_raises_an_error(stdin: RecordingStdin) -> None:
    stdin.later(InputReply(question=1, refusal="no page"))
    with pytest.raises(RuntimeError, match=r"^getpass\(\) .*: no page$"):
        stdin.ask_secret()
    stdin.later(InputReply(question=2, is_end=True))
    with pytest.raises(EOFError):
        stdin.ask()


def test_an_interrupt_ends_the_wait_for_input_and_cancels_the_question(
    stdin: RecordingStdin,
) -> None:
    main = threading.main_thread().ident or 0
    stdin.later(lambda: time.sleep(0.1), lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        stdin.ask()
    assert stdin.posted[-1] == InputCancelled(question=1)
    stdin.receive_reply(InputReply(question=1, text="late"))
    stdin.was_interrupted = True  # as a debugger does, it asks again
    with pytest.raises(EOFError, match="interrupted"):
        stdin.ask()
    assert len(stdin.posted) == 2


def test_input_is_refused_in_a_child_process_or_thread_of_the_rank(stdin: RecordingStdin) -> None:
    def try_it() -> None:
        with pytest.raises(RuntimeError, match=r"^input\(\) .* process or thread "):
            stdin.ask()

    assert in_child(try_it) == 0
    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert not stdin.posted
