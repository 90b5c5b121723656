"""Debuggers in a rank: Python's own and IPython's, at the notebook's input box."""

from __future__ import annotations

import bdb
import functools
import os
import pdb
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import IPython.core.debugger
from IPython.core.debugger import Pdb

import nbddp
from nbddp.wire.messages import DEBUGGER
from nbddp.worker.keyboard import Keyboard
from nbddp.worker.main_thread import comes_from

DEBUGGERS = {module.__file__ for module in (bdb, pdb, IPython.core.debugger)}
_LAST = ("last_type", "last_value", "last_traceback", "last_exc")  # of sys
_LOOKS_BACK = re.compile(r"^\s*%debug\b|\bpm\(|\blast_", re.MULTILINE)  # at the last error
OURS = Path(nbddp.__file__).parent
KNOWS_CAUSES = sys.version_info >= (3, 13) or hasattr(IPython.core.debugger, "CHAIN_EXCEPTIONS")
FIRST = ()  # which ranks ``breakpoint()`` stops: the first that comes to one


class RankPdb(Pdb):
    """IPython's debugger in a cell, which it takes for one piece of code.

    IPython runs a cell's statements one by one, each as a module of its own. So there is no stop
    where one of them begins or returns, nor in what stands between them; what a statement calls
    can be stepped into as ever.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"nosigint": True} | options)  # SIGINT is the interrupter's
        self.report_skipped = False

    @staticmethod
    def is_users(_filename: str) -> bool:
        """Whether a file of this name is a cell's, or a script's."""
        return True

    def stop_here(self, frame: FrameType) -> bool:
        """Only where the user's code is, or was called from."""
        return bool(super().stop_here(frame)) and comes_from(frame, self.is_users)

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        """A function is entered; where it is a statement of a cell, its line comes next."""
        if not _is_statement(frame):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """A function returns; where it is a statement of a cell, the next one is gone to."""
        if not _is_statement(frame):
            super().user_return(frame, return_value)

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        """An error comes by; those with which IPython ends a statement are not the user's."""
        if not comes_from(frame, self.is_users):
            return
        super().user_exception(frame, exc_info)
        if _is_statement(frame):
            frame.f_locals.pop("__exception__", None)  # else a name of the user's

    def do_run(self, arg: str) -> None:
        """Say what begins a cell anew: this would end it with an error that nobody knows."""
        del arg
        self.error("the debugger cannot restart a cell: enter `q`, then run the cell again")

    do_restart = do_run


def rank_pdb(is_users: Callable[[str], bool]) -> type[RankPdb]:
    """The debugger of a rank, which debuggers within it are made of too.

    Args:
        is_users: whether a file of this name is a cell's, or a script's.
    """
    return type(RankPdb.__name__, (RankPdb,), {"is_users": staticmethod(is_users)})


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
        make: what stops in a cell.
        is_first: whether this rank is the first of its cell to say so.
    """

    def __init__(
        self, keyboard: Keyboard, make: Callable[[], Pdb], is_first: Callable[[], bool]
    ) -> None:
        self._keyboard = keyboard
        self._make = make
        self._is_first = is_first
        self._rank = -1
        self._ranks: Sequence[int] = FIRST
        self._is_interrupts = False  # what is remembered
        self._set_aside: dict[str, Any] = {}  # hidden from this cell; remembered again at its end
        self._stops: bool | None = None  # this rank in this cell; None before it came to one

    def take_over(self) -> None:
        """Be asked at every ``breakpoint()``, and know of all debuggers that take commands."""
        sys.breakpointhook = self._break
        pythons: Any = pdb
        ipythons: Any = IPython.core.debugger
        pythons.set_trace = self._set_trace
        ipythons.set_trace = self._set_trace
        interaction, look_back = pythons.Pdb.interaction, pythons.pm

        @functools.wraps(look_back)
        def pm() -> None:
            if _last_traceback() is not None:
                look_back()

        pythons.pm = pm

        @functools.wraps(interaction)
        def interact(debugger: Any, *args: Any, **options: Any) -> Any:
            debugger.nosigint = True  # else it takes SIGINT, which is the interrupter's
            self._keyboard.check_place(DEBUGGER)
            with self._keyboard.debugging(), _printing_values():
                try:
                    return interaction(debugger, *args, **options)
                finally:
                    if self._keyboard.is_called_off():  # IPython's keeps an interrupt to itself
                        debugger.set_quit()

        pythons.Pdb.interaction = interact

    def begin_cell(self, rank: int, ranks: Sequence[int], source: str, *, is_alone: bool) -> None:
        """A cell begins, in which these ranks are to be stopped.

        What an interrupted cell held is freed now, unless this cell looks into it. In a cell that
        runs on several ranks, ``%debug`` opens only on ranks with an error of their own: the others
        were interrupted because of it.

        Args:
            rank: this rank.
            ranks: the ranks that ``breakpoint()`` stops.
            source: of the cell.
            is_alone: whether the cell runs on this rank only.
        """
        if self._is_interrupts and not _LOOKS_BACK.search(source):
            self._is_interrupts = False
            forget()
        elif self._is_interrupts and not is_alone:
            self._set_aside = forget()
        self._rank, self._ranks, self._stops = rank, ranks, None
        if sys.breakpointhook in (self._break, sys.__breakpointhook__):
            # another debugger stops where it is called from, which must not be here
            sys.breakpointhook = sys.__breakpointhook__ if _has_other() else self._break

    def _break(self, *args: Any, **options: Any) -> Any:
        if _has_other():  # since this cell
            return sys.__breakpointhook__(*args, **options)
        self._keyboard.check_place(DEBUGGER)
        if self._stops is None:
            self._stops = self._rank in self._ranks if self._ranks else self._is_first()
        if self._stops:
            self._make().set_trace(sys._getframe(1))
        return None

    def _set_trace(
        self, frame: FrameType | None = None, header: str | None = None, **_options: Any
    ) -> None:
        """As ``pdb.set_trace()``, or IPython's: on every rank that comes to it."""
        self._keyboard.check_place(DEBUGGER)
        debugger = self._make()
        if header is not None:
            debugger.message(header)
        debugger.set_trace(frame or sys._getframe(1))

    def remember(self, error: BaseException, *, is_interrupt: bool) -> None:
        """Keep what ended a cell where Python keeps an uncaught error.

        What an interrupted cell held may be large, and wanted for its next run: it is kept until
        another cell begins, and an error until the next one.
        """
        self._is_interrupts = is_interrupt
        sys.last_type, sys.last_value = type(error), error
        sys.last_traceback = error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error

    def end_cell(self) -> None:
        """What steps through a cell does not step through the next one."""
        vars(sys).update(self._set_aside)
        self._set_aside = {}
        if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
            sys.settrace(None)


def _has_other() -> bool:
    """Whether the user has chosen another debugger, or none, in Python's own way."""
    return os.environ.get("PYTHONBREAKPOINT", "") not in ("", "pdb.set_trace")


def forget() -> dict[str, Any]:
    """Forget the last error. Return what was known of it, by its names in ``sys``."""
    names = [each for each in _LAST if hasattr(sys, each)]
    return {name: vars(sys).pop(name) for name in names}


def _last_traceback() -> TracebackType | None:
    """Return the traceback of this rank's last error; print a line if nothing has failed."""
    traceback: TracebackType | None = getattr(sys, "last_traceback", None)
    if traceback is None:
        print("nbddp: this rank has no error to debug")  # noqa: T201
    return traceback


def post_mortem(is_users: Callable[[str], bool]) -> None:
    """Look into the last error of this rank; do nothing if there was none.

    An error here would end the debugger of the rank that did fail.

    Args:
        is_users: whether a file of this name is a cell's, or a script's.
    """
    __tracebackhide__ = True
    traceback = _last_traceback()
    if traceback is None:
        return
    debugger = Pdb()
    debugger.reset()
    rest, error = without_ours(traceback, is_users), getattr(sys, "last_value", None)
    if error is None or not KNOWS_CAUSES:
        debugger.interaction(None, rest)
        return
    try:
        debugger.interaction(None, error.with_traceback(rest))
    finally:
        error.with_traceback(traceback)


def without_ours(traceback: TracebackType, is_users: Callable[[str], bool]) -> TracebackType:
    """A traceback from the user's first line on, without what nbddp does in the end.

    How a rank waits in ``input()``, or stops in a debugger, is nobody's line. What is left of a
    traceback that has none of the user's lines is all of it.
    """
    all_steps = [*steps(traceback)]
    files = [step.tb_frame.f_code.co_filename for step in all_steps]
    users = [place for place, name in enumerate(files) if is_users(name)]
    if not users:
        return traceback
    past = range(users[-1] + 1, len(files))
    end = next((place for place in past if _is_stop(files[place])), len(files))
    while end > users[-1] + 1 and Path(files[end - 1]).is_relative_to(OURS):
        end -= 1
    rest: TracebackType | None = None
    for step in reversed(all_steps[users[0] : end]):
        rest = TracebackType(rest, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return rest or traceback


def _is_stop(name: str) -> bool:
    """Whether a file of this name is how a rank stops, or waits, and not where."""
    return name in DEBUGGERS or Path(name).is_relative_to(OURS / "worker")


def steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the steps of a traceback, from the outermost one."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def was_quit(error: BaseException | None) -> bool:
    """Whether somebody left the debugger by ``q``, or at the end of its input."""
    return isinstance(error, bdb.BdbQuit)
