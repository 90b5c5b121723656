"""Measured fixes for Gloo: for groups that form, groups that end, and sends that are lost."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbddp.worker.process_group.connections import listening
from nbddp.worker.watch.flight_recorder import count_started

CONNECT_TIMEOUT = 1.0  # seconds for a connection to this very process
CELLS_KEPT = 2  # that a group outlives its end
_CLASS = "N4gloo9transport3tcp13UnboundBuffer"
_WAIT = f"_Z{_CLASS}8waitSendEPiNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
_ABORT = f"_Z{_CLASS}13abortWaitSendEv"
_TABLE = f"_ZTV{_CLASS}E"
_CODE = 1024  # bytes: the function that waits is shorter, in all builds that were looked at
_DEPTH = 2048  # bytes of a stack: what it calls to wait takes less
_NEAR = 64  # words of the stack around its frame
_WORD = struct.Struct("Q")
_TOP = 1 << 47  # no address of a process is higher


# ---- groups that are made


def watch_new_groups(
    while_connecting: Callable[[Sequence[int]], AbstractContextManager[None]],
    on_created: Callable[[dist.ProcessGroup], None],
) -> None:
    """Be told of all groups that this process makes from here on.

    Args:
        while_connecting: what is entered while a group connects to its ranks; takes the ranks that
            it is to have, this one or not; none are all of them.
        on_created: takes it when it is there.
    """
    module: Any = dist.distributed_c10d
    name = "_new_process_group_helper"
    create: Callable[..., Any] | None = getattr(module, name, None)
    if create is None:
        return  # a torch that makes them elsewhere: then nobody is told

    @functools.wraps(create)
    def create_watched(
        size: int, rank: int, ranks: Sequence[int], *args: Any, **options: Any
    ) -> Any:
        with while_connecting(ranks):
            result = create(size, rank, ranks, *args, **options)
        if isinstance(result[0], dist.ProcessGroup):  # else this rank is not of the group
            on_created(result[0])
        return result

    setattr(module, name, create_watched)


# ---- groups that form


class GlooUnblocker:
    """Ends the wait of Gloo for a rank that is to dial it and does not live to do so.

    While a group forms, every two ranks connect. The one with the greater address dials, and says
    with a number which pair the connection is for; for a dead peer it gives up after three tries.
    The other one listens, and has no way out but its timeout, five times over (torch 2.13, gloo's
    ``Listener``). So a rank that is to be freed dials itself, with every number: its pairs get
    connections that end.
    """

    def __init__(self) -> None:
        # by group that forms: where others listened before it began, and where we have dialled
        self._handled: dict[object, list[Any]] = {}

    @contextmanager
    def forming(self) -> Iterator[None]:
        """What begins to listen in here is a group's, and waits for others."""
        group = object()
        self._handled[group] = listening()
        try:
            yield
        finally:
            del self._handled[group]

    def connect_to_self(self, world_size: int) -> None:
        """Let every pair of a group that forms have a connection, which ends at once.

        Args:
            world_size: how many pairs a rank may have: Gloo numbers them from 0.
        """
        for handled in list(self._handled.values()):
            for address in [each for each in listening() if each not in handled]:
                handled.append(address)
                for number in range(world_size):
                    with (
                        suppress(OSError),
                        socket.create_connection(address[:2], CONNECT_TIMEOUT) as own,
                    ):
                        own.sendall(struct.pack("@n", number))  # a ssize_t, of this very machine


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
        close: closes what the groups have open: a peer that waits for this rank hears of it, and
            so does a thread of ours. Before the first collective a peer may still be connecting.
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
        """Hold a group that was made."""
        self._groups.append(group)

    def _watch_destroy(self) -> None:
        """Free groups when a cell destroys them; close their sockets once all are destroyed."""
        module: Any = dist.distributed_c10d
        destroy = module.destroy_process_group

        @functools.wraps(destroy)
        def destroy_and_free(group: dist.ProcessGroup | None = None) -> None:
            # a group of this rank alone does not show that peers of an earlier one have connected
            is_shared = dist.is_initialized() and dist.get_world_size() > 1
            has_met = is_shared and _has_connected(module._get_default_group())
            destroy(group)
            if os.getpid() != self._pid:
                return
            if has_met and not dist.is_initialized():
                self._close()
            self._free()

        self.destroy = destroy
        module.destroy_process_group = dist.destroy_process_group = destroy_and_free

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
        """Free what ended some cells ago."""
        living = dist.distributed_c10d._world.pg_map
        self._ended.append([each for each in self._groups if each not in living])
        self._groups = [each for each in self._groups if each in living]


def _has_connected(group: Any) -> bool:
    """Return whether a group has started a collective, so that all its ranks are connected."""
    return bool(group.size() == 1 or count_started(group) > 0)


# ---- sends that are lost


def abort_stuck_sends() -> int:
    """Wake who waits for a send that Gloo has lost, once all connections of groups are ended.

    A message that is asked for is written by Gloo's own thread. If that write fails, nobody is
    told: in torch 2.13 ``Pair::signalException`` wakes those whose messages are queued, and this
    one is not queued yet. ``UnboundBuffer::waitSend`` then waits for the process group's timeout,
    half an hour. It takes a peer that dies with bytes unread, which resets the connection: in loops
    over ``all_reduce`` of 40 bytes to 12 MB, on two busy cores, 15 of 795 deaths of a rank left
    another one waiting so, and none of 1,635 with what is done here. Gloo has
    ``UnboundBuffer::abortWaitSend`` for it, but no way to the buffer. So the stacks of this process
    are looked through for a frame of ``waitSend``, and for a buffer beside it: that is the one
    which is waited for. The collective goes on from there, and fails where it next has to do with a
    connection that has ended.

    Linux only, and 64 bits: elsewhere, or where torch names these functions otherwise, nobody is
    woken. Return how many were.
    """
    with suppress(OSError, AttributeError, ValueError):  # no such function, or nothing to look with
        with_gloo = Path(torch.__path__[0], "lib", "libtorch_cpu.so")
        return _abort_waits(ctypes.CDLL(str(with_gloo), os.RTLD_NOLOAD))
    return 0


def _abort_waits(library: ctypes.CDLL) -> int:
    waits, abort = ctypes.cast(library[_WAIT], ctypes.c_void_p).value or 0, library[_ABORT]
    abort.argtypes, abort.restype = [ctypes.c_void_p], None
    # an object begins with the address of its class's functions, behind two other words
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
    """The newest words on the stack of each thread that waits for something."""
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - names, no paths
        with suppress(OSError):  # it has ended
            fields = Path("/proc/self/task", task, "syscall").read_text().split()
            if len(fields) > 2:  # else it runs
                data = os.pread(memory, _DEPTH, int(fields[-2], 16))
                whole = data[: len(data) // _WORD.size * _WORD.size]
                yield [word for (word,) in _WORD.iter_unpack(whole)]


def _candidates(stack: list[int], waits: int) -> Iterator[int]:
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
