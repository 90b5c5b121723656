"""Format errors and their tracebacks for the user, without the frames of nbddp."""

from __future__ import annotations

import linecache
import re
import time
import traceback
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from IPython.core.error import UsageError

import nbddp
from nbddp.formatting import format_line, plural
from nbddp.wire.function_sources import shown_file
from nbddp.wire.messages import Failure
from nbddp.worker.torch_errors import torch_errors
from nbddp.worker.watch.main_thread import library_of_file

CONTEXT = 2  # lines shown above and below a line of user code
MAX_REPEATS = 3  # equal frames shown in a row, for a recursion
HIDDEN = ("nbddp", "IPython")  # libraries without frames in tracebacks
GREEN, CYAN, RED = 32, 36, 31

# frames of nbddp in a traceback that another process formatted, such as a DataLoader worker
_HIDDEN_TEXT = re.compile(
    rf'^ *File "{re.escape(str(Path(nbddp.__file__).parent))}/[^"]*", line .*\n(?:    .*\n)*',
    re.MULTILINE,
)


def failure_outside_cells(error: BaseException) -> Failure:
    """Describe an error outside any cell."""
    return Failure(
        name=type(error).__name__,
        text=error_text(error),
        traceback=format_traceback(error),
        at=time.time(),
        torch_text=torch_text(error),
    )


def error_text(error: BaseException) -> str:
    """Return the text of an exception, even if its ``__str__`` fails.

    >>> error_text(ValueError("too low"))
    'too low'
    """
    try:
        return str(error)
    except Exception as inner:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"its text is not available: __str__() raised {type(inner).__name__}"


def torch_text(error: BaseException) -> str:
    """Return the texts of the errors of torch among an error and its causes."""
    return "\n".join(error_text(each) for each in torch_errors(error))


def format_traceback(
    error: BaseException, *, is_whole: bool = False, has_colors: bool = False
) -> str:
    """Format an error, its causes and the members of exception groups.

    Each traceback begins at the first user frame and has no frames of nbddp and IPython. A user
    frame is shown with the lines around it.

    Args:
        error: the error.
        is_whole: show each frame of a library instead of their number.
        has_colors: color file names, line numbers and arrows.
    """
    if isinstance(error, UsageError):
        return f"UsageError: {error_text(error)}"
    # limit=0: frames are formatted here; Python formats everything else
    formatted = traceback.TracebackException.from_exception(error, limit=0)
    pending: list[tuple[Any, Any]] = [(formatted, error)]
    while pending:
        part, cause = pending.pop()
        frames = _format_frames(cause.__traceback__, is_whole=is_whole, has_colors=has_colors)
        part.stack = _Stack(frames)
        members = getattr(part, "exceptions", None)
        inner = zip(members, cause.exceptions, strict=True) if members else ()
        pairs = [(part.__cause__, cause.__cause__), (part.__context__, cause.__context__), *inner]
        pending += [pair for pair in pairs if pair[0] is not None]
    return _HIDDEN_TEXT.sub("", "".join(formatted.format())).rstrip("\n")


class _Stack(list[str]):
    """Formatted frames, used instead of a StackSummary."""

    def format(self, **_options: Any) -> list[str]:
        """Return the frames."""
        return self


class _FrameLocation(NamedTuple):
    """The source line of a stack frame, and its function."""

    filename: str
    line: int
    function: str
    library: str  # empty for user code


def locations_in(step: TracebackType | None) -> Iterator[_FrameLocation]:
    """Yield the location of each frame; the line of its function if Python knows no other.

    An interrupt may arrive in an instruction without a line, as at the end of a ``with``.
    """
    for frame, line in traceback.walk_tb(step):
        code = frame.f_code
        name, library = code.co_filename, library_of_file(code.co_filename)
        yield _FrameLocation(name, line or code.co_firstlineno, code.co_name, library)


def _format_frames(
    step: TracebackType | None, *, is_whole: bool, has_colors: bool
) -> Iterator[str]:
    locations = [location for location in locations_in(step) if location.library not in HIDDEN]
    first = next((at for at, location in enumerate(locations) if not location.library), 0)
    for is_users, group in groupby(locations[first:], lambda location: not location.library):
        run = list(group)
        if is_users or is_whole:
            for location, same in groupby(run):
                count = len(list(same))
                text = _format_frame(location, has_colors=has_colors)
                yield from [text] * min(count, MAX_REPEATS)
                if count > MAX_REPEATS:
                    yield f"    ... repeated {count - MAX_REPEATS} more times\n"
        else:
            libraries = ", ".join(dict.fromkeys(location.library for location in run))
            yield f"    ... {plural(len(run), 'frame')} in {libraries}\n"


def _format_frame(location: _FrameLocation, *, has_colors: bool) -> str:
    """Format a frame: its file, its line and the code around it."""

    def paint(text: str, color: int) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if has_colors else text

    file = paint(shown_file(location.filename), GREEN)
    function = "" if location.function.startswith("<") else f", in {location.function}"
    lines = [f"{format_line(location.line, file)}{function}\n"]
    context = 0 if location.library else CONTEXT
    for number in range(max(1, location.line - context), location.line + context + 1):
        if code := linecache.getline(location.filename, number).rstrip():
            is_current = number == location.line
            mark = paint(f"{'-' * (5 - len(str(number)))}> {number}", RED) if is_current else ""
            lines.append(f"{mark or paint(f'{number:7}', CYAN)} {code}\n")
    return "".join(lines)
