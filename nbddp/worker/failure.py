"""What ended a cell on this rank: the error, the cell's line, the collective it waited in."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from nbddp.wire.messages import Failure
from nbddp.worker import gpu_memory, interrupt
from nbddp.worker.flight_recorder import RecordedCollective, newest_collective
from nbddp.worker.folding import folded
from nbddp.worker.headline import headline_of, text_of
from nbddp.worker.tracebacks import walk
from nbddp.worker.unused import blamed_by
from nbddp.worker.waits import call_of, function_name

MAX_DEPTH = 200  # calls

_TORCH_DISTRIBUTED = ("torch/distributed/", "torch\\distributed\\")


def describe(
    error: BaseException,
    shown: str,
    *,
    is_cell_file: Callable[[str], bool],
    stuck_in: RecordedCollective | None,
    at: float,
    names: Mapping[str, Any],
    name_of: Callable[[str], str] = lambda _filename: "",
) -> Failure:
    """Say what ended a cell, with the place in it that the user can look at.

    ``names`` are those of the cells; with them it can be told what filled a GPU. ``name_of`` says
    what a script's file is called.
    """
    stack = [frame for frame, _ in walk(error.__traceback__) if not _is_ours(frame)]
    headline = headline_of(error, is_cell_file, name_of)
    return Failure(
        name=headline.name,
        text=headline.text,
        because=headline.because or blamed_by(error, names),
        traceback=shown or folded(pythons_format(error, is_cell_file=is_cell_file)),
        line=headline.line,
        file=headline.file,
        collective=_collective(stack, stuck_in),
        at=at,
        memory=gpu_memory.tell(error, names, (_locals(frame, names) for frame in stack)),
    )


def _locals(frame: FrameType, names: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function's own names; those of a cell, or a module, are no function's."""
    return {} if frame.f_locals is names or frame.f_locals is frame.f_globals else frame.f_locals


def plain(error: BaseException) -> Failure:
    """An error outside any cell."""
    return Failure(
        name=type(error).__name__,
        text=text_of(error),
        traceback="".join(traceback.format_exception(error)),
        at=time.time(),
    )


def not_begun() -> Failure:
    """The cell was interrupted while it waited for its turn."""
    return Failure(name=KeyboardInterrupt.__name__, text="", traceback="", at=time.time())


def needs_pythons_format(error: BaseException) -> bool:
    """Whether IPython cannot show it as it is: a group, or one that cannot be turned into text.

    Nor one that went very deep: for a thousand calls IPython takes five seconds.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        is_group = isinstance(getattr(each, "exceptions", None), tuple)
        if is_group or not _has_text(each) or _depth(each) > MAX_DEPTH:
            return True
        seen.add(id(each))
        todo += [each.__cause__, each.__context__]
    return False


def _depth(error: BaseException) -> int:
    return sum(1 for _ in walk(error.__traceback__))


def _has_text(error: BaseException) -> bool:
    try:
        str(error)
    except Exception:  # noqa: BLE001 - this is the question
        return False
    return True


def pythons_format(error: BaseException, *, is_cell_file: Callable[[str], bool]) -> str:
    """A traceback as Python writes it, from the cell on: for what IPython does not show."""
    told = traceback.TracebackException.from_exception(error)
    stack = [place for place in walk(error.__traceback__) if not _is_ours(place[0])]
    files = [is_cell_file(frame.f_code.co_filename) for frame, _ in stack]
    if any(files):
        told.stack = traceback.StackSummary.extract(iter(stack[files.index(True) :]))
    return "".join(told.format())


def hide_end(error: BaseException) -> None:
    """Cut a traceback below the user's last line, where functions of ours say that they hide.

    IPython hides such frames everywhere but at the end.
    """
    last, step = None, error.__traceback__
    while step is not None:
        if not step.tb_frame.f_locals.get("__tracebackhide__"):
            last = step
        step = step.tb_next
    if last is not None:
        last.tb_next = None


def _is_ours(frame: FrameType) -> bool:
    """Whether it is the signal handler, which stands on top of where the rank really was."""
    return frame.f_code.co_filename == interrupt.__file__


def _collective(stack: list[FrameType], stuck_in: RecordedCollective | None) -> str:
    """The collective that the rank waited in, with its number where that is known."""
    called = next(filter(_is_torch_distributed, stack), None)
    name = function_name(called) if called is not None else ""
    newest = stuck_in or newest_collective({name})
    if newest is not None and (newest is stuck_in or newest.call.name in (name, f"_{name}")):
        return newest.call.title
    return call_of(called) if called is not None else ""  # Gloo records no send and no recv


def _is_torch_distributed(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in _TORCH_DISTRIBUTED)
