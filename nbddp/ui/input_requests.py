"""What ranks ask the user, one question at a time; a view asks, and goes on showing meanwhile."""

from __future__ import annotations

import math
import select
import sys
import time
from collections.abc import Callable
from typing import Any

from nbddp.record.notices import InputClosed, InputRequest
from nbddp.ui.frontend import EMPTY_OUTPUT, new_display_id, publish, supports_widgets
from nbddp.wire.messages import InputReply

POLL_INTERVAL = 0.01  # seconds between two looks for an answer
SAME_RANK_SECONDS = 0.3  # seconds in which a debugger asks again: its rank goes first
SECRET_MASK = "········"  # in the place of a secret
NO_INPUT = "nobody can type here: ask in a notebook's page or a console"


class NoInputError(RuntimeError):
    """Nobody can be asked, and why."""


class InputBackend:
    """Where somebody types: here nobody can, and is told why.

    Attributes:
        leftover_hint: what to do about a box that nobody has answered.
    """

    leftover_hint = ""

    def __init__(self, refusal: str = NO_INPUT) -> None:
        self._refusal = refusal

    def show_prompt(self, prompt: str, *, is_secret: bool) -> None:
        """Show a prompt.

        Raises:
            NoInputError: nobody can type.
        """
        del prompt, is_secret
        raise NoInputError(self._refusal)

    def poll(self) -> str | None:
        """Return what was typed, None while nothing was.

        Raises:
            EOFError: nothing more will be.
        """
        return None

    def close(self) -> bool:
        """Close a box that needs no answer any more. Return whether it is closed."""
        return True


class InputQueue:
    """The questions of one cell.

    Args:
        backend: where they are asked.
        send_reply: hands an answer to a rank.
    """

    def __init__(
        self, backend: InputBackend, send_reply: Callable[[int, InputReply], None]
    ) -> None:
        self._backend = backend
        self._send_reply = send_reply
        self._pending: list[InputRequest] = []
        self._open: InputRequest | None = None
        self._last_rank = -1
        self._last_rank_first_until = 0.0
        self._page_state: object = None
        self._is_box_open = False  # a box that nobody has answered yet

    @property
    def leftover_hint(self) -> str:
        """What to do about a box that was left open when the cell ended; empty without one."""
        return self._backend.leftover_hint if self._is_box_open else ""

    @property
    def poll_interval(self) -> float:
        """How long a view may wait for news, in seconds."""
        return POLL_INTERVAL if self._open is not None or self._pending else math.inf

    def handle_notice(self, notice: InputRequest | InputClosed) -> None:
        """A rank asks, or needs no answer any more."""
        if isinstance(notice, InputRequest):
            self._pending.append(notice)
        else:
            closed = (notice.rank, notice.question)
            self._remove(lambda each: (each.rank, each.asked.question) == closed)

    def poll(self, has_ended: Callable[[int], bool]) -> tuple[int, str] | None:
        """Ask what is next; hand on what was typed.

        Args:
            has_ended: whether a rank is through with the cell, or dead: it waits for nothing.

        Returns:
            A rank, and its prompt with what somebody typed behind it; a secret is not shown.
        """
        self._remove(lambda each: has_ended(each.rank))
        if self._open is None:
            self._ask_next()
        if (request := self._open) is None:
            return None
        try:
            text = self._backend.poll()
        except EOFError:
            self._is_box_open = False
            self._answer_open(request, is_end=True)
            return None
        if text is None:
            return None
        self._is_box_open = False
        self._answer_open(request, text=text)
        shown = SECRET_MASK if request.asked.is_secret else text
        return request.rank, _printable(request.asked.prompt + shown)

    def cancel_if_page_changed(self, page_state: object) -> None:
        """What the page has done besides, such as how many cells it sent.

        Who does something else has turned away from the question that is open: it is answered with
        the end of file, or it would stand in his way for ever.
        """
        if self._open is not None and page_state != self._page_state:
            self._answer_open(self._open, is_end=True)
            self._close_box()
        self._page_state = page_state

    def close(self) -> None:
        """Whoever still waits for an answer gets none."""
        for request in (*([self._open] if self._open else []), *self._pending):
            self._reply_to(request, is_end=True)
        self._open, self._pending = None, []
        self._close_box()

    def _remove(self, is_over: Callable[[InputRequest], bool]) -> None:
        """Forget the questions that need no answer any more."""
        self._pending = [each for each in self._pending if not is_over(each)]
        if self._open is not None and is_over(self._open):
            self._open = None
            self._close_box()

    def _close_box(self) -> None:
        """Close a box that no rank waits for: JupyterLab runs no other cell while one is open."""
        if self._is_box_open:
            self._is_box_open = not self._backend.close()

    def _ask_next(self) -> None:
        """Ask the rank that was asked last before the others: a debugger asks again and again."""
        request = next((each for each in self._pending if each.rank == self._last_rank), None)
        if request is None:
            if not self._pending or time.monotonic() < self._last_rank_first_until:
                return
            request = self._pending[0]
        self._pending.remove(request)
        prompt = _printable(f"[rank {request.rank}] {request.asked.prompt}")
        try:
            self._backend.show_prompt(prompt, is_secret=request.asked.is_secret)
        except NoInputError as error:
            self._reply_to(request, refusal=str(error))
        else:
            self._open, self._is_box_open = request, True

    def _answer_open(self, request: InputRequest, **answer: Any) -> None:
        self._open, self._last_rank = None, request.rank
        self._last_rank_first_until = time.monotonic() + SAME_RANK_SECONDS
        self._reply_to(request, **answer)

    def _reply_to(self, request: InputRequest, **answer: Any) -> None:
        self._send_reply(request.rank, InputReply(question=request.asked.question, **answer))


def _printable(text: str) -> str:
    """With what no message can hold, half a character, written out."""
    return text.encode(errors="backslashreplace").decode()


class ConsoleInput(InputBackend):
    """A terminal; what is typed there comes by the line."""

    def show_prompt(self, prompt: str, *, is_secret: bool) -> None:
        """Show the prompt."""
        if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
            raise NoInputError(NO_INPUT)
        if is_secret:
            raise NoInputError("this terminal would show what is typed: push it with %ddp push")
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


END_OF_FILE = "\x04"  # what a page sends for the end of file
CLOSE_TIMEOUT = 1.0  # seconds within which a page closes a box; JupyterLab 4.6 needs 10 to 60 ms
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


class StdinPrompt(InputBackend):
    """The page that runs the cell; used on the kernel's main thread.

    ipykernel's own ``raw_input()`` waits. This class sends the same request on the stdin channel,
    and looks for the answer while the cell goes on.

    No message takes a box off a page. JupyterLab runs no other cell while it believes that one is
    open: until somebody presses Enter in it, or the kernel is interrupted. So a box that needs no
    answer is closed by a script, where the page runs scripts.
    """

    leftover_hint = (
        "the input box takes no answer any more: if the page waits for its “pending input”, "
        "press Enter in it, or interrupt the kernel"
    )

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._request_id = ""  # the request's id

    def show_prompt(self, prompt: str, *, is_secret: bool) -> None:
        """Show the box; answers to an earlier one are dropped."""
        kernel = self._kernel
        if not kernel._allow_stdin:
            raise NoInputError(NO_INPUT)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        while kernel.stdin_socket.poll(0):
            kernel.stdin_socket.recv_multipart()
        if hasattr(kernel, "_get_shell_context_var"):  # who asked for the cell, in ipykernel 7
            identity = kernel._get_shell_context_var(kernel._shell_parent_ident)
        else:
            identity = kernel._parent_ident["shell"]
        sent = kernel.session.send(
            kernel.stdin_socket,
            "input_request",
            {"prompt": prompt, "password": is_secret},
            kernel.get_parent("shell"),
            ident=identity,
        )
        self._request_id = sent["header"]["msg_id"]

    def poll(self) -> str | None:
        """What was typed, None while nothing was."""
        text = self._read_reply()
        if text == END_OF_FILE:
            raise EOFError
        return text

    def _read_reply(self) -> str | None:
        if not self._kernel.stdin_socket.poll(0):
            return None
        _, reply = self._kernel.session.recv(self._kernel.stdin_socket)
        if reply is None:
            return None
        if reply["parent_header"].get("msg_id", self._request_id) != self._request_id:
            return None  # a box that was left open
        return str(reply["content"].get("value", ""))

    def close(self) -> bool:
        """Press Enter in the box. Return whether the page did so."""
        if not supports_widgets(self._kernel.shell):
            return False
        display_id = new_display_id()
        publish({"application/javascript": _PRESS_ENTER, "text/plain": ""}, display_id)
        try:
            deadline = time.monotonic() + CLOSE_TIMEOUT
            while (reply := self._read_reply()) is None and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL)
            return reply is not None
        finally:  # remove the script: a notebook that is opened again must not run it
            publish(EMPTY_OUTPUT, display_id, is_update=True)
