"""Inspect the main thread, which runs the cells, from other threads: its line, call and state.

Find the call that it waits in from its stack, because no flight recorder has all calls. Gloo's
recorder lacks send and recv. No recorder has waits on a store, such as a ``new_group`` that
some ranks do not call, or a key that no rank sets. Recognize library calls that wait for one event,
too.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import linecache
import os
import re
import sys
import sysconfig
import threading
import time
from bdb import Bdb
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast

import IPython
import torch
import torch.distributed as dist

import nbddp
from nbddp.worker.watch.polls import key_of_loop

# folders of libraries; with a name, only that library in a folder that may have user code
_LIBRARIES = (
    *((Path(inspect.getfile(each)).parents[1], each.__name__) for each in (IPython, torch, nbddp)),
    *((Path(sysconfig.get_path(name)), "") for name in ("purelib", "platlib", "stdlib")),
)

_INSTALLED = {"site-packages", "dist-packages"}

T = TypeVar("T")

_caller_of, _locals_of = attrgetter("f_back"), attrgetter("f_locals")

_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)", re.MULTILINE)


def main_thread_id() -> int:
    """Return the identifier of the main thread."""
    return threading.main_thread().ident or 0  # None only before a thread has started


def main_frame() -> FrameType:
    """Return the current frame of the main thread."""
    return _current_frames()[main_thread_id()]


def _without_collection(read: Callable[..., T], *args: object) -> T:
    """Read a frame of another thread, and collect no garbage meanwhile.

    Python 3.11 collects garbage when it creates the object of a frame. A finalizer may then let the
    other thread run, whose frame ends: Python writes to freed memory, and the rank is killed by
    SIGSEGV. Since 3.12, Python collects garbage only between instructions.
    """
    if sys.version_info >= (3, 12):
        return read(*args)
    found: list[Any] = []
    calls: list[Any] = [partial(gc.disable), partial(read, *args), partial(gc.enable)]
    steps: list[Any] = [partial(gc.isenabled), partial(found.extend, map(partial.__call__, calls))]
    try:
        # all() and map() make the calls in C, so that no other thread runs between them: the user's
        # code neither sees the collector disabled nor loses its own gc.disable()
        all(map(partial.__call__, steps))
    except BaseException:
        gc.enable()
        raise
    # pop: the result may be this function's own frame, which must not keep itself
    return cast(T, found.pop(1)) if found else read(*args)


def _current_frames() -> dict[int, FrameType]:
    return _without_collection(sys._current_frames)


@functools.lru_cache(maxsize=4096)
def library_of_file(filename: str) -> str:
    """Return the library that a file belongs to, or "" for user code.

    >>> [library_of_file(name) for name in (torch.nn.__file__, os.__file__, "train.py")]
    ['torch', 'os', '']
    >>> library_of_file("<frozen importlib._bootstrap>"), library_of_file(nbddp.__file__)
    ('importlib', 'nbddp')
    """
    if filename.startswith("<frozen "):
        return filename.removeprefix("<frozen ").partition(".")[0].rstrip(">")
    path = Path(filename)
    for folder, library in _LIBRARIES:
        if path.is_relative_to(folder / library):
            parts = path.relative_to(folder).parts
            return Path(parts[0] if parts[0] != "site-packages" else parts[1]).stem
    return ""


def is_installed(filename: str) -> bool:
    """Return whether a file belongs to Python or to an installed library."""
    return bool(library_of_file(filename) or _INSTALLED & {*Path(filename).parts})


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = _without_collection(_caller_of, frame)


def is_called_from(frame: FrameType | None, is_of: Callable[[str], bool]) -> bool:
    """Return whether a frame or one of its callers is in a file that ``is_of`` accepts."""
    return any(is_of(each.f_code.co_filename) for each in frames_from(frame))


def line_of(frame: FrameType) -> int:
    """Return the line of a frame, or the first line of its function if the line is unknown."""
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


def imported_module(frame: FrameType, is_cell_file: Callable[[str], bool]) -> str:
    """Return the module that the innermost line of a cell imports, or "".

    It is the outermost import: the first DDP model imports ``torch._dynamo``, which imports others.
    """
    module = ""
    for here in frames_from(frame):
        if is_cell_file(here.f_code.co_filename):
            return module
        if here.f_code.co_name == "_find_and_load":  # of importlib
            module = str(_without_collection(_locals_of, here).get("name", ""))
    return ""


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield frames, innermost first, including those of the main task of an event loop."""
    for inner_frame in frames_from(frame):
        is_loop = inner_frame.f_code.co_name == "run_until_complete"
        task = _without_collection(_locals_of, inner_frame).get("future") if is_loop else None
        if isinstance(task, asyncio.Task):
            yield from reversed(list(_task_frames(task)))
        yield inner_frame


def _task_frames(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """Yield the frames of a suspended task, outermost first."""
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
    """Return the seconds of CPU used by the main thread, or 0 on macOS, which has no such clock."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(main_thread_id()))


def main_state() -> str:
    """Return the state of the main thread, such as "R" for runnable, or "" on macOS.

    This runs 20 times a second. Reading the file with ``Path`` would take twice as long.
    """
    try:
        with open(f"/proc/self/task/{os.getpid()}/stat", "rb", buffering=0) as file:  # noqa: PTH123
            text = file.read(200)
    except OSError:  # not on Linux
        return ""
    return text.rpartition(b")")[2][1:2].decode()  # the process name may contain any character


def main_switches() -> int:
    """Return the voluntary context switches of the main thread, or 0 on macOS."""
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/status").read_text()
    except OSError:  # not on Linux
        return 0
    found = _SWITCHES.search(text)
    return int(found[1]) if found else 0


_NBDDP = Path(nbddp.__file__).parent
MAX_CALL = 60  # characters of a call to show
_TORCH_DISTRIBUTED = re.compile(r"torch[/\\](distributed|futures)[/\\]")
_PEERS = {"send": "dst", "send_object_list": "dst", "recv": "src", "recv_object_list": "src"}
# methods of torch's works, futures and stores, in C++: a cell calls them without a Python frame
_WAIT_METHODS = re.compile(
    r"([\w.]*)\.(?:wait|get|multi_get|queue_pop|check|recv|barrier|synchronize)\([^)]*\)?"
)

# Calls that return after one event, even if they wake often before it. Calls that handle many
# events (``communicate``, the ``select`` of an event loop) are not among them.
_EVENT_WAITS = re.compile(
    r"[/\\](?:"
    r"(?:threading|queue|selectors|subprocess"
    r"|multiprocessing[/\\](?:connection|popen_\w+|process|queues|synchronize))\.py:"
    r"_?(?:try_)?(?:wait\w*|get|put|poll|select|join|acquire|remaining_time)"
    r"|torch[/\\]utils[/\\]data[/\\]dataloader\.py:_(?:try_)?get_data"
    r"|IPython[/\\]utils[/\\]_process_\w+\.py:system"
    r"|(?:pexpect|ptyprocess|filelock|nbddp[/\\]worker)[/\\](?:\w+[/\\])*\w+\.py:\w+"
    r")$"
)


class _Mark:
    """Mark a frame to recognize it later, because Python reuses the id of a frame that has ended.

    The mark is stored as the trace function of the frame. It passes the events of the frame on to a
    debugger, which would not stop in a frame that has another trace function.
    """

    def __call__(self, frame: FrameType, event: str, argument: object) -> object:
        debugger = getattr(sys.gettrace(), "__self__", None)
        if isinstance(debugger, Bdb):
            return debugger.trace_dispatch(frame, event, argument)
        return self


def mark_event_wait(frame: FrameType) -> object:
    """Mark the call if the main thread waits for one event, and return the mark of that call.

    A loop that repeats a wait in vain counts as one call. Return None outside such calls, and if a
    debugger has set the trace function of the frame.
    """
    call: FrameType | None = None
    inner: FrameType | None = None
    for outer in frames_from(frame):
        if not _EVENT_WAITS.search(f"{outer.f_code.co_filename}:{outer.f_code.co_name}"):
            break
        call, inner = outer, call
    if call is None:
        return None
    if (key := key_of_loop(call, inner)) is not None:
        return key
    if call.f_trace is None:
        call.f_trace = _Mark()
    return call.f_trace if isinstance(call.f_trace, _Mark) else None


def blocking_call(frame: FrameType, is_cell_file: Callable[[str], bool]) -> str:
    """Return the call at the end of a stack that may wait for other ranks, or "".

    It is a function of torch.distributed, or a method of torch that the cell calls.

    Args:
        frame: the current frame of the main thread.
        is_cell_file: returns whether a file name belongs to a cell.
    """
    if frames := torch_frames(frame):
        return describe_call(frames[-1])
    code = _current_code(frame) if is_cell_file(frame.f_code.co_filename) else ""
    found = _WAIT_METHODS.search(code)
    if found is None or _is_of_other_library(frame, found[1]):
        return ""
    return code if len(code) <= MAX_CALL else f"{code[: MAX_CALL - 4]} ..."


def _is_of_other_library(frame: FrameType, name: str) -> bool:
    """Return whether a dotted name in a frame is not torch's, such as a socket, ``os`` or a queue.

    Return False if the name is not found in the variables and attributes, without calling code.
    """
    first, *attributes = name.split(".")
    value = frame.f_locals.get(first, frame.f_globals.get(first))
    for part in attributes:
        value = getattr(value, "__dict__", {}).get(part)
    if value is None:
        return False
    classes = [value] if isinstance(value, ModuleType) else type(value).__mro__
    names = [each.__name__ if each is value else each.__module__ for each in classes]
    return not any(each.partition(".")[0] == "torch" for each in names)


def torch_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of torch.distributed at the end of a stack, from the innermost one."""
    found = []
    for outer in frames_from(frame):
        filename = outer.f_code.co_filename
        if _TORCH_DISTRIBUTED.search(filename):
            found.append(outer)
        # torch may call nbddp, whose frames are then in between
        elif not Path(filename).is_relative_to(_NBDDP):
            break
    return found


def functions_in(frame: FrameType) -> set[str]:
    """Return the names of the functions of torch.distributed at the end of a stack."""
    return set(map(function_name, torch_frames(frame)))


def waiting_thread() -> FrameType | None:
    """Return the frame of a background thread that is in a function of torch.distributed.

    Ignore threads of autograd, which Python has not started: the main thread waits for them.
    """
    stacks = _current_frames()
    for thread in threading.enumerate():
        is_other = not isinstance(thread, threading._DummyThread | threading._MainThread)  # type: ignore[attr-defined]
        if is_other and torch_frames(stacks.get(thread.ident or 0)):
            return stacks[thread.ident or 0]
    return None


def function_name(frame: FrameType) -> str:
    """Return the name of a function of torch.distributed; it may have a logging wrapper."""
    return str(getattr(_wrapped_function(frame), "__name__", frame.f_code.co_name))


def _wrapped_function(frame: FrameType) -> Any:
    """Return the function that a logging wrapper of torch calls; None for another frame."""
    return frame.f_locals.get("func") if frame.f_code.co_name == "wrapper" else None


def describe_call(frame: FrameType) -> str:
    """Describe a call of torch.distributed with its peer, tag and group, which Gloo's records lack.

    The logging wrapper of torch holds the arguments in ``args`` and ``kwargs``.
    """
    name, arguments = function_name(frame), frame.f_locals
    if (wrapped := _wrapped_function(frame)) is not None:
        names = inspect.signature(wrapped).parameters
        arguments = {**dict(zip(names, arguments["args"], strict=False)), **arguments["kwargs"]}
    if name in _PEERS:
        side = _PEERS[name]
        side = f"group_{side}" if arguments.get(side) is None else side
        name = f"{name}({side}={arguments.get(side, 'any')}, tag={arguments.get('tag', 0)})"
    group = arguments.get("group")
    if not isinstance(group, dist.ProcessGroup) or group is dist.group.WORLD:
        return name
    ranks = dist.distributed_c10d._world.pg_group_ranks.get(group, {})
    return f"{name} of group {list(ranks)}"


def _current_code(frame: FrameType) -> str:
    """Return the expression that the frame evaluates, or its line if it is on several lines."""
    line = linecache.getline(frame.f_code.co_filename, line_of(frame))
    positions = frame.f_code.co_positions()
    first, last, begin, end = next(islice(positions, frame.f_lasti // 2, None))
    if first == last == frame.f_lineno and begin is not None:
        return line.encode()[begin:end].decode(errors="replace")
    return line.strip()
