"""What ranks ask the user, one question at a time; a view asks, and goes on showing meanwhile."""

from __future__ import annotations

import math
import select
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nbddp.record.notices import Question, TakenBack
from nbddp.wire.messages import Answered

LOOK = 0.01  # seconds between two looks for an answer
STAYING = 0.3  # seconds in which a debugger asks again: its rank goes first
HIDDEN = "········"  # in the place of a secret
WAY_OUT = "nobody can type here: ask in a notebook's page or a console"


class RefusedError(RuntimeError):
    """Nobody can be asked, and why."""


class Box(Protocol):
    """Where somebody types; ``stays`` says what to do about one that nobody has answered."""

    stays: str

    def begin(self, prompt: str, *, is_secret: bool) -> None:
        """Show a prompt.

        Raises:
            RefusedError: nobody can type.
        """

    def poll(self) -> str | None:
        """What was typed, None while nothing was.

        Raises:
            EOFError: nothing more will be.
        """

    def close(self) -> bool:
        """Close a box that needs no answer any more. Return whether it is closed."""


Answer = Callable[[int, Answered], None]


@dataclass(frozen=True, slots=True)
class Typed:
    """What somebody typed for a rank, behind its prompt; a secret is not shown."""

    rank: int
    text: str


class Questions:
    """The questions of one cell.

    Args:
        box: where they are asked.
        answer: hands an answer to a rank.
    """

    def __init__(self, box: Box, answer: Answer) -> None:
        self._box = box
        self._answer = answer
        self._waiting: deque[Question] = deque()
        self._open: Question | None = None
        self._last = -1
        self._stays_until = 0.0
        self._turned_away: object = None
        self._is_shown = False  # a box that nobody has answered yet

    @property
    def stays(self) -> str:
        """What to do about a box that was left open when the cell ended; empty without one."""
        return self._box.stays if self._is_shown else ""

    @property
    def patience(self) -> float:
        """How long a view may wait for news, in seconds."""
        return LOOK if self._open is not None or self._waiting else math.inf

    def take(self, notice: Question | TakenBack) -> None:
        """A rank asks, or needs no answer any more."""
        if isinstance(notice, Question):
            self._waiting.append(notice)
        else:
            self._take_back(notice)

    def _take_back(self, taken: TakenBack) -> None:
        self._waiting = deque(each for each in self._waiting if not _is_it(each, taken))
        if self._open is not None and _is_it(self._open, taken):
            self._open = None
            self._close_box()

    def pump(self, has_ended: Callable[[int], bool]) -> Typed | None:
        """Ask what is next; hand on what was typed.

        Args:
            has_ended: whether a rank is through with the cell, or dead: it waits for nothing.
        """
        self._waiting = deque(each for each in self._waiting if not has_ended(each.rank))
        if self._open is not None and has_ended(self._open.rank):
            self._open = None
            self._close_box()
        if self._open is None:
            self._begin_next()
        return self._hand_on(self._open) if self._open is not None else None

    def _hand_on(self, question: Question) -> Typed | None:
        asked = question.asked
        try:
            text = self._box.poll()
        except EOFError:
            self._is_shown = False
            self._end(question, Answered(question=asked.question, is_end=True))
            return None
        if text is None:
            return None
        self._is_shown = False
        self._end(question, Answered(question=asked.question, text=text))
        shown = HIDDEN if asked.is_secret else text
        return Typed(question.rank, _printable(asked.prompt + shown))

    def note_page(self, seen: object) -> None:
        """What the page has done besides, such as how many cells it sent.

        Who does something else has turned away from the question that is open: it is answered with
        the end of file, or it would stand in his way for ever.
        """
        if self._open is not None and seen != self._turned_away:
            self._end(self._open, Answered(question=self._open.asked.question, is_end=True))
            self._close_box()
        self._turned_away = seen

    def close(self) -> None:
        """Whoever still waits for an answer gets none."""
        for question in (*([self._open] if self._open else []), *self._waiting):
            self._answer(question.rank, Answered(question=question.asked.question, is_end=True))
        self._open = None
        self._waiting.clear()
        self._close_box()

    def _close_box(self) -> None:
        """Close a box that no rank waits for: JupyterLab runs no other cell while one is open."""
        if self._is_shown:
            self._is_shown = not self._box.close()

    def _begin_next(self) -> None:
        question = self._next()
        if question is None:
            return
        prompt = _printable(f"[rank {question.rank}] {question.asked.prompt}")
        try:
            self._box.begin(prompt, is_secret=question.asked.is_secret)
        except RefusedError as error:
            refusal = Answered(question=question.asked.question, refusal=str(error))
            self._answer(question.rank, refusal)
            return
        self._open, self._is_shown = question, True

    def _next(self) -> Question | None:
        """The rank that was asked last goes first: a debugger asks again and again."""
        for question in self._waiting:
            if question.rank == self._last:
                self._waiting.remove(question)
                return question
        if not self._waiting or time.monotonic() < self._stays_until:
            return None
        return self._waiting.popleft()

    def _end(self, question: Question, answer: Answered) -> None:
        self._open, self._last = None, question.rank
        self._stays_until = time.monotonic() + STAYING
        self._answer(question.rank, answer)


def _printable(text: str) -> str:
    """With what no message can hold, half a character, written out."""
    return text.encode(errors="backslashreplace").decode()


def _is_it(question: Question, taken: TakenBack) -> bool:
    return (question.rank, question.asked.question) == (taken.rank, taken.question)


class NoBox:
    """Where nobody types."""

    stays = ""

    def __init__(self, reason: str = WAY_OUT) -> None:
        self._reason = reason

    def begin(self, prompt: str, *, is_secret: bool) -> None:
        """Say so."""
        del prompt, is_secret
        raise RefusedError(self._reason)

    def poll(self) -> str | None:
        """Nothing."""
        return None

    def close(self) -> bool:
        """Return True: no box was shown."""
        return True


class ConsoleBox:
    """A terminal; what is typed there comes by the line."""

    stays = ""

    def begin(self, prompt: str, *, is_secret: bool) -> None:
        """Show the prompt."""
        if not _has_terminal():
            raise RefusedError(WAY_OUT)
        if is_secret:
            raise RefusedError("this terminal would show what is typed: push it with %ddp push")
        sys.stdout.write(prompt)
        sys.stdout.flush()

    def poll(self) -> str | None:
        """The line, as soon as it is there: who waits for it could not be interrupted."""
        if not select.select([sys.stdin], [], [], 0)[0]:
            return None
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def close(self) -> bool:
        """Return True: a prompt in a terminal needs no closing."""
        return True


def _has_terminal() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
