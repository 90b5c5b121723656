"""End an answer that waits forever, after a limited time.

Python handles no signal while C++ waits. So there are two limits: a judge on several ranks has a
process group in which each wait ends with an error, and a signal ends everything else, such as a
loop or the wait for a lock.
"""

from __future__ import annotations

import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from nbddp.reporting import this_rank

SECONDS = 30.0  # between two checks of a judge: many times what one takes on a busy machine
_LIBRARIES = (str(Path(__file__).parents[2]), *sysconfig.get_paths().values())


class LateError(BaseException):
    """An answer has not ended in time. No ``except Exception`` of the answer catches it."""


def run_limited(judge: Callable[[], object]) -> LateError | None:
    """Call a judge, on the main thread. Return an error if it was too late, on all ranks."""
    if this_rank.world_size() == 1:
        return _run_with_alarm(judge)
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    with _default_group(group):
        late = _run_with_alarm(judge)  # after another error, other ranks still use the group
    dist.destroy_process_group(group)
    return late


def restart() -> None:
    """Give a limited judge that runs the whole time again."""
    if signal.getsignal(signal.SIGALRM) is _ring:
        # again and again, because Python discards an exception in a destructor
        signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)


def line_of_answer(late: LateError) -> str:
    """Return the line of the answer that has not ended; "" if only the judge has waited."""
    errors = filter(None, (late.__context__, late))  # of a wait in C++, and the alarm after it
    frames = [frame for each in errors for frame in traceback.extract_tb(each.__traceback__)]
    lines = [each.line or "" for each in frames if not each.filename.startswith(_LIBRARIES)]
    return lines[-1] if lines else ""


def _run_with_alarm(judge: Callable[[], object]) -> LateError | None:
    timer = signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout has one
    handler, remaining = signal.signal(signal.SIGALRM, _ring), SECONDS
    try:
        try:
            restart()
            judge()
        finally:  # the alarm may ring here, too
            remaining, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    except LateError as late:
        return late
    except RuntimeError as error:  # of a wait: it took too long, or another rank was too late
        if remaining > SECONDS / 2:
            raise
        return LateError().with_traceback(error.__traceback__)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
    return None


def _ring(_signum: int, _frame: FrameType | None) -> None:
    raise LateError


@contextmanager
def _default_group(given: dist.ProcessGroup) -> Iterator[None]:
    """Make a process group the default. New groups, such as those of a mesh, get its timeout."""
    group: Any = dist.group
    module: Any = dist.distributed_c10d
    before = group.WORLD, module.default_pg_timeout, module.default_pg_nccl_timeout
    limit = timedelta(seconds=SECONDS)
    group.WORLD, module.default_pg_timeout, module.default_pg_nccl_timeout = given, limit, limit
    try:
        yield
    finally:
        group.WORLD, module.default_pg_timeout, module.default_pg_nccl_timeout = before
