"""The memory of a rank: who holds it, and give it back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil
from IPython.core.getipython import get_ipython

from nbddp import accelerator
from nbddp.extension.rank_half import RankAnswer, RankHalf
from nbddp.extensions.memory.holders import Storage, count_holders
from nbddp.extensions.memory.messages import GPU, PROCESS, MemoryAnswer, Used
from nbddp.worker.cell.debugger import clear_last_error

MAX_HOLDERS = 200  # the largest; the others become part of the rest


class MemoryOfRank(RankHalf):
    """Answers ``%ddp memory`` and ``%ddp free``."""

    def answer(self, content: Mapping[str, Any]) -> RankAnswer:
        """Return who holds the memory, and how much was used before it was given back."""
        shell: Any = get_ipython()  # type: ignore[no-untyped-call, unused-ignore]
        before = _used() if content["free"] else {}
        if content["free"]:
            free(shell)
        holders = count_holders(shell, getattr(sys, "last_value", None))
        answer = MemoryAnswer(
            used=_used(_shared_pages(holders.shared)),
            before=before,
            holders=[(*holder, size) for holder, size in holders.bytes.most_common(MAX_HOLDERS)],
        )
        return RankAnswer(content=asdict(answer))


def free(shell: Any) -> None:
    """Give back the memory that no variable holds: the last error, garbage, freed memory."""
    clear_last_error()
    hidden, names = shell.user_ns_hidden, shell.user_ns
    for name in ("_", "__", "___"):  # after `%reset out`, IPython 9.18 still has them there
        if hidden.get(name) is not names.get(name):
            hidden[name] = ""
    gc.collect()
    module = accelerator.current().module
    if module.is_initialized():
        module.empty_cache()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)


def _used(counted: int = 0) -> dict[str, Used]:
    """Return the memory that this process uses. ``counted``: shared memory of named tensors."""
    memory = psutil.Process().memory_full_info()
    shared = max(0, memory.rss - memory.uss - counted)
    share = getattr(memory, "pss", 0)  # Linux has it
    used = {PROCESS: Used(total=memory.rss, shared=shared, share=share)}
    module = accelerator.current().module
    if module.is_initialized():
        devices = range(module.device_count())
        reserved, tensors = (
            sum(map(module.memory_reserved, devices)),
            sum(map(module.memory_allocated, devices)),
        )
        used[GPU] = Used(total=reserved, tensors=tensors)
    return used


def _shared_pages(storages: Sequence[Storage]) -> int:
    """Return how much of these storages other processes have mapped, too."""
    process, pages = psutil.Process(), 0
    if not storages or not hasattr(process, "memory_maps"):
        return 0
    for area in process.memory_maps(grouped=False):
        begin, end = (int(number, 16) for number in area.addr.split("-"))
        if any(begin <= storage.address < end for storage in storages):
            pages += area.shared_clean + area.shared_dirty
    return pages
