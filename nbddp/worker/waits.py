"""Find the call in which a rank waits from its stack, for calls that no flight recorder records.

Gloo's flight recorder has no send and recv. No flight recorder has waits on a store, such as a
``new_group`` that some ranks do not call, or a key that no rank sets. The module also recognises
library calls that wait for one event.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from nbddp.worker.main_thread import line_of

_OURS = Path(__file__).parent
MAX_CALL = 60  # characters of a call that are shown
_TORCHS = re.compile(r"torch[/\\](distributed|futures)[/\\]")
_PEERS = {"send": "dst", "send_object_list": "dst", "recv": "src", "recv_object_list": "src"}
# methods of torch's works, futures and stores: C++ that a cell calls without a frame in between
_WAITS = re.compile(r"\.(wait|get|multi_get|queue_pop|check|recv|barrier|synchronize)\([^)]*\)?")

# Calls that return when one event has happened, however often they wake before that. Calls that
# handle many events (``communicate``, the ``select`` of an event loop) are not among them.
_ONE_EVENT = re.compile(
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
    """Marks a frame, to recognise it later: Python reuses the id of a frame that has ended.

    It is stored as the frame's trace function. A tracer may call it: it does nothing then.
    """

    def __call__(self, *_: object) -> _Mark:
        return self


def mark_of_call(frame: FrameType) -> object:
    """Return the same mark as long as the main thread is in one call that waits for one event.

    Return None outside of such calls, and if a debugger has set the frame's trace function.
    """
    call: FrameType | None = None
    here: FrameType | None = frame
    while here is not None and _ONE_EVENT.search(
        f"{here.f_code.co_filename}:{here.f_code.co_name}"
    ):
        call, here = here, here.f_back
    if call is None:
        return None
    if call.f_trace is None:
        call.f_trace = _Mark()
    return call.f_trace if isinstance(call.f_trace, _Mark) else None


def waited_in(frame: FrameType, is_cell_file: Callable[[str], bool]) -> str:
    """What the end of a stack may wait in: a function of torch's, a call of the cell; or nothing.

    Args:
        frame: where the main thread is.
        is_cell_file: whether code of this file name is a cell's.
    """
    if frames := torch_frames(frame):
        return call_of(frames[-1])
    return _wait_of_cell(frame) if is_cell_file(frame.f_code.co_filename) else ""


def torch_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of torch.distributed at the end of a stack, from the innermost one."""
    found = []
    # a frame of ours may be between two of torch's, where torch calls us back
    while frame is not None and (_is_torchs(frame) or _is_ours(frame)):
        if _is_torchs(frame):
            found.append(frame)
        frame = frame.f_back
    return found


def functions_in(frame: FrameType) -> set[str]:
    """Return the names of the functions of torch.distributed at the end of a stack."""
    return set(map(function_name, torch_frames(frame)))


def waiting_thread() -> FrameType | None:
    """Find a thread of the user's, or of a library, that is in a function of torch.distributed.

    Threads of autograd, which Python has not started, do not count: the main thread waits for them.
    """
    stacks = sys._current_frames()
    for thread in threading.enumerate():
        is_other = not isinstance(thread, threading._DummyThread | threading._MainThread)  # type: ignore[attr-defined]
        if is_other and torch_frames(stacks.get(thread.ident or 0)):
            return stacks[thread.ident or 0]
    return None


def function_name(frame: FrameType) -> str:
    """The name of a function of torch.distributed; its logging wrapper has it in ``func``."""
    wrapped = frame.f_locals.get("func")
    return str(getattr(wrapped, "__name__", frame.f_code.co_name))


def call_of(frame: FrameType) -> str:
    """Name a call of torch.distributed, and what Gloo's records lack: a peer, a tag, a group.

    The logging wrapper of torch has the arguments in ``args`` and ``kwargs``.
    """
    name, given = function_name(frame), frame.f_locals
    if "func" in given:
        names = inspect.signature(given["func"]).parameters
        given = {**dict(zip(names, given["args"], strict=False)), **given["kwargs"]}
    if name in _PEERS:
        side = _PEERS[name]
        side = f"group_{side}" if given.get(side) is None else side
        name = f"{name}({side}={given.get(side, 'any')}, tag={given.get('tag', 0)})"
    group = given.get("group")
    if not isinstance(group, dist.ProcessGroup) or group is dist.group.WORLD:
        return name
    ranks = dist.distributed_c10d._world.pg_group_ranks.get(group, {})
    return f"{name} of group {list(ranks)}"


def _is_torchs(frame: FrameType) -> bool:
    return _TORCHS.search(frame.f_code.co_filename) is not None


def _is_ours(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).parent == _OURS


def _wait_of_cell(frame: FrameType) -> str:
    code = _code_at(frame)
    if not _WAITS.search(code):
        return ""
    return code if len(code) <= MAX_CALL else f"{code[: MAX_CALL - 4]} ..."


def _code_at(frame: FrameType) -> str:
    """The expression that is computed right now; before Python 3.11 the line that it is in."""
    line = linecache.getline(frame.f_code.co_filename, line_of(frame))
    if sys.version_info >= (3, 11):
        places = frame.f_code.co_positions()
        first, last, begin, end = next(islice(places, frame.f_lasti // 2, None))
        if first == last == frame.f_lineno and begin is not None:
            return line.encode()[begin:end].decode(errors="replace")
    return line.strip()
