"""What ranks ask the user, one question at a time; a view asks, and goes on showing meanwhile."""

from __future__ import annotations

import math
import select
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import zmq
from IPython.display import publish_display_data

from nbddp.record.notices import Question, TakenBack
from nbddp.ui.frontend import shows_widgets
from nbddp.ui.screen import EMPTY
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


END = "\x04"  # what a page sends for the end of file
CLOSING = 1.0  # seconds within which a page closes a box; JupyterLab 4.6 needs 10 to 60 ms
# JupyterLab runs a script before it puts its output on the page, hence the timer. The box comes on
# another channel than the script, possibly later. Only boxes of the same cell are closed.
_PRESS_ENTER = """
function press(tries) {
  const area = typeof element === "undefined" ? null : element.closest?.(".jp-OutputArea");
  const open = ".jp-OutputArea-stdin-item:not(.jp-OutputArea-stdin-hiding) input";
  const boxes = area?.querySelectorAll?.(open) ?? [];
  for (const box of boxes) {
    box.value = "";
    box.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
  }
  if (!boxes.length && tries) setTimeout(press, 50, tries - 1);
}
setTimeout(press, 0, 10);
"""


class KernelBox:
    """The page that runs the cell; used on the kernel's main thread.

    ipykernel's own ``raw_input()`` waits. This class sends the same request on the stdin channel,
    and looks for the answer while the cell goes on.

    No message takes a box off a page. JupyterLab runs no other cell while it believes that one is
    open: until somebody presses Enter in it, or the kernel is interrupted. So a box that needs no
    answer is closed by a script, where the page runs scripts.
    """

    stays = (
        "the input box takes no answer any more: if the page waits for its “pending input”, "
        "press Enter in it, or interrupt the kernel"
    )

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._asked = ""  # the request's id

    def begin(self, prompt: str, *, is_secret: bool) -> None:
        """Show the box; answers to an earlier one are dropped."""
        kernel = self._kernel
        if not kernel._allow_stdin:
            raise RefusedError(WAY_OUT)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        while self._has_message():
            kernel.stdin_socket.recv_multipart(zmq.NOBLOCK)
        sent = kernel.session.send(
            kernel.stdin_socket,
            "input_request",
            {"prompt": prompt, "password": is_secret},
            kernel.get_parent("shell"),
            ident=self._identity(),
        )
        self._asked = sent["header"]["msg_id"]

    def _identity(self) -> Any:
        """Who asked for the cell: ipykernel 7 has it in a variable of each shell, 6 in a dict."""
        kernel = self._kernel
        if hasattr(kernel, "_get_shell_context_var"):
            return kernel._get_shell_context_var(kernel._shell_parent_ident)
        return kernel._parent_ident["shell"]

    def _has_message(self) -> bool:
        return bool(self._kernel.stdin_socket.poll(0))

    def poll(self) -> str | None:
        """What was typed, None while nothing was."""
        text = self._reply()
        if text == END:
            raise EOFError
        return text

    def _reply(self) -> str | None:
        if not self._has_message():
            return None
        _, reply = self._kernel.session.recv(self._kernel.stdin_socket)
        if reply is None:
            return None
        if reply["parent_header"].get("msg_id", self._asked) != self._asked:
            return None  # a box that was left open
        return str(reply["content"].get("value", ""))

    def close(self) -> bool:
        """Press Enter in the box. Return whether the page did so."""
        if not shows_widgets(self._kernel.shell):
            return False
        place = {"display_id": f"nbddp-{uuid.uuid4().hex}"}
        script = {"application/javascript": _PRESS_ENTER, "text/plain": ""}
        publish_display_data(script, transient=place)
        try:
            deadline = time.monotonic() + CLOSING
            while (reply := self._reply()) is None and time.monotonic() < deadline:
                time.sleep(LOOK)
            return reply is not None
        finally:  # remove the script: a notebook that is opened again must not run it
            publish_display_data(EMPTY, transient=place, update=True)
