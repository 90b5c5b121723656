"""``input()`` of ranks: a view asks the user one request at a time, and shows output meanwhile."""

from __future__ import annotations

import math
import select
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from nbddp.record.notices import InputClosed, InputRequest
from nbddp.ui.frontend import EMPTY_OUTPUT, new_display_id, publish, supports_widgets
from nbddp.wire.messages import InputReply

POLL_INTERVAL = 0.01  # seconds between two checks for an answer
SAME_RANK_SECONDS = 0.3  # after an answer its rank goes first: a debugger soon asks again
SECRET_MASK = "········"  # shown instead of a secret
END_OF_FILE = "\x04"  # the answer if the input has ended, as a page sends it
NO_INPUT = "there is no input box here: run the cell on a notebook page or in a console"
LEFTOVER_HINT = (
    "the input box no longer needs an answer: if the page still waits for “pending input”, "
    "press Enter in the box, or interrupt the kernel"
)


class InputBackend:
    """The source of input; this one refuses every request."""

    def __init__(self, refusal: str = NO_INPUT) -> None:
        self._refusal = refusal

    def show_prompt(self, prompt: str, *, is_secret: bool) -> str:
        """Show a prompt. Return why input is not possible; empty if it is."""
        del prompt, is_secret
        return self._refusal

    def poll(self) -> str | None:
        """Return the answer or ``END_OF_FILE``, or None if there is none yet."""
        return None

    def close(self) -> bool:
        """Close an input box that needs no answer. Return whether it is closed."""
        return True


class InputQueue:
    """The input requests of one cell.

    Args:
        backend: the source of input.
        send_reply: sends an answer to a rank.
    """

    def __init__(
        self, backend: InputBackend, send_reply: Callable[[int, InputReply], None]
    ) -> None:
        self._backend = backend
        self._send_reply = send_reply
        self._pending: list[InputRequest] = []
        self._is_open = False  # whether the user sees the first pending request
        self._last_rank = -1
        self._last_rank_first_until = 0.0
        self._page_state: object = None
        self._is_box_open = False  # on the page, without an answer

    @property
    def leftover_hint(self) -> str:
        """How to close an input box that is still open after the cell; empty if none is open."""
        return LEFTOVER_HINT if self._is_box_open else ""

    @property
    def poll_interval(self) -> float:
        """The longest time between two calls of `poll`, in seconds."""
        return POLL_INTERVAL if self._pending else math.inf

    def handle_notice(self, notice: InputRequest | InputClosed) -> None:
        """Add a request, or remove one that needs no answer any more."""
        if isinstance(notice, InputRequest):
            self._pending.append(notice)
        else:
            closed = (notice.rank, notice.question)
            self._remove(lambda each: (each.rank, each.message.question) == closed)

    def poll(self, has_ended: Callable[[int], bool]) -> tuple[int, str] | None:
        """Show the next prompt, or send an answer to its rank.

        Args:
            has_ended: whether a rank has finished the cell or died. Its requests are removed.

        Returns:
            The rank and its prompt with the answer, if there is one. A secret is masked.
        """
        self._remove(lambda each: has_ended(each.rank))
        if not self._is_open:
            self._ask_next()
        if not self._is_open or (text := self._backend.poll()) is None:
            return None
        request, self._is_box_open = self._pending[0], False
        if text == END_OF_FILE:
            self._answer_open(is_end=True)
            return None
        self._answer_open(text=text)
        shown = SECRET_MASK if request.message.is_secret else text
        return request.rank, _printable(request.message.prompt + shown)

    def cancel_if_page_changed(self, page_state: object) -> None:
        """Answer the open request with the end of file if the page state has changed.

        The page state is, for example, the number of cells that the page has sent. A user who runs
        another cell will not answer the open request, and that cell would wait for ever.
        """
        if self._is_open and page_state != self._page_state:
            self._answer_open(is_end=True)
            self._close_box()
        self._page_state = page_state

    def close(self) -> None:
        """Answer all requests with the end of file, and close the input box."""
        for request in self._pending:
            self._reply_to(request, is_end=True)
        self._pending, self._is_open = [], False
        self._close_box()

    def _remove(self, is_over: Callable[[InputRequest], bool]) -> None:
        """Remove the requests that need no answer any more."""
        if self._is_open and is_over(self._pending[0]):
            self._is_open = False
            self._close_box()
        self._pending = [each for each in self._pending if not is_over(each)]

    def _close_box(self) -> None:
        """Close a box without a waiting rank: JupyterLab runs no other cell while one is open."""
        if self._is_box_open:
            self._is_box_open = not self._backend.close()

    def _ask_next(self) -> None:
        """Show the next prompt; the last rank goes first, as a debugger asks several times."""
        self._pending.sort(key=lambda each: each.rank != self._last_rank)
        is_early = time.monotonic() < self._last_rank_first_until
        if not self._pending or (is_early and self._pending[0].rank != self._last_rank):
            return
        request = self._pending[0]
        prompt = _printable(f"[rank {request.rank}] {request.message.prompt}")
        if refusal := self._backend.show_prompt(prompt, is_secret=request.message.is_secret):
            self._reply_to(self._pending.pop(0), refusal=refusal)
        else:
            self._is_open = self._is_box_open = True

    def _answer_open(self, **answer: Any) -> None:
        request, self._is_open = self._pending.pop(0), False
        self._last_rank = request.rank
        self._last_rank_first_until = time.monotonic() + SAME_RANK_SECONDS
        self._reply_to(request, **answer)

    def _reply_to(self, request: InputRequest, **answer: Any) -> None:
        self._send_reply(request.rank, InputReply(question=request.message.question, **answer))


def _printable(text: str) -> str:
    """Return the text with lone surrogates escaped, which no message can hold."""
    return text.encode(errors="backslashreplace").decode()


class ConsoleInput(InputBackend):
    """Reads lines from a terminal."""

    def show_prompt(self, prompt: str, *, is_secret: bool) -> str:
        if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
            return NO_INPUT
        if is_secret:
            return "this terminal would show the secret: send it with %ddp push instead"
        sys.stdout.write(prompt)
        sys.stdout.flush()
        return ""

    def poll(self) -> str | None:
        """Return a line if there is one, without blocking: a blocked read cannot be interrupted."""
        if not select.select([sys.stdin], [], [], 0)[0]:
            return None
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else END_OF_FILE


CLOSE_TIMEOUT = 1.0  # seconds for a page to close a box; JupyterLab 4.6 needs 10 to 60 ms


class StdinPrompt(InputBackend):
    """The input box of the page that runs the cell; for the kernel's main thread.

    ipykernel's ``raw_input()`` blocks. This class sends the same request on the stdin channel, and
    polls for the answer while the cell runs.

    No Jupyter message removes a box from a page. JupyterLab runs no other cell while a box is open:
    until the user presses Enter in it, or interrupts the kernel. So a script closes a box that
    needs no answer, on pages that run scripts.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._request_id = ""

    def show_prompt(self, prompt: str, *, is_secret: bool) -> str:
        """Show an input box; answers to earlier ones are dropped."""
        kernel = self._kernel
        if not kernel._allow_stdin:
            return NO_INPUT
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        while kernel.stdin_socket.poll(0):
            kernel.stdin_socket.recv_multipart()
        # the client that sent the cell
        if hasattr(kernel, "_get_shell_context_var"):  # ipykernel 7
            identity = kernel._get_shell_context_var(kernel._shell_parent_ident)
        else:
            identity = kernel._parent_ident["shell"]
        sent = kernel.session.send(
            kernel.stdin_socket,
            "input_request",
            {"prompt": prompt, "password": is_secret},
            kernel.shell.get_parent(),
            ident=identity,
        )
        self._request_id = sent["header"]["msg_id"]
        return ""

    def poll(self) -> str | None:
        if not self._kernel.stdin_socket.poll(0):
            return None
        _, reply = self._kernel.session.recv(self._kernel.stdin_socket)
        if reply is None:
            return None
        if reply["parent_header"].get("msg_id", self._request_id) != self._request_id:
            return None  # the answer to an earlier box
        return str(reply["content"].get("value", ""))

    def close(self) -> bool:
        """Have the page press Enter in the box. Return whether it did."""
        if not supports_widgets(self._kernel.shell):
            return False
        display_id = new_display_id()
        script = files("nbddp.ui").joinpath("press_enter.js").read_text(encoding="utf-8")
        publish({"application/javascript": script, "text/plain": ""}, display_id)
        try:
            deadline = time.monotonic() + CLOSE_TIMEOUT
            while (reply := self.poll()) is None and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL)
            return reply is not None
        finally:  # remove the script, so that a reopened notebook does not run it
            publish(EMPTY_OUTPUT, display_id, is_update=True)
