"""Measured workarounds for Gloo: groups that form, groups that end, and lost sends."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbddp.worker.process_group.connections import listening
from nbddp.worker.watch.flight_recorder import count_started
from nbddp.worker.wrapping import wrap

CONNECT_TIMEOUT = 1.0  # seconds for a connection to this process
CELLS_KEPT = 2  # cells for which a destroyed group is kept
_CLASS = "N4gloo9transport3tcp13UnboundBuffer"
_WAIT = f"_Z{_CLASS}8waitSendEPiNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
_ABORT = f"_Z{_CLASS}13abortWaitSendEv"
_TABLE = f"_ZTV{_CLASS}E"
_CODE = 1024  # bytes; the waiting function is shorter in all builds that were inspected
_DEPTH = 2048  # bytes of a stack; the frames above the waiting function take less
_NEAR = 64  # words of the stack around its return address
_WORD = struct.Struct("Q")
_TOP = 1 << 47  # addresses of a process are lower


# ---- groups that form


class GlooUnblocker:
    """Ends Gloo's wait for a rank that should connect but has died.

    While a group forms, every two ranks connect. The rank with the greater address connects, and
    sends the number of the pair; for a dead peer it gives up after three tries. The other rank
    listens, and its wait ends only with its timeout, five times over (torch 2.13, gloo's
    ``Listener``). So a rank that must be freed connects to itself, with every number. Its pairs
    then get connections that end.
    """

    def __init__(self) -> None:
        # by forming group: addresses in use before it, and addresses already connected to
        self._handled: dict[object, list[Any]] = {}

    @contextmanager
    def forming(self) -> Iterator[None]:
        """Treat addresses where this process starts to listen as those of a forming group."""
        group = object()
        self._handled[group] = listening()
        try:
            yield
        finally:
            del self._handled[group]

    def connect_to_self(self, world_size: int) -> None:
        """Give every pair of a forming group a connection that ends at once.

        Args:
            world_size: number of pairs that a rank may have: Gloo numbers them from 0.
        """
        for handled in list(self._handled.values()):
            for address in [each for each in listening() if each not in handled]:
                handled.append(address)
                for number in range(world_size):
                    with (
                        suppress(OSError),
                        socket.create_connection(address[:2], CONNECT_TIMEOUT) as own,
                    ):
                        own.sendall(struct.pack("@n", number))  # a ssize_t of this machine


# ---- groups that end


class GroupReleaser:
    """Delays freeing destroyed process groups while freeing them could deadlock.

    A Gloo thread releases a tensor shortly after its collective has completed, and needs the GIL
    for that. Freeing the group joins this thread. If Python holds the last reference, torch
    releases the GIL during the join (300 rounds of ``new_group``, an asynchronous ``all_reduce``
    and ``destroy_process_group`` in one process: no deadlock with torch 2.13). The reducer of a DDP
    model does not release it: a model that goes out of scope just after ``destroy_process_group()``
    deadlocks.

    So the Python object of a destroyed group is kept while a DDP model uses the group. It is freed
    with the next group that is destroyed, or two cells later, when its threads have nothing left to
    do. A group that had no collective yet is kept too: a peer may still be connecting to this rank.

    Args:
        close: closes the connections of groups, which ends the waits of peers for this rank, and of
            threads of this rank. Before the first collective a peer may still be connecting.
        models: the DDP models of this process.
    """

    def __init__(self, close: Callable[[], None], models: Iterable[Any]) -> None:
        self._close = close
        self._models = models
        self._pid = os.getpid()
        self._groups: list[Any] = []
        self._ended: deque[list[Any]] = deque(([] for _ in range(CELLS_KEPT)), maxlen=CELLS_KEPT)
        self._watch_destroy()

    def keep_alive(self, group: dist.ProcessGroup) -> None:
        """Keep a reference to a new group."""
        self._groups.append(group)

    def _watch_destroy(self) -> None:
        """Free groups when a cell destroys them; close their sockets once all are destroyed."""
        self.destroy = wrap(dist.distributed_c10d, "destroy_process_group", self._destroy_and_free)
        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group

    def _destroy_and_free(
        self, destroy: Callable[..., None], group: dist.ProcessGroup | None = None
    ) -> None:
        # a group of one rank does not show that the peers of an earlier group have connected
        is_shared = dist.is_initialized() and dist.get_world_size() > 1
        had_collective = is_shared and _has_connected(dist.group.WORLD)
        destroy(group)
        if os.getpid() != self._pid:
            return
        if had_collective and not dist.is_initialized():
            self._close()
        self._free()

    def _free(self) -> None:
        """Free the destroyed groups that had a collective and that no DDP model uses."""
        in_use = [each.__dict__.get("process_group") for each in self._models]
        living = dist.distributed_c10d._world.pg_map
        self._groups = [
            each
            for each in self._groups
            if each in living or each in in_use or not _has_connected(each)
        ]

    def begin_cell(self) -> None:
        """Free the groups that were destroyed some cells ago."""
        living = dist.distributed_c10d._world.pg_map
        self._ended.append([each for each in self._groups if each not in living])
        self._groups = [each for each in self._groups if each in living]


def _has_connected(group: Any) -> bool:
    """Return whether a group has started a collective, so that all its ranks are connected."""
    return bool(group.size() == 1 or count_started(group) > 0)


# ---- lost sends


def abort_stuck_sends() -> int:
    """Abort waits for sends that Gloo has lost, after all connections of groups were shut down.

    Gloo's own thread writes a message when the peer asks for it. If that write fails, no thread is
    notified. In torch 2.13 ``Pair::signalException`` wakes the waits for queued messages, and this
    message is not queued yet. ``UnboundBuffer::waitSend`` then waits for the process group's
    timeout, half an hour. It happens if a peer dies with unread bytes, which resets the connection.
    In loops over ``all_reduce`` of 40 bytes to 12 MB, on two busy cores, 15 of 795 deaths of a rank
    left another rank in such a wait. With this function it was none of 1,635.

    Gloo has ``UnboundBuffer::abortWaitSend`` for it, but no way to get the buffer. So this function
    searches the stacks of this process for a frame of ``waitSend`` and a buffer near it, which is
    the one in the wait. The collective continues from there, and fails at its next use of a closed
    connection.

    Works on 64-bit Linux only. On other systems, or if torch names these functions differently, it
    does nothing. Return the number of aborted waits.
    """
    # no such function, or no file descriptor left
    with suppress(OSError, AttributeError, ValueError):
        with_gloo = Path(torch.__path__[0], "lib", "libtorch_cpu.so")
        return _abort_waits(ctypes.CDLL(str(with_gloo), os.RTLD_NOLOAD))
    return 0


def _abort_waits(library: ctypes.CDLL) -> int:
    waits, abort = ctypes.cast(library[_WAIT], ctypes.c_void_p).value or 0, library[_ABORT]
    abort.argtypes, abort.restype = [ctypes.c_void_p], None
    # an object begins with a pointer into its class's vtable, two words behind its start
    table = ctypes.addressof(ctypes.c_char.in_dll(library, _TABLE)) + 2 * _WORD.size
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        found = {each for stack in _stacks(memory) for each in _candidates(stack, waits)}
        lost = [each for each in found if _begins_with(memory, each, table)]
    finally:
        os.close(memory)
    for each in lost:
        abort(each)
    return len(lost)


def _stacks(memory: int) -> Iterator[list[int]]:
    """Yield the newest words on the stack of each waiting thread."""
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - names, not paths
        with suppress(OSError):  # the thread has ended
            fields = Path("/proc/self/task", task, "syscall").read_text().split()
            if len(fields) > 2:  # else the thread is running
                data = os.pread(memory, _DEPTH, int(fields[-2], 16))
                whole = data[: len(data) // _WORD.size * _WORD.size]
                yield [word for (word,) in _WORD.iter_unpack(whole)]


def _candidates(stack: list[int], waits: int) -> Iterator[int]:
    """Yield possible addresses around the first return address into the waiting function."""
    for index, word in enumerate(stack):
        if waits < word < waits + _CODE:
            near = stack[max(0, index - _NEAR) : index + _NEAR]
            yield from (each for each in near if 0 < each < _TOP and not each % _WORD.size)
            return


def _begins_with(memory: int, address: int, word: int) -> bool:
    with suppress(OSError):  # not a mapped address
        return os.pread(memory, _WORD.size, address) == _WORD.pack(word)
    return False
