"""A rank's keyboard is the notebook's input box: one question at a time travels there and back.

``input()``, ``getpass()``, ``breakpoint()``, ``pdb`` and ``%debug`` all end here.
"""

from __future__ import annotations

import builtins
import getpass
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from nbddp.wire.messages import (
    DEBUGGER,
    GETPASS,
    INPUT,
    InputCancelled,
    InputReply,
    InputRequested,
    MessageFromRank,
)
from nbddp.worker.output.log_writer import flush_python_streams


class StdinProxy:
    """Asks whoever sits at the notebook, from the main thread, while a cell runs.

    Args:
        post: sends the question, behind all that was printed before it.
        is_interrupted: whether the cell was interrupted: then nothing more is asked in it.
    """

    def __init__(
        self,
        post: Callable[[MessageFromRank], None],
        *,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._post = post
        self.is_interrupted = is_interrupted
        self._pid = os.getpid()
        self._number = 0
        # to the question that is open; it is C's: an interrupt leaves no lock of it taken
        self._replies: SimpleQueue[InputReply] = SimpleQueue()
        self._prepared_replies: list[str] = []
        self.is_debugging = False  # what is asked is the debugger's
        self.waiting_for = ""  # what waits for an answer right now: ``input()``, or the debugger

    def install(self) -> None:
        """Be in the place of Python's own functions that read from a terminal."""
        builtins.input = self.ask
        getpass.getpass = self.ask_secret

    def begin_cell(self, replies: Sequence[str]) -> None:
        """A cell begins, whose first questions have their answers."""
        self._prepared_replies = [*replies]

    def ask(self, prompt: object = "", /) -> str:
        """Ask, as ``input()`` does.

        Raises:
            EOFError: nobody will answer: the cell was interrupted, or the question taken back.
            RuntimeError: nobody can: the notebook runs without a page, or this is no main thread.
        """
        return self._ask(str(prompt), is_secret=False)

    def ask_secret(self, prompt: str = "Password: ", stream: object = None) -> str:  # noqa: ARG002
        """Ask for what is not to be seen, as ``getpass()`` does."""
        return self._ask(prompt, is_secret=True)

    def check_supported(self, what: str) -> None:
        """See that this is where a rank may ask; what it asks with, it has not in common.

        Raises:
            RuntimeError: this is a process or thread that the rank has started.
        """
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{what} is not supported in a process or thread of a rank's own: ask in its cell"
            )

    def _ask(self, prompt: str, *, is_secret: bool) -> str:
        what = DEBUGGER if self.is_debugging else GETPASS if is_secret else INPUT
        self.check_supported(what)
        if self.is_interrupted():
            raise EOFError("the cell was interrupted")
        if self._prepared_replies:
            text = self._prepared_replies.pop(0)
            print(f"{prompt}{text}")  # noqa: T201 - as it would stand there
            return text
        flush_python_streams()
        self._number += 1
        number, self.waiting_for, self._replies = self._number, what, SimpleQueue()
        self._post(InputRequested(question=number, prompt=prompt, is_secret=is_secret, what=what))
        answer = None
        try:
            answer = self._replies.get()
        finally:
            self.waiting_for = ""
            if answer is None:
                self._post(InputCancelled(question=number))
        if answer.refusal:
            raise RuntimeError(f"{what} is not supported: {answer.refusal}")
        if answer.is_end:
            raise EOFError("nobody answered")
        return answer.text

    def receive_reply(self, answer: InputReply) -> None:
        """An answer came; one to a question that was taken back is nobody's."""
        if answer.question == self._number and self.waiting_for:
            self._replies.put(answer)
