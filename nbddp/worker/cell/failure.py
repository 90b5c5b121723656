"""What ended a cell on this rank: the error in a line, its traceback, the collective it was in."""

from __future__ import annotations

import linecache
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from IPython.core.error import UsageError

import nbddp
from nbddp.errors import say_place
from nbddp.formatting import plural
from nbddp.wire.messages import Failure
from nbddp.wire.sources import shown_file
from nbddp.worker import gpu_memory
from nbddp.worker.flight_recorder import RecordedCollective, newest_collective
from nbddp.worker.main_thread import library_of_file
from nbddp.worker.unused import blamed_by
from nbddp.worker.waits import call_of, function_name

CONTEXT = 2  # lines shown above and below a line of the user's
REPEATS = 3  # equal frames in a row that are shown, of a recursion
HIDDEN = ("nbddp", "IPython")  # libraries whose frames are in no traceback
GREEN, CYAN, RED = 32, 36, 31

# frames of nbddp in a traceback that another process formatted, such as a DataLoader worker
_HIDDEN_TEXT = re.compile(
    rf'^ *File "{re.escape(str(Path(nbddp.__file__).parent))}/[^"]*", line .*\n(?:    .*\n)*',
    re.MULTILINE,
)
_REMOTE = ("_RemoteTraceback", "RemoteTraceback")  # the traceback of another process, as a cause


def describe_failure(
    error: BaseException,
    shown: str,
    *,
    is_cell_file: Callable[[str], bool],
    name_of: Callable[[str], str],
    stuck_in: RecordedCollective | None,
    at: float,
    names: Mapping[str, Any],
) -> Failure:
    """Describe what ended a cell.

    Args:
        error: what ended it.
        shown: its traceback.
        is_cell_file: whether code of this file name is a cell's, or a script's.
        name_of: returns the name of a script's file or of another cell; empty for the running cell.
        stuck_in: the collective in which the rank was freed.
        at: the time of the error.
        names: the names of the cells, which tell what filled a GPU.
    """
    stack = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    summary = summarize_error(error, is_cell_file, name_of)
    return replace(
        summary,
        because=summary.because or blamed_by(error, names),
        traceback=shown,
        collective=_collective(stack, stuck_in),
        at=at,
        memory=gpu_memory.tell(error, names, (_locals(frame, names) for frame in stack)),
    )


def failure_outside_cells(error: BaseException) -> Failure:
    """Describe an error outside any cell."""
    return Failure(
        name=type(error).__name__,
        text=error_text(error),
        traceback=format_traceback(error),
        at=time.time(),
    )


def cell_not_started() -> Failure:
    """Describe the interrupt of a cell that was waiting for its turn."""
    return Failure(name=KeyboardInterrupt.__name__, text="", traceback="", at=time.time())


# ---- the error in a line


def summarize_error(
    error: BaseException, is_cell_file: Callable[[str], bool], name_of: Callable[[str], str]
) -> Failure:
    """Name an error with the line of the user's code that raised it, and its first cause.

    The line is the innermost one of a cell or script; 0 if there is none.
    """
    users = [place for place in _places(error.__traceback__) if is_cell_file(place.filename)]
    filename, line = users[-1][:2] if users else ("", 0)
    text = error_text(error)
    if not text and isinstance(error, AssertionError):
        text = linecache.getline(filename, line).strip()
    return Failure(
        name=type(error).__name__,
        text=text,
        traceback="",
        line=line,
        file=name_of(filename) if line else "",
        because=_first_cause(error, text),
    )


def error_text(error: BaseException) -> str:
    """Return the text of an exception, even if its ``__str__`` fails.

    >>> error_text(ValueError("too low"))
    'too low'
    """
    try:
        return str(error)
    except Exception as inner:  # noqa: BLE001 - whatever the user's own __str__ raises
        return f"its text cannot be had: __str__() raised {type(inner).__name__}"


def _first_cause(error: BaseException, text: str) -> str:
    """Name the first error of the chain of causes, unless ``text`` contains its text."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        if type(cause).__name__ in _REMOTE:
            break
        chain.append(cause)
    root, words = chain[-1], error_text(chain[-1]).strip()
    if root is error or (words and words in text):
        return ""
    first_line = words.partition("\n")[0]
    return f"caused by {type(root).__name__}{': ' if first_line else ''}{first_line}"


# ---- its traceback


def format_traceback(
    error: BaseException, *, is_whole: bool = False, has_colors: bool = False
) -> str:
    """Format an error with its causes and the members of its groups.

    Each traceback begins at the first frame of the user's. Frames of nbddp and IPython are left
    out. A user's frame has the lines around it.

    Args:
        error: any.
        is_whole: show the frames of libraries one by one, not only how many there are.
        has_colors: color file names, line numbers and arrows.
    """
    if isinstance(error, UsageError):
        return f"UsageError: {error_text(error)}"
    # limit: frames are formatted here, everything else as Python does
    told = traceback.TracebackException.from_exception(error, limit=0)
    todo: list[tuple[Any, Any]] = [(told, error)]
    while todo:
        part, each = todo.pop()
        frames = _format_frames(each.__traceback__, is_whole=is_whole, has_colors=has_colors)
        part.stack = _Stack(frames)
        members = getattr(part, "exceptions", None)
        inner = zip(members, each.exceptions, strict=True) if members else ()
        pairs = [(part.__cause__, each.__cause__), (part.__context__, each.__context__), *inner]
        todo += [pair for pair in pairs if pair[0] is not None]
    return _HIDDEN_TEXT.sub("", "".join(told.format())).rstrip("\n")


class _Stack(list[str]):
    """Formatted frames, in the place of a StackSummary."""

    def format(self, **_options: Any) -> list[str]:
        """Return the frames."""
        return self


class _Place(NamedTuple):
    """A frame's place."""

    filename: str
    line: int
    function: str
    library: str  # empty for the user's own code


def _places(step: TracebackType | None) -> Iterator[_Place]:
    """Yield the place of each frame, with the line of the function if Python knows none.

    An interrupt may strike in an instruction that has no line, as at the end of a ``with``.
    """
    for frame, line in traceback.walk_tb(step):
        code = frame.f_code
        name, library = code.co_filename, library_of_file(code.co_filename)
        yield _Place(name, line or code.co_firstlineno, code.co_name, library)


def _format_frames(
    step: TracebackType | None, *, is_whole: bool, has_colors: bool
) -> Iterator[str]:
    places = [place for place in _places(step) if place.library not in HIDDEN]
    first = next((at for at, place in enumerate(places) if not place.library), 0)
    for is_users, group in groupby(places[first:], lambda place: not place.library):
        run = list(group)
        if is_users or is_whole:
            for place, same in groupby(run):
                count = len(list(same))
                yield from [_format_place(place, has_colors=has_colors)] * min(count, REPEATS)
                if count > REPEATS:
                    yield f"    ... repeated {count - REPEATS} more times\n"
        else:
            libraries = ", ".join(dict.fromkeys(place.library for place in run))
            yield f"    ... {plural(len(run), 'frame')} in {libraries}\n"


def _format_place(place: _Place, *, has_colors: bool) -> str:
    """Format a frame: its file and line, and the code around it."""

    def paint(text: str, color: int) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if has_colors else text

    file = paint(shown_file(place.filename), GREEN)
    function = "" if place.function.startswith("<") else f", in {place.function}"
    lines = [f"{say_place(place.line, file)}{function}\n"]
    around = 0 if place.library else CONTEXT
    for number in range(max(1, place.line - around), place.line + around + 1):
        if code := linecache.getline(place.filename, number).rstrip():
            is_it = number == place.line
            mark = paint(f"{'-' * (5 - len(str(number)))}> {number}", RED) if is_it else ""
            lines.append(f"{mark or paint(f'{number:7}', CYAN)} {code}\n")
    return "".join(lines)


def _locals(frame: FrameType, names: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the local names of a function; none for the code of a cell or a module."""
    return {} if frame.f_locals is names or frame.f_locals is frame.f_globals else frame.f_locals


# ---- the collective it was in


def _collective(stack: list[FrameType], stuck_in: RecordedCollective | None) -> str:
    """Name the collective that the rank waited in, with its number where that is known."""
    torchs = (frame for frame in stack if "torch/distributed/" in frame.f_code.co_filename)
    called = next(torchs, None)
    name = function_name(called) if called is not None else ""
    newest = stuck_in or newest_collective({name})
    if newest is not None and (newest is stuck_in or newest.call.name in (name, f"_{name}")):
        return newest.call.title
    return call_of(called) if called is not None else ""  # Gloo records no send and no recv
