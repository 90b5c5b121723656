"""Sends that Gloo has lost: who waits for one is woken.

A message that is asked for is written by Gloo's own thread. If that write fails, nobody is told: in
torch 2.13 ``Pair::signalException`` wakes those whose messages are queued, and this one is not
queued yet. ``UnboundBuffer::waitSend`` then waits for the process group's timeout, half an hour. It
takes a peer that dies with bytes unread, which resets the connection: in loops over
``all_reduce`` of 40 bytes to 12 MB, on two busy cores, 15 of 795 deaths of a rank left another one
waiting so, and none of 1,635 with what is done here. Gloo has ``UnboundBuffer::abortWaitSend`` for
it, but no way to the buffer. So the stacks of this process are looked through for a frame of
``waitSend``, and for a buffer beside it: that is the one which is waited for. The collective goes
on from there, and fails where it next has to do with a connection that has ended.

Linux only, and 64 bits: elsewhere, or where torch names these functions otherwise, nobody is woken.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

_CLASS = "N4gloo9transport3tcp13UnboundBuffer"
_WAIT = f"_Z{_CLASS}8waitSendEPiNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
_ABORT = f"_Z{_CLASS}13abortWaitSendEv"
_TABLE = f"_ZTV{_CLASS}E"
_CODE = 1024  # bytes: the function that waits is shorter, in all builds that were looked at
_DEPTH = 2048  # bytes of a stack: what it calls to wait takes less
_NEAR = 64  # words of the stack around its frame
_WORD = struct.Struct("Q")
_TOP = 1 << 47  # no address of a process is higher


def wake_lost_sends() -> int:
    """Wake whoever waits for a send; only where all connections of process groups are ended.

    Returns:
        How many.
    """
    with suppress(OSError, AttributeError, ValueError):  # no such function, or nothing to look with
        with_gloo = Path(torch.__path__[0], "lib", "libtorch_cpu.so")
        return _wake(ctypes.CDLL(str(with_gloo), os.RTLD_NOLOAD))
    return 0


def _wake(library: ctypes.CDLL) -> int:
    waits, abort = _address(library, _WAIT), library[_ABORT]
    abort.argtypes, abort.restype = [ctypes.c_void_p], None
    # an object begins with the address of its class's functions, behind two other words
    table = ctypes.addressof(ctypes.c_char.in_dll(library, _TABLE)) + 2 * _WORD.size
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        found = {each for stack in _stacks(memory) for each in _beside(stack, waits)}
        lost = [each for each in found if _begins_with(memory, each, table)]
    finally:
        os.close(memory)
    for each in lost:
        abort(each)
    return len(lost)


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(library[name], ctypes.c_void_p).value or 0


def _stacks(memory: int) -> Iterator[list[int]]:
    """The newest words on the stack of each thread that waits for something."""
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - names, no paths
        with suppress(OSError):  # it has ended
            fields = Path("/proc/self/task", task, "syscall").read_text().split()
            if len(fields) > 2:  # else it runs
                data = os.pread(memory, _DEPTH, int(fields[-2], 16))
                whole = data[: len(data) // _WORD.size * _WORD.size]
                yield [word for (word,) in _WORD.iter_unpack(whole)]


def _beside(stack: list[int], waits: int) -> Iterator[int]:
    """What stands around the first return into the function that waits, and may be an address."""
    for place, word in enumerate(stack):
        if waits < word < waits + _CODE:
            near = stack[max(0, place - _NEAR) : place + _NEAR]
            yield from (each for each in near if 0 < each < _TOP and not each % _WORD.size)
            return


def _begins_with(memory: int, address: int, word: int) -> bool:
    with suppress(OSError):  # nothing is there
        return os.pread(memory, _WORD.size, address) == _WORD.pack(word)
    return False
