"""The end of a program: what Python does when a script is over.

In this order (Python's ``Py_FinalizeEx``): threads that are no daemons are joined, then what was
registered with ``atexit`` is called, last first. Processes that ``multiprocessing`` started are
joined by a function of that kind, which is registered before any of the script's.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from multiprocessing import util
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from nbddp.worker.main_thread import library_of_file
from nbddp.worker.streams import flush_python_streams


@contextmanager
def ending_as_a_program() -> Iterator[None]:
    """Within it a script runs; at its end do what Python does at the end of a program."""
    with ExitStack() as end:  # the last goes first, and each whatever the others raise
        end.callback(_disarm_timers)
        end.callback(_destroy_groups, os.getpid())
        end.callback(util._exit_function)  # type: ignore[attr-defined]
        end.callback(atexit._run_exitfuncs)
        end.callback(threading._shutdown)  # type: ignore[attr-defined]
        try:
            yield
        except SystemExit as error:
            if _has_message(error):
                print(error.code, file=sys.stderr)  # noqa: T201 - as Python does
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                _interrupt_children()
            with redirect_stderr(io.StringIO()):  # the failure's report has the traceback
                sys.excepthook(type(error), error, _without_ours(error))  # W&B's, maybe
            raise


def _interrupt_children() -> None:
    """Interrupt the processes that the script started, as a terminal does: Python joins them."""
    children: Any = multiprocessing.active_children()
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGINT)


def _disarm_timers() -> None:
    """A process that failed stays for a debugger. The timers of its script must not end it."""
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)


def _destroy_groups(pid: int) -> None:
    """A peer that waits for this rank learns that it has ended. A forked child changes nothing."""
    if os.getpid() == pid and dist.is_initialized():
        dist.destroy_process_group()


def _has_message(error: SystemExit) -> bool:
    """Whether Python prints what ``sys.exit()`` was given. The exit code is 1 then."""
    return error.code is not None and not isinstance(error.code, int)


def exit_code(error: BaseException | None) -> int:
    """Return the exit code of a program that ended by this error.

    >>> [exit_code(each) for each in (None, SystemExit(), SystemExit(3), SystemExit(256))]
    [0, 0, 3, 0]
    >>> [exit_code(each) for each in (SystemExit("no data"), SystemExit(0.0), ValueError())]
    [1, 1, 1]
    """
    if error is None:
        return 0
    if isinstance(error, SystemExit) and not _has_message(error):
        return int(error.code or 0) & 0xFF
    return 1


def leave_as_forked(error: BaseException | None) -> NoReturn:
    """End a process that was forked by what ran here, and has come to the end of it."""
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, _without_ours(error))
    flush_python_streams()
    os._exit(exit_code(error))


def _without_ours(error: BaseException) -> TracebackType | None:
    step = error.__traceback__
    while step is not None and library_of_file(step.tb_frame.f_code.co_filename) == "nbddp":
        step = step.tb_next
    return step


def is_ending(filename: str) -> bool:
    """Whether code of this file waits for what a script began: an interrupt there ends the wait."""
    return filename == __file__
