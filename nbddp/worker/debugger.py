"""Debuggers in a rank: Python's own and IPython's, at the notebook's input box."""

from __future__ import annotations

import bdb
import functools
import os
import pdb
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from IPython.core.debugger import Pdb

import nbddp
from nbddp.worker.keyboard import Keyboard

OURS = Path(nbddp.__file__).parent
FIRST = ()  # which ranks ``breakpoint()`` stops: the first that comes to one


class RankPdb(Pdb):
    """IPython's debugger in a cell, which it takes for one piece of code.

    IPython runs a cell's statements one by one, each as a module of its own. So there is no stop
    where one of them begins or returns, nor in what stands between them; what a statement calls
    can be stepped into as ever.
    """

    def __init__(self, is_users: Callable[[str], bool]) -> None:
        super().__init__(nosigint=True)  # SIGINT is the interrupter's
        self.report_skipped = False
        self._is_users = is_users

    def stop_here(self, frame: FrameType) -> bool:
        """Only where the user's code is, or was called from."""
        return bool(super().stop_here(frame)) and self._comes_from_users(frame)

    def _comes_from_users(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if self._is_users(frame.f_code.co_filename):
                return True
            frame = frame.f_back
        return False

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        """A function is entered; where it is a statement of a cell, its line comes next."""
        if not _is_statement(frame):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """A function returns; where it is a statement of a cell, the next one is gone to."""
        if not _is_statement(frame):
            super().user_return(frame, return_value)


@contextmanager
def _printing_values() -> Iterator[None]:
    """What ``interact`` evaluates is printed at once, as in a terminal, and is not the cell's."""
    before, sys.displayhook = sys.displayhook, sys.__displayhook__
    try:
        yield
    finally:
        sys.displayhook = before


def _is_statement(frame: FrameType) -> bool:
    name = frame.f_code.co_name
    return name == "<module>" or name.startswith("<cell line: ")  # the latter: IPython 7 and 8


class Debuggers:
    """Lets ``breakpoint()`` stop one rank, or those that were named, and knows when one debugs.

    Args:
        keyboard: where debuggers get their commands.
        is_users: whether a file of this name is a cell's, or a script's.
        is_first: whether this rank is the first of its cell to say so.
    """

    def __init__(
        self, keyboard: Keyboard, is_users: Callable[[str], bool], is_first: Callable[[], bool]
    ) -> None:
        self._keyboard = keyboard
        self._is_users = is_users
        self._is_first = is_first
        self._rank = -1
        self._ranks: Sequence[int] = FIRST
        self._stops: bool | None = None  # this rank in this cell; None before it came to one

    def take_over(self) -> None:
        """Be asked at every ``breakpoint()``, and know of all debuggers that take commands."""
        sys.breakpointhook = self._break
        module: Any = pdb
        module.set_trace = self._set_trace
        interaction = module.Pdb.interaction

        @functools.wraps(interaction)
        def interact(debugger: Any, *args: Any, **options: Any) -> Any:
            debugger.nosigint = True  # else it takes SIGINT, which is the interrupter's
            with self._keyboard.debugging(), _printing_values():
                return interaction(debugger, *args, **options)

        module.Pdb.interaction = interact

    def begin_cell(self, rank: int, ranks: Sequence[int]) -> None:
        """A cell begins, in which these ranks are to be stopped."""
        self._rank, self._ranks, self._stops = rank, ranks, None

    def _break(self, *args: Any, **options: Any) -> Any:
        chosen = os.environ.get("PYTHONBREAKPOINT", "")
        if chosen:  # Python's own way to choose another debugger, or none
            return sys.__breakpointhook__(*args, **options)
        if self._stops is None:
            self._stops = self._rank in self._ranks if self._ranks else self._is_first()
        if self._stops:
            RankPdb(self._is_users).set_trace(sys._getframe(1))
        return None

    def _set_trace(self, *, header: str | None = None, **_options: Any) -> None:
        """As ``pdb.set_trace()``: on every rank that comes to it."""
        debugger = RankPdb(self._is_users)
        if header is not None:
            debugger.message(header)
        debugger.set_trace(sys._getframe(1))

    def end_cell(self) -> None:
        """What steps through a cell does not step through the next one."""
        if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
            sys.settrace(None)


def remember(error: BaseException) -> None:
    """Keep what ended a cell where Python keeps an uncaught error, an interrupt too."""
    if was_quit(error):
        return  # what was looked into may be looked into again
    sys.last_type, sys.last_value = type(error), error
    sys.last_traceback = error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def post_mortem(is_users: Callable[[str], bool]) -> None:
    """Look into the last error: its frames and their names are still there.

    Args:
        is_users: whether a file of this name is a cell's, or a script's.

    Raises:
        RuntimeError: nothing has failed here.
    """
    __tracebackhide__ = True
    traceback = getattr(sys, "last_traceback", None)
    if traceback is None:
        raise RuntimeError("nothing has failed on this rank: there is no traceback to look into")
    debugger = Pdb()
    debugger.reset()
    debugger.interaction(None, without_ours(traceback, is_users))


def without_ours(traceback: TracebackType, is_users: Callable[[str], bool]) -> TracebackType:
    """A traceback from the user's first line on, without what nbddp does in the end.

    What is left of a traceback that has none of the user's lines is all of it.
    """
    steps = [*_steps(traceback)]
    files = [step.tb_frame.f_code.co_filename for step in steps]
    users = [place for place, name in enumerate(files) if is_users(name)]
    if not users:
        return traceback
    end = len(steps)
    while end > users[-1] + 1 and Path(files[end - 1]).is_relative_to(OURS):
        end -= 1
    rest: TracebackType | None = None
    for step in reversed(steps[users[0] : end]):
        rest = TracebackType(rest, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return rest or traceback


def _steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def was_quit(error: BaseException | None) -> bool:
    """Whether somebody left the debugger by ``q``, or at the end of its input."""
    return isinstance(error, bdb.BdbQuit)
