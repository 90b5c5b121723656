"""Run pdb and IPython's debugger in a rank, with commands from the notebook's input box."""

from __future__ import annotations

import bdb
import inspect
import os
import pdb
import re
import sys
from collections.abc import Callable, Sequence
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any

import IPython.core.debugger
import torch.utils.checkpoint
from IPython.core.debugger import Pdb

from nbddp.wire.messages import DEBUGGER, RunCell
from nbddp.worker.cell.stdin import StdinProxy
from nbddp.worker.tracebacks import HIDDEN
from nbddp.worker.watch.main_thread import library_of_file
from nbddp.worker.wrapping import wrap

_LAST_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")  # names in sys
_DEBUGS_LAST_ERROR = re.compile(r"^\s*%debug\b|\bpm\(|\blast_", re.MULTILINE)
_SHOWS_CAUSES = sys.version_info >= (3, 13) or hasattr(IPython.core.debugger, "CHAIN_EXCEPTIONS")


class RankPdb(Pdb):
    """IPython's debugger for cells. It hides the frames of nbddp.

    IPython runs each statement of a cell as a module of its own. This debugger does not stop where
    a statement begins or returns, so that the cell looks like one piece of code.
    """

    shell: Any  # the RankShell

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"nosigint": True} | options)  # CellInterrupter handles SIGINT
        self.report_skipped = False

    if sys.version_info < (3, 13):  # stop at the line of the call, as later versions do

        def set_trace(self, frame: FrameType | None = None, **_options: Any) -> None:
            """Stop at the next instruction."""
            frame = frame or sys._getframe(1)
            frame.f_trace_opcodes = True
            super().set_trace(frame)

        def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
            """Treat the first instruction as a line."""
            if event == "opcode":
                frame.f_trace_opcodes = False
                return self.dispatch_line(frame)
            return super().trace_dispatch(frame, event, arg)

    def stop_here(self, frame: FrameType) -> bool:
        """Return whether the frame is user code, or a library called by user code."""
        return bool(super().stop_here(frame)) and self._is_visible(frame)

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        """Stop at the entry of a function. At a statement, stop only at its line, which is next."""
        if not self._is_cell_statement(frame):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Stop at the return of a function, but not at the end of a statement."""
        if not self._is_cell_statement(frame):
            super().user_return(frame, return_value)

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        """Stop at an error in user code, but not at errors that IPython uses internally."""
        if self._is_visible(frame):
            super().user_exception(frame, exc_info)
        if self._is_cell_statement(frame):
            frame.f_locals.pop("__exception__", None)  # else the user sees this name

    def get_stack(self, frame: FrameType | None, step: TracebackType | None) -> Any:
        """Return the visible frames with their lines, and the index of the current frame."""
        stack, current = super().get_stack(frame, step)
        shown = [False]
        for candidate, _ in stack:
            is_below = shown[-1] and _library_of_frame(candidate) not in (*HIDDEN, "bdb", "pdb")
            shown.append(is_below or self._is_user_frame(candidate))
        kept = [each for each, is_shown in zip(stack, shown[1:], strict=True) if is_shown]
        return (kept, max(0, sum(shown[: current + 2]) - 1)) if kept else (stack, current)

    def _is_visible(self, frame: FrameType | None) -> bool:
        """Return whether a frame is user code, or a library called by user code."""
        while frame is not None and not self._is_user_frame(frame):
            frame = None if _library_of_frame(frame) in HIDDEN else frame.f_back
        return frame is not None

    def _is_user_frame(self, frame: FrameType) -> bool:
        return bool(self.shell.is_cell_file(frame.f_code.co_filename))

    def _is_cell_statement(self, frame: FrameType) -> bool:
        name = frame.f_code.co_name
        is_module = name == "<module>" or name.startswith("<cell line: ")  # IPython 7 and 8
        return is_module and frame.f_code.co_filename in self.shell.compile.sources


def _library_of_frame(frame: FrameType) -> str:
    return library_of_file(frame.f_code.co_filename)


class Debuggers:
    """Open debuggers in the cells of a rank.

    ``breakpoint()`` stops the first rank that reaches one, or the ranks named for the cell.

    Args:
        stdin: the source of debugger commands.
        rank: this rank.
        claim_breakpoint: returns whether this rank is the first in the cell to call it.
    """

    def __init__(self, stdin: StdinProxy, rank: int, claim_breakpoint: Callable[[], bool]) -> None:
        self._stdin = stdin
        self._rank = rank
        self._claim_breakpoint = claim_breakpoint
        self._break_ranks: Sequence[int] = ()
        self._is_interrupt_kept = False
        self._hidden_error: dict[str, Any] = {}  # the last error; restored after this cell
        self._stops_here: bool | None = None  # None before the cell's first breakpoint()

    def install(self) -> None:
        """Patch ``breakpoint()``, ``set_trace()`` and ``pm()`` to use the notebook's input box."""
        sys.breakpointhook = self._on_breakpoint
        python_pdb: Any = pdb
        ipython_pdb: Any = IPython.core.debugger
        python_pdb.set_trace = self._on_set_trace
        ipython_pdb.set_trace = self._on_set_trace
        python_pdb.pm = post_mortem
        wrap(python_pdb.Pdb, "interaction", self._interact)

    def _interact(
        self, interaction: Callable[..., Any], debugger: Any, *args: Any, **options: Any
    ) -> Any:
        debugger.nosigint = True  # else it replaces the SIGINT handler of CellInterrupter
        self._stdin.check_supported(DEBUGGER)
        display_hook, sys.displayhook = sys.displayhook, sys.__displayhook__  # for `interact`
        was_debugging, self._stdin.is_debugging = self._stdin.is_debugging, True
        try:
            return interaction(debugger, *args, **options)
        finally:
            sys.displayhook = display_hook
            self._stdin.is_debugging = was_debugging
            if self._stdin.is_interrupted():  # IPython's debugger swallows an interrupt
                debugger.set_quit()

    def begin_cell(self, command: RunCell) -> None:
        """Prepare for a cell.

        Free the frames of an interrupted cell, unless this cell debugs them. If the cell runs on
        several ranks, ``%debug`` opens only on ranks that failed. The other ranks were interrupted
        because of that failure.
        """
        if self._is_interrupt_kept and not _DEBUGS_LAST_ERROR.search(command.source):
            self._is_interrupt_kept = False
            clear_last_error()
        elif self._is_interrupt_kept and len(command.ranks) != 1:
            self._hidden_error = clear_last_error()
        self._break_ranks, self._stops_here = command.break_ranks, None

    def _on_breakpoint(self, *_args: Any, **_options: Any) -> None:
        if os.environ.get("PYTHONBREAKPOINT") == "0":  # Python's way to turn breakpoint() off
            return
        self._stdin.check_supported(DEBUGGER)
        if self._stops_here is None:
            is_named = self._rank in self._break_ranks
            self._stops_here = is_named if self._break_ranks else self._claim_breakpoint()
        if self._stops_here:
            RankPdb().set_trace(sys._getframe(1))

    def _on_set_trace(
        self, frame: FrameType | None = None, header: str | None = None, **_options: Any
    ) -> None:
        """Stop every rank that calls ``set_trace()`` of pdb or IPython."""
        self._stdin.check_supported(DEBUGGER)
        debugger = RankPdb()
        if header is not None:
            debugger.message(header)
        debugger.set_trace(frame or sys._getframe(1))

    def keep_exception(self, error: BaseException, *, is_interrupt: bool) -> None:
        """Keep the error that ended a cell in ``sys.last_value``, as Python does.

        An error is kept until the next error. An interrupt is kept only until another cell begins,
        because its frames may hold memory that the next run needs.
        """
        _end_checkpointed_calls(error)
        self._is_interrupt_kept = is_interrupt
        last = (type(error), error, error.__traceback__, error)
        vars(sys).update(zip(_LAST_ERROR, last, strict=True))

    def end_cell(self) -> None:
        """Restore the last error, and stop tracing: a debugger must not step into the next cell."""
        vars(sys).update(self._hidden_error)
        self._hidden_error = {}
        if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
            sys.settrace(None)


def _end_checkpointed_calls(error: BaseException) -> None:
    """Remove the hooks of the checkpointed calls that an error has ended.

    Before torch 2.13, ``torch.utils.checkpoint`` removes its hook for saved tensors only with the
    frames of the error. Until then, each ``backward()`` would run the failed function again.
    """
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            for value in frame.f_locals.values():
                if inspect.isgenerator(value):
                    value.close()


def clear_last_error() -> dict[str, Any]:
    """Remove the last error from ``sys``. Return the removed attributes."""
    names = [each for each in _LAST_ERROR if hasattr(sys, each)]
    return {name: vars(sys).pop(name) for name in names}


def post_mortem() -> None:
    """Debug the last error of this rank, or print that there is none.

    Do not raise here: an error would end the debugger on the rank that failed.
    """
    traceback, error = (getattr(sys, name, None) for name in ("last_traceback", "last_value"))
    if traceback is None:
        print("nbddp: this rank has no error to debug")  # noqa: T201
        return
    debugger = RankPdb()
    debugger.reset()
    debugger.interaction(None, error if error and _SHOWS_CAUSES else traceback)
