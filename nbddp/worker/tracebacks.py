"""Tracebacks that cost little: a failure of 64 ranks is formatted 64 times on a few cores.

IPython takes the source of every frame apart to choose the lines that it shows. For the long files
of a library that takes half a second each time (torch's distributed_c10d.py has 6,000 lines), and
the lines around the call are all that anybody reads there.
"""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from IPython.core import ultratb

LONG = 1000  # lines of a file
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def make_quick(formatter: Any) -> None:
    """Have one of IPython's formatters show frames of long library files as they stand there."""
    if not hasattr(ultratb, "FrameInfo"):  # IPython 7 takes nothing apart
        return
    records: Callable[..., list[Any]] = formatter.get_records

    def quick_records(traceback: TracebackType, context: int, offset: int) -> list[Any]:
        found: list[Any] = []
        for is_long, steps in groupby(_steps(traceback), _is_in_long_library_file):
            if is_long:
                found += [_as_it_stands(step, context) for step in steps]
            else:
                found += records(_chained(list(steps)), context, offset)
        return found

    formatter.get_records = quick_records


def walk(step: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames of a traceback, outermost first, each with the line that it was on."""
    while step is not None:
        yield step.tb_frame, step.tb_lineno
        step = step.tb_next


def _steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_in_long_library_file(step: TracebackType) -> bool:
    filename = step.tb_frame.f_code.co_filename
    is_librarys = filename.startswith(_LIBRARIES) and "IPython" not in Path(filename).parts
    return is_librarys and len(linecache.getlines(filename)) > LONG  # IPython hides its own


def _as_it_stands(step: TracebackType, context: int) -> Any:
    frame = step.tb_frame
    code = frame.f_code
    return ultratb.FrameInfo(  # type: ignore[attr-defined]  # it has moved within IPython
        "Raw frame", code.co_filename, step.tb_lineno, frame, code, context=context // 2
    )


def _chained(steps: list[TracebackType]) -> TracebackType | None:
    """The same steps as a traceback of their own, which ends where they do."""
    chain: TracebackType | None = None
    for step in reversed(steps):
        chain = TracebackType(chain, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return chain
