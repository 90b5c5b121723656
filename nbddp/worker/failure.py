"""What ended a cell on this rank: the error, the cell's line, the collective it waited in."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

from nbddp.wire.messages import Failure
from nbddp.worker import interrupt
from nbddp.worker.collectives import Collective, newest_collective

_TORCH_DISTRIBUTED = ("torch/distributed/", "torch\\distributed\\")


def describe(
    error: BaseException,
    shown: str,
    *,
    is_cell_file: Callable[[str], bool],
    stuck_in: Collective | None,
    at: float,
) -> Failure:
    """Say what ended a cell, with the place in it that the user can look at."""
    stack = [place for place in _walk(error.__traceback__) if not _is_ours(place[0])]
    inside = [place for place in stack if is_cell_file(place[0].f_code.co_filename)]
    return Failure(
        name=type(error).__name__,
        text=str(error),
        traceback=shown or _without_ours(error, stack[stack.index(inside[0]) :] if inside else []),
        line=inside[-1][1] if inside else 0,
        collective=_collective([frame for frame, _ in stack], stuck_in),
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


def _without_ours(error: BaseException, stack: list[tuple[FrameType, int]]) -> str:
    """The traceback of an error that IPython does not show, an interrupt, from the cell on."""
    if not stack:
        return "".join(traceback.format_exception(error))
    places = traceback.StackSummary.extract(iter(stack))
    lines = ["Traceback (most recent call last):\n", *places.format()]
    return "".join([*lines, *traceback.format_exception_only(error)])


def _walk(step: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while step is not None:
        yield step.tb_frame, step.tb_lineno
        step = step.tb_next


def _is_ours(frame: FrameType) -> bool:
    """Whether it is the signal handler, which stands on top of where the rank really was."""
    return frame.f_code.co_filename == interrupt.__file__


def _collective(stack: list[FrameType], stuck_in: Collective | None) -> str:
    """The collective that the rank waited in, with its number where that is known."""
    called = next((_function(frame) for frame in stack if _is_torch_distributed(frame)), "")
    newest = stuck_in or newest_collective()
    if newest is not None and (newest is stuck_in or newest.name in (called, f"_{called}")):
        return f"{newest.name} #{newest.number}"
    return called  # a send or a recv: gloo's flight recorder has none of them


def _function(frame: FrameType) -> str:
    """The name of a function of torch.distributed; its logging wrapper has it in ``func``."""
    wrapped = frame.f_locals.get("func")
    return getattr(wrapped, "__name__", frame.f_code.co_name)


def _is_torch_distributed(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in _TORCH_DISTRIBUTED)
