"""Questions of ranks: one at a time, and no rank waits for an answer that cannot come."""

import io
import math
import os
import pty
import time
from collections.abc import Callable
from itertools import chain, repeat
from unittest.mock import Mock

import pytest

from nbddp.record.notices import InputClosed, InputRequest
from nbddp.ui import input_requests
from nbddp.ui.input_requests import ConsoleInput, InputBackend, InputQueue
from nbddp.wire.messages import InputReply, InputRequested


class Asking(InputQueue):
    """Questions that are asked by a backend, and the messages sent to the ranks."""

    def __init__(self, backend: InputBackend | None = None) -> None:
        self.backend = backend or Mock(spec=InputBackend, **{"show_prompt.return_value": ""})
        self.sent: list[tuple[int, InputReply]] = []
        super().__init__(self.backend, lambda *sent: self.sent.append(sent))

    def ask(self, rank: int, number: int = 1, prompt: str = "> ", **more: bool) -> None:
        asked = InputRequested(question=number, prompt=prompt, **more)
        self.handle_notice(InputRequest(rank, asked))

    def look(self, typed: str = "", *, times: int = 1) -> tuple[int, str] | None:
        """Pump while no rank has ended, and something was typed."""
        self.backend.poll.side_effect = chain([typed] if typed else [], repeat(None))
        return [self.poll(lambda _rank: False) for _ in range(times)][-1]

    @property
    def asked(self) -> list[int]:
        prompts = [call.args[0] for call in self.backend.show_prompt.call_args_list]
        return [int(prompt.split("]")[0].removeprefix("[rank ")) for prompt in prompts]


@pytest.fixture
def questions() -> Asking:
    return Asking()


def test_a_question_is_asked_with_its_rank_and_answered_once(questions: Asking) -> None:
    assert questions.poll_interval == math.inf
    questions.ask(2, 7, "\ud800? ", is_secret=True)
    questions.look(times=3)
    prompt = "[rank 2] \\ud800? "  # no message holds a surrogate
    questions.backend.show_prompt.assert_called_once_with(prompt, is_secret=True)
    assert (questions.sent, questions.poll_interval) == ([], input_requests.POLL_INTERVAL)
    assert questions.look("anna") == (2, "\\ud800? ········")
    assert questions.look(times=2) is None
    assert questions.poll_interval == math.inf
    questions.close()
    assert questions.sent == [(2, InputReply(question=7, text="anna"))]
    questions.backend.close.assert_not_called()  # the answer has closed the prompt


def test_a_repeated_debugger_question_comes_before_questions_of_other_ranks(
    questions: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    questions.ask(0)
    questions.ask(1)
    questions.look("p x", times=2)  # rank 0 has a moment to ask again
    assert questions.asked == [0]
    questions.ask(0, 2)
    questions.look()
    questions.look("c")
    now[0] += input_requests.SAME_RANK_SECONDS
    questions.look()
    assert questions.asked == [0, 0, 1]
    assert [rank for rank, _ in questions.sent] == [0, 0]


# what makes the open question of rank 0 needless, whether its rank gets the end of input, and
# whether its prompt is still open
ENDS: dict[str, tuple[Callable[[Asking], object], bool, bool]] = {
    "withdrawn": (lambda questions: questions.handle_notice(InputClosed(0, 1)), False, True),
    "its rank ends": (lambda questions: questions.poll(lambda rank: rank == 0), False, True),
    "another cell": (lambda questions: questions.cancel_if_page_changed(2), True, True),
    "end of input": (lambda questions: questions.look(input_requests.END_OF_FILE), True, False),
}


@pytest.mark.parametrize(("end", "is_answered", "is_open"), ENDS.values(), ids=ENDS)
def test_the_box_of_a_needless_question_is_closed_and_the_next_is_asked(
    questions: Asking,
    end: Callable[[Asking], object],
    is_answered: bool,
    is_open: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(input_requests, "SAME_RANK_SECONDS", 0.0)
    questions.cancel_if_page_changed(1)
    questions.ask(0)
    questions.look()
    questions.ask(1, 4)
    questions.cancel_if_page_changed(1)
    assert not questions.sent
    end(questions)
    assert questions.sent == [(0, InputReply(question=1, is_end=True))] * is_answered
    assert questions.backend.close.call_count == is_open
    questions.look("x", times=2)
    assert questions.asked == [0, 1]
    assert questions.sent[-1] == (1, InputReply(question=4, text="x"))


@pytest.mark.parametrize(("can_close", "hint"), [(True, ""), (False, input_requests.LEFTOVER_HINT)])
def test_all_questions_get_the_end_of_input_at_the_end_of_the_cell(
    questions: Asking, can_close: bool, hint: str
) -> None:
    questions.backend.close.return_value = can_close
    for rank in range(3):
        questions.ask(rank, rank + 1)
    questions.look()
    questions.close()
    assert (questions.backend.close.call_count, questions.leftover_hint) == (1, hint)
    questions.close()
    ends = [(rank, InputReply(question=rank + 1, is_end=True)) for rank in range(3)]
    assert (questions.sent, questions.poll_interval) == (ends, math.inf)


def test_questions_are_refused_at_once_without_an_input_page() -> None:
    questions = Asking(InputBackend("no page"))
    questions.ask(0)
    questions.poll(lambda _rank: False)
    assert questions.sent == [(0, InputReply(question=1, refusal="no page"))]


def test_console_input_is_read_line_by_line_from_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend, (keyboard, screen) = ConsoleInput(), pty.openpty()
    with os.fdopen(screen) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        assert not backend.show_prompt("[rank 0] ipdb> ", is_secret=False)
        assert capsys.readouterr().out == "[rank 0] ipdb> "
        for typed, line in ((b"", None), (b"p x", None), (b"\n", "p x"), (b"\x04", "\x04")):
            os.write(keyboard, typed)
            assert backend.poll() == line
        assert "%ddp push" in backend.show_prompt("Password: ", is_secret=True)
    os.close(keyboard)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert backend.show_prompt("> ", is_secret=False) == input_requests.NO_INPUT
