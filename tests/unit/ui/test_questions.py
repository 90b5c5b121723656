"""Questions of ranks: one at a time, and no rank waits for an answer that cannot come."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Callable
from typing import Any

import pytest

from nbddp.record.notices import InputClosed, InputRequest
from nbddp.ui import input_requests as room
from nbddp.ui.input_requests import ConsoleInput, InputBackend, InputQueue
from nbddp.wire.messages import InputReply, InputRequested


class FakeBox(InputBackend):
    """A box in which a test types."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[str, bool]] = []
        self.typed: list[str] = []
        self.closed = 0
        self.can_close = True

    def show_prompt(self, prompt: str, *, is_secret: bool) -> str:
        self.shown.append((prompt, is_secret))
        return ""

    def poll(self) -> str | None:
        return self.typed.pop(0) if self.typed else None

    def close(self) -> bool:
        self.closed += 1
        return self.can_close


class Asking(InputQueue):
    """Questions that are asked in a box, and the messages sent to the ranks."""

    def __init__(self, box: Any = None) -> None:
        self.box = FakeBox()
        self.sent: list[tuple[int, InputReply]] = []
        super().__init__(box or self.box, lambda *sent: self.sent.append(sent))

    def look(self, typed: str = "", *, times: int = 1) -> tuple[int, str] | None:
        """Pump while no rank has ended, and something was typed."""
        self.box.typed += [typed] if typed else []
        return [self.poll(lambda _rank: False) for _ in range(times)][-1]


def asks(rank: int, number: int = 1, prompt: str = "> ", **more: bool) -> InputRequest:
    return InputRequest(rank, InputRequested(question=number, prompt=prompt, **more))


@pytest.fixture
def questions() -> Asking:
    return Asking()


def test_a_question_is_asked_with_its_rank_and_answered_once(questions: Asking) -> None:
    assert questions.poll_interval > 1e9
    questions.handle_notice(asks(2, 7, "name? ", is_secret=True))
    questions.look(times=3)
    assert questions.box.shown == [("[rank 2] name? ", True)]
    assert (questions.sent, questions.poll_interval) == ([], room.POLL_INTERVAL)
    assert questions.look("anna") == (2, "name? ········")
    assert questions.look(times=2) is None
    assert questions.sent == [(2, InputReply(question=7, text="anna"))]
    assert questions.poll_interval > 1e9


def test_lone_surrogates_are_escaped(questions: Asking) -> None:
    questions.handle_notice(asks(0, prompt="\ud800? "))
    questions.look()
    assert questions.box.shown == [("[rank 0] \\ud800? ", False)]
    assert questions.look("\udfff") == (0, "\\ud800? \\udfff")
    assert questions.sent == [(0, InputReply(question=1, text="\udfff"))]


def test_a_repeated_debugger_question_comes_before_questions_of_other_ranks(
    questions: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    questions.handle_notice(asks(0, 1))
    questions.handle_notice(asks(1, 1))
    questions.look("p x", times=2)  # rank 0 has a moment to ask again
    assert len(questions.box.shown) == 1
    questions.handle_notice(asks(0, 2))
    questions.look()
    assert questions.box.shown[1][0].startswith("[rank 0]")
    questions.look("c")
    now[0] += room.SAME_RANK_SECONDS
    questions.look()
    assert questions.box.shown[2][0].startswith("[rank 1]")
    assert [rank for rank, _ in questions.sent] == [0, 0]


def test_a_withdrawn_question_needs_no_answer(questions: Asking) -> None:
    questions.handle_notice(asks(0, 1))
    questions.handle_notice(asks(1, 4))
    questions.look()
    questions.handle_notice(InputClosed(0, 1))
    questions.look()
    assert [prompt for prompt, _ in questions.box.shown] == ["[rank 0] > ", "[rank 1] > "]
    questions.look("x")
    assert questions.sent == [(1, InputReply(question=4, text="x"))]


def test_questions_of_a_finished_rank_are_not_asked(questions: Asking) -> None:
    questions.handle_notice(asks(0))
    questions.look()
    questions.handle_notice(asks(1))
    questions.poll(lambda rank: rank == 0)
    assert questions.box.shown[-1][0] == "[rank 1] > "
    questions.poll(lambda _rank: True)
    assert questions.poll_interval > 1e9
    assert not questions.sent


def test_open_questions_are_answered_with_end_of_input_at_eof_and_on_close(
    questions: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SAME_RANK_SECONDS", 0.0)
    for rank in range(3):
        questions.handle_notice(asks(rank, rank + 1))
    questions.look(room.END_OF_FILE)
    assert len(questions.sent) == 1
    questions.look()
    questions.close()
    questions.close()
    ends = [(rank, InputReply(question=rank + 1, is_end=True)) for rank in range(3)]
    assert questions.sent == ends


def test_questions_end_if_the_user_changes_the_page(questions: Asking) -> None:
    questions.cancel_if_page_changed(1)
    questions.handle_notice(asks(0, 1))
    questions.handle_notice(asks(1, 1))
    questions.cancel_if_page_changed(2)  # before anything was asked
    questions.look()
    questions.cancel_if_page_changed(2)
    assert not questions.sent
    questions.cancel_if_page_changed(3)
    assert questions.sent == [(0, InputReply(question=1, is_end=True))]
    questions.cancel_if_page_changed(3)
    assert len(questions.sent) == len(questions.box.shown) == 1


def test_questions_are_refused_at_once_without_an_input_page() -> None:
    questions = Asking(InputBackend("no page"))
    questions.handle_notice(asks(0))
    questions.look()
    assert questions.sent == [(0, InputReply(question=1, refusal="no page"))]


def test_console_input_is_read_line_by_line_from_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    box, (keyboard, screen) = ConsoleInput(), pty.openpty()
    with os.fdopen(screen) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        assert not box.show_prompt("[rank 0] ipdb> ", is_secret=False)
        assert capsys.readouterr().out == "[rank 0] ipdb> "
        for typed, line in ((b"", None), (b"p x", None), (b"\n", "p x")):
            os.write(keyboard, typed)
            assert box.poll() == line
        os.write(keyboard, b"\x04")  # Ctrl-D
        assert box.poll() == room.END_OF_FILE
        assert "%ddp push" in box.show_prompt("Password: ", is_secret=True)
    os.close(keyboard)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert box.show_prompt("> ", is_secret=False) == room.NO_INPUT


@pytest.mark.parametrize("can_close", [True, False])
def test_an_unanswered_input_box_is_closed_or_mentioned(questions: Asking, can_close: bool) -> None:
    questions.box.can_close = can_close
    questions.handle_notice(asks(1))
    questions.look()
    questions.look("x")
    questions.close()
    assert (questions.box.closed, questions.leftover_hint) == (0, "")
    questions.handle_notice(asks(1, 2))
    questions.look()
    questions.handle_notice(InputClosed(1, 2))
    assert questions.box.closed == 1
    questions.close()
    assert questions.leftover_hint == ("" if can_close else room.LEFTOVER_HINT)


@pytest.mark.parametrize(
    "end",
    [
        lambda questions: questions.poll(lambda rank: rank == 1),
        lambda questions: questions.cancel_if_page_changed(2),
        lambda questions: questions.close(),
    ],
    ids=["its rank ends", "somebody turns away", "the cell ends"],
)
def test_an_input_box_is_closed_once_its_rank_needs_no_answer(
    questions: Asking, end: Callable[[Asking], object]
) -> None:
    questions.cancel_if_page_changed(1)
    questions.handle_notice(asks(1))
    questions.look()
    end(questions)
    assert (questions.box.closed, questions.leftover_hint) == (1, "")
