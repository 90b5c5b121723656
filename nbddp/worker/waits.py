"""What a rank waits in, read off its main thread: for waits that no flight recorder knows.

Gloo's has no send and no recv, and nobody's has a wait on a store: a new group that not all ranks
ask for, a key that nobody writes.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import FrameType

_OURS = Path(__file__).parent
MAX_CALL = 60  # characters of a call that are shown
_TORCHS = re.compile(r"torch[/\\](distributed|futures)[/\\]")
# methods of torch's works, futures and stores: C++ that a cell calls without a frame in between
_WAITS = re.compile(r"\.(wait|get|multi_get|queue_pop|check|recv|barrier|synchronize)\([^)]*\)?")


def waited_in(frame: FrameType, is_cell_file: Callable[[str], bool]) -> str:
    """What the end of a stack may wait in: a function of torch's, a call of the cell; or nothing.

    Args:
        frame: where the main thread is.
        is_cell_file: whether code of this file name is a cell's.
    """
    called: FrameType | None = None
    here: FrameType | None = frame
    while here is not None and (_is_torchs(here) or _is_between(here)):
        called, here = (here if _is_torchs(here) else called), here.f_back
    if called is not None:
        return function_name(called)
    return _wait_of_cell(frame) if is_cell_file(frame.f_code.co_filename) else ""


def function_name(frame: FrameType) -> str:
    """The name of a function of torch.distributed; its logging wrapper has it in ``func``."""
    wrapped = frame.f_locals.get("func")
    return str(getattr(wrapped, "__name__", frame.f_code.co_name))


def _is_torchs(frame: FrameType) -> bool:
    return _TORCHS.search(frame.f_code.co_filename) is not None


def _is_between(frame: FrameType) -> bool:
    """Whether it is one of ours that stands between two of torch's, where it calls us back."""
    return Path(frame.f_code.co_filename).parent == _OURS


def _wait_of_cell(frame: FrameType) -> str:
    code = _code_at(frame)
    if not _WAITS.search(code):
        return ""
    return code if len(code) <= MAX_CALL else f"{code[: MAX_CALL - 4]} ..."


def _code_at(frame: FrameType) -> str:
    """The expression that is computed right now; before Python 3.11 the line that it is in."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if sys.version_info >= (3, 11):
        places = frame.f_code.co_positions()
        first, last, begin, end = next(islice(places, frame.f_lasti // 2, None))
        if first == last == frame.f_lineno and begin is not None:
            return line.encode()[begin:end].decode(errors="replace")
    return line.strip()
