"""The thread that cells run in, seen from the others."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

# folders of libraries, and the only library in a folder that may be the user's
_LIBRARIES = (
    (Path(torch.__file__).parent.parent, "torch"),
    (Path(__file__).parents[2], "nbddp"),
    *((Path(sysconfig.get_path(name)), "") for name in ("purelib", "platlib", "stdlib")),
)
_STATUS = re.compile(r"^(State|voluntary_ctxt_switches):\s+(\w+)", re.MULTILINE)
RUN = asyncio.BaseEventLoop.run_until_complete.__name__


def main_thread_id() -> int:
    """The identity of the main thread."""
    identity = threading.main_thread().ident
    if identity is None:
        raise RuntimeError("the main thread has not started")
    return identity


def main_frame() -> FrameType:
    """Where the main thread is right now."""
    return sys._current_frames()[main_thread_id()]


@functools.lru_cache(maxsize=4096)
def library_of_file(filename: str) -> str:
    """Return the library that a file belongs to; empty for the user's own.

    >>> [library_of_file(name) for name in (torch.nn.__file__, os.__file__, "train.py")]
    ['torch', 'os', '']
    """
    if filename.startswith("<frozen "):
        return filename.removeprefix("<frozen ").partition(".")[0].rstrip(">")
    path = Path(filename)
    for folder, library in _LIBRARIES:
        if path.is_relative_to(folder / library):
            parts = path.relative_to(folder).parts
            return Path(parts[0] if parts[0] != "site-packages" else parts[1]).stem
    return ""


def comes_from(frame: FrameType | None, is_of: Callable[[str], bool]) -> bool:
    """Whether a frame, or one that it was called from, is of such a file."""
    while frame is not None:
        if is_of(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def line_of(frame: FrameType) -> int:
    """Return the line that a frame is on, or its function's first if the instruction has none."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def innermost_in_cell(
    frame: FrameType, is_cell_file: Callable[[str], bool]
) -> tuple[FrameType | None, str]:
    """Return the innermost frame of a cell in a stack, and the name of the function it has called.

    If no frame is of a cell, return None and the name of the innermost function.
    """
    called: FrameType | None = None
    for here in _stack(frame):
        if is_cell_file(here.f_code.co_filename):
            return here, _name_of_call(here, called.f_code) if called else ""
        called = here
    return None, frame.f_code.co_name


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield frames from the innermost one; where an event loop runs, those of its main task too."""
    while frame is not None:
        task = frame.f_locals.get("future") if frame.f_code.co_name == RUN else None
        if isinstance(task, asyncio.Task):
            yield from reversed(list(_suspended(task)))
        yield frame
        frame = frame.f_back


def _suspended(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """Yield the frames of a task that awaits something, from the outermost one."""
    step: Any = task.get_coro()
    while step is not None:
        if frame := getattr(step, "cr_frame", None):
            yield frame
        step = getattr(step, "cr_await", None)


def _name_of_call(caller: FrameType, called: CodeType) -> str:
    """Return the name by which a frame calls a function: ``open``, not ``_modified_open``."""
    for name in caller.f_code.co_names:
        value = caller.f_globals.get(name, caller.f_builtins.get(name))
        if isinstance(value, FunctionType | MethodType) and value.__code__ is called:
            return name
    return called.co_name


def main_cpu_time() -> float:
    """Seconds of CPU that the main thread has used; always 0 where there is no clock (macOS)."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(main_thread_id()))


def main_state() -> str:
    """The state of the main thread: "R" where it runs or would run; "" where nobody tells (macOS).

    A Path would take four times as long to read it, and it is read 20 times a second.
    """
    try:
        file = os.open(f"/proc/self/task/{os.getpid()}/stat", os.O_RDONLY)
    except OSError:
        return ""
    try:
        text = os.read(file, 200)
    finally:
        os.close(file)
    return text.rpartition(b")")[2][1:2].decode()  # a process's name may have any letters


def main_status() -> tuple[int, str]:
    """How often the main thread gave up the CPU by itself, and its state, such as "S" or "D".

    0 and "" where the system does not tell (macOS).
    """
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/status").read_text()
    except OSError:  # not on Linux
        return 0, ""
    told = dict(_STATUS.findall(text))
    return int(told.get("voluntary_ctxt_switches", 0)), told.get("State", "")
