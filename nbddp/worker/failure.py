"""What ended a cell on this rank: the error, the cell's line, the collective it waited in."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

from nbddp.wire.messages import Failure
from nbddp.worker import interrupt
from nbddp.worker.collectives import last_collective

_TORCH_DISTRIBUTED = ("torch/distributed/", "torch\\distributed\\")
_WAITING = ("backward", "wait", "synchronize")


def describe(
    error: BaseException, shown: str, *, is_cell_file: Callable[[str], bool], at: float
) -> Failure:
    """Say what ended a cell, with the place in it that the user can look at."""
    stack = [place for place in _walk(error.__traceback__) if not _is_ours(place[0])]
    inside = [place for place in stack if is_cell_file(place[0].f_code.co_filename)]
    return Failure(
        name=type(error).__name__,
        text=str(error),
        traceback=shown or "".join(traceback.format_exception(error)),
        line=inside[-1][1] if inside else 0,
        collective=_collective(stack[-1][0]) if stack else "",
        at=at,
    )


def plain(error: BaseException) -> Failure:
    """An error outside any cell."""
    return Failure(
        name=type(error).__name__,
        text=str(error),
        traceback="".join(traceback.format_exception(error)),
        at=time.time(),
    )


def _walk(step: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while step is not None:
        yield step.tb_frame, step.tb_lineno
        step = step.tb_next


def _is_ours(frame: FrameType) -> bool:
    """Whether it is the signal handler, which stands on top of where the rank really was."""
    return frame.f_code.co_filename == interrupt.__file__


def _collective(innermost: FrameType) -> str:
    code = innermost.f_code
    is_inside = any(part in code.co_filename for part in _TORCH_DISTRIBUTED)
    return last_collective() if is_inside or code.co_name in _WAITING else ""
