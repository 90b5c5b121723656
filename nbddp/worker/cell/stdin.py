"""Read input for a rank from the notebook's input box, one request at a time.

``input()``, ``getpass()``, ``breakpoint()``, ``pdb`` and ``%debug`` all use it.
"""

from __future__ import annotations

import builtins
import getpass
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from nbddp.wire import messages as msg
from nbddp.worker.output.log_writer import flush_python_streams


class StdinProxy:
    """Request input from the notebook in the main thread while a cell runs.

    Args:
        post: sends a request, after all earlier output.
        is_interrupted: returns whether the cell was interrupted. If so, requests fail.
    """

    def __init__(
        self,
        post: Callable[[msg.MessageFromRank], None],
        *,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._post = post
        self.is_interrupted = is_interrupted
        self._pid = os.getpid()
        self._number = 0
        self._question: msg.InputRequested | None = None  # the last one
        # replies to the open request; a queue in C, so that an interrupt leaves no lock held
        self._replies: SimpleQueue[msg.InputReply] = SimpleQueue()
        self._prepared_replies: list[str] = []
        self.is_debugging = False  # whether a debugger reads the input
        self.waiting_for = ""  # the function that waits for a reply, such as ``input()``

    def install(self) -> None:
        """Replace the functions of Python that read from a terminal."""
        builtins.input = self.ask
        getpass.getpass = self.ask_secret

    def begin_cell(self, replies: Sequence[str]) -> None:
        """Start a cell. ``replies`` answer its first requests, for a replay."""
        self._prepared_replies = [*replies]

    def ask(self, prompt: object = "", /) -> str:
        """Request a line of input, as ``input()`` does.

        Raises:
            EOFError: the cell was interrupted, or the request was cancelled.
            RuntimeError: the notebook has no page, or this is not the main thread of a rank.
        """
        return self._ask(str(prompt), is_secret=False)

    def ask_secret(self, prompt: str = "Password: ", stream: object = None) -> str:  # noqa: ARG002
        """Request hidden input, as ``getpass()`` does."""
        return self._ask(prompt, is_secret=True)

    def check_supported(self, what: str) -> None:
        """Check that this is the main thread of the rank: only there are requests supported.

        Raises:
            RuntimeError: this is a child process or another thread.
        """
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{what} is not supported in a process or thread that a rank has started: "
                "call it in the cell itself"
            )

    def _ask(self, prompt: str, *, is_secret: bool) -> str:
        what = msg.DEBUGGER if self.is_debugging else msg.GETPASS if is_secret else msg.INPUT
        self.check_supported(what)
        if self.is_interrupted():
            raise EOFError("the cell was interrupted")
        if self._prepared_replies:
            text = self._prepared_replies.pop(0)
            print(f"{prompt}{text}")  # noqa: T201 - as a terminal would show it
            return text
        flush_python_streams()
        self._number += 1
        number, self.waiting_for, self._replies = self._number, what, SimpleQueue()
        self._question = msg.InputRequested(
            question=number, prompt=prompt, is_secret=is_secret, what=what
        )
        self._post(self._question)
        reply = None
        try:
            reply = self._replies.get()
        finally:
            self.waiting_for = ""
            if reply is None:
                self._post(msg.InputCancelled(question=number))
        if reply.refusal:
            raise RuntimeError(f"{what} is not supported: {reply.refusal}")
        if reply.is_end:
            raise EOFError("no input was entered")
        return reply.text

    def ask_again(self) -> None:
        """Send an open request to another notebook."""
        # On the control thread.
        if self.waiting_for and self._question is not None:
            self._post(self._question)

    def receive_reply(self, reply: msg.InputReply) -> None:
        """Deliver a reply to the open request. Ignore replies to cancelled requests."""
        # On the control thread.
        if reply.question == self._number and self.waiting_for:
            self._replies.put(reply)
