"""Give a rank the multiprocessing state of a main process, as each process of torchrun has it."""

from __future__ import annotations

import itertools
import multiprocessing.process
import os
from multiprocessing import resource_tracker
from typing import Any


def become_main_process() -> None:
    """Remove from multiprocessing's state that another process started this one."""
    process_module: Any = multiprocessing.process
    identity = {"_name": "MainProcess", "_identity": (), "_parent_pid": None}
    vars(process_module._current_process).update(identity)
    process_module._parent_process, process_module._children = None, set()
    process_module._process_counter = itertools.count(1)


def leave_resource_tracker() -> None:
    """Close the connection to the kernel's resource tracker: this process starts its own if needed.

    A tracker frees shared memory only when all its users have ended. The kernel uses its tracker
    until it ends.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd = tracker._pid = None
