"""The memory that the ranks of a process group share: semaphores, headers, and slots for tensors.

It is a memfd, a file without a name, which peers open through ``/proc``. So nothing is in
``/dev/shm``, and the memory ends with the last process that uses it. Only semaphores order
accesses: what a rank writes before it posts one, another rank reads after its wait.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import struct
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from traceback import format_exception_only

import torch
import torch.distributed as dist

# C's functions: calls through _QUICK keep Python's lock, those through _WAITING release it
_QUICK, _WAITING = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
_post, _try_wait, _value = _QUICK.sem_post, _QUICK.sem_trywait, _QUICK.sem_getvalue
_initialize, _timed_wait = _QUICK.sem_init, _WAITING.sem_timedwait
_post.argtypes = _try_wait.argtypes = (ctypes.c_void_p,)
_value.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_initialize.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_timed_wait.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
copy_bytes = ctypes.memmove  # of addresses; it releases Python's lock

SEMAPHORE = 64  # bytes: a cache line; a sem_t of glibc has 32
PERIOD = 50_000_000  # nanoseconds between two looks for dead peers in a wait
TEXT = 256  # bytes for the text of a call
MAX_SLOT, ALL_SLOTS = 4 << 20, 64 << 20  # bytes of a slot, and of all slots of a group
TURNS = 2  # a rank writes for the next turn while others may still read those of this one
PART = 128 << 10  # bytes of a part of a message
PARTS = 2  # so many parts a sender may be ahead
_LINE = 64  # bytes in front of each part, for its header


class DifferentCallsError(RuntimeError):
    """Ranks of a group have made different calls. The group can be used further."""


class Memory:
    """The shared memory of a process group, as one of its ranks sees it.

    Args:
        rank: the rank of this process in the group.
        size: the number of ranks.
        timeout: for the other ranks to arrive here, and in each wait.

    Attributes:
        reason: why all waits fail from now on; "" while they do not.
        slot_size: the bytes of a slot; each rank has one for each turn.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size, self.timeout, self.reason = rank, size, timeout, ""
        # the other ranks, beginning with the next one, so that not all wait for the same one
        self.peers = [(rank + step) % size for step in range(1, size)]
        self.slot_size = min(MAX_SLOT, max(64 << 10, ALL_SLOTS // (TURNS * size))) & -4096
        self._pairs = size * size * SEMAPHORE  # bytes of one semaphore for each pair of ranks
        self._facts = 3 * self._pairs + size * SEMAPHORE
        self._headers = self._facts + size * _LINE
        self._header = struct.Struct(f"{TEXT}s{2 * size}q")
        self._slots = (self._headers + TURNS * size * self._header.size + 4095) & -4096
        self._messages = self._slots + TURNS * size * self.slot_size
        self._total = self._messages + size * size * PARTS * (PART + _LINE)
        self._process_fds: dict[int, int] = {}

    def connect(self, store: dist.Store) -> None:
        """Map the memory, which the first rank creates, and wait until all ranks have done so."""
        fd = -1
        try:
            if self.rank == 0:
                fd = os.memfd_create("nbddp-shm")
                os.ftruncate(fd, self._total)
                self._map(f"/proc/self/fd/{fd}")
                for index in range(self._facts // SEMAPHORE):
                    is_free = 2 <= index / self.size**2 < 3
                    _initialize(self.base + index * SEMAPHORE, 1, PARTS if is_free else 0)
                store.set("memory", f"/proc/{os.getpid()}/fd/{fd}")
            else:
                store.wait(["memory"], self.timeout)
                self._map(store.get("memory").decode())
            struct.pack_into("q", self._bytes, self._facts + self.rank * _LINE, os.getpid())
            self.meet("the creation of the group")
        finally:
            if fd >= 0:
                os.close(fd)
        for peer in self.peers:
            (pid,) = struct.unpack_from("q", self._bytes, self._facts + peer * _LINE)
            try:
                self._process_fds[peer] = os.pidfd_open(pid)
            except ProcessLookupError as error:
                raise dist.DistBackendError(f"{self._names([peer])} has ended") from error

    def _map(self, path: str) -> None:
        try:
            self._all = torch.from_file(path, shared=True, size=self._total, dtype=torch.uint8)
        except RuntimeError as error:
            raise dist.DistBackendError(
                f"cannot open the shared memory of rank 0 of the group: {error}"
            ) from error
        self.base = self._all.data_ptr()
        self._bytes = memoryview((ctypes.c_char * self._total).from_address(self.base)).cast("B")
        # a process that a rank forks, such as a loader's worker, neither touches nor keeps it
        _QUICK.madvise(ctypes.c_void_p(self.base), ctypes.c_size_t(self._total), mmap.MADV_DONTFORK)

    def __del__(self) -> None:
        for fd in self._process_fds.values():
            os.close(fd)

    # ---- places

    def slot(self, turn: int, rank: int) -> int:
        """Return the address of the slot of a rank."""
        return self.base + self._slots + (turn * self.size + rank) * self.slot_size

    def rows(self, turn: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the slots of all ranks as the rows of a tensor."""
        begin = self._slots + turn * self.size * self.slot_size
        with torch.inference_mode(mode=False):  # else they are of no use outside it
            rows = self._all[begin : begin + self.size * self.slot_size].view(dtype)
            return rows.view(self.size, -1)

    def part(self, source: int, target: int, number: int) -> int:
        """Return the position of a part of a message, whose header is in front of it."""
        index = (source * self.size + target) * PARTS + number % PARTS
        return self._messages + index * (PART + _LINE) + _LINE

    def arrived(self, source: int, target: int) -> int:
        """Return the semaphore with which one rank tells another that it has arrived."""
        return self.base + (source * self.size + target) * SEMAPHORE

    def filled(self, source: int, target: int) -> int:
        """Return the semaphore that counts the parts which their receiver has not read."""
        return self.arrived(source, target) + self._pairs

    def free(self, source: int, target: int) -> int:
        """Return the semaphore that counts the parts which the sender may write."""
        return self.arrived(source, target) + 2 * self._pairs

    def message(self, target: int) -> int:
        """Return the semaphore that counts the messages of all ranks to one."""
        return self.base + 3 * self._pairs + target * SEMAPHORE

    # ---- waits

    post = staticmethod(_post)

    def try_wait(self, semaphore: int) -> bool:
        """Take one from the semaphore, if there is one."""
        return bool(_try_wait(semaphore) == 0)

    def meet(self, call: str) -> None:
        """Wait until all ranks are here: then they have read what was written two meetings ago."""
        for peer in self.peers:
            _post(self.arrived(self.rank, peer))
        awaited = {peer: self.arrived(peer, self.rank) for peer in self.peers}
        for peer in self.peers:
            self.wait(awaited, call)
            del awaited[peer]

    def wait(self, awaited: Mapping[int, int], call: str, *, needs_all: bool = True) -> None:
        """Wait for the first of these semaphores of other ranks, by rank.

        An interrupt ends the wait at once: Python handles it between two waits of C. Without
        ``needs_all``, the wait goes on while one of the ranks can post its semaphore.

        Raises:
            DistBackendError: a rank will not post its semaphore, or not in time.
        """
        semaphore = next(iter(awaited.values()))
        if self.reason:
            self._check(awaited, call, needs_all=needs_all)
        if _try_wait(semaphore) == 0:
            return
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            # sem_timedwait uses the clock that can be set, so each of its waits is short
            until = struct.pack("qq", *divmod(time.time_ns() + PERIOD, 10**9))
            if _timed_wait(semaphore, until) == 0:
                return
            if (error := ctypes.get_errno()) not in (errno.ETIMEDOUT, errno.EINTR):
                raise OSError(error, f"sem_timedwait: {os.strerror(error)}")
            self._check(awaited, call, needs_all=needs_all)
            if time.monotonic() > deadline:
                missing = [peer for peer in awaited if not _is_posted(awaited[peer])]
                raise dist.DistBackendError(
                    f"Timed out waiting {self.timeout.total_seconds():g} s in {call} over shared "
                    f"memory, for {self._names(missing)}"
                )

    def _check(self, awaited: Mapping[int, int], call: str, *, needs_all: bool) -> None:
        """Raise an error if the wait cannot end, because awaited ranks have gone."""
        if self.reason:
            raise dist.DistBackendError(f"{call} over shared memory cannot end: {self.reason}")
        gone = {peer: reason for peer in awaited if (reason := self._why_gone(peer))}
        if not gone or (not needs_all and len(gone) < len(awaited)):
            return
        for peer, reason in gone.items():
            if not _is_posted(awaited[peer]):  # else the rank had arrived before
                raise dist.DistBackendError(
                    f"{call} over shared memory cannot end: {self._names([peer])} {reason}"
                )

    def _names(self, ranks: Sequence[int] | Mapping[int, int]) -> str:
        missing = ", ".join(map(str, sorted(ranks)))
        return f"rank{'s' if len(ranks) > 1 else ''} {missing} of its group"

    def _why_gone(self, peer: int) -> str:
        if (fd := self._process_fds.get(peer)) is not None:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if poll.poll(0):
                return "has ended"
        has_left = self._bytes[self._facts + peer * _LINE + 8]
        return "has left a call after an error or an interrupt" if has_left else ""

    def leave_after(self, error: BaseException) -> None:
        """Leave after an error that has ended a call, unless all ranks have the same one."""
        if not isinstance(error, DifferentCallsError):
            self.leave(f"an earlier call failed with {format_exception_only(error)[-1].strip()}")

    def leave(self, reason: str) -> None:
        """Let all waits fail, here and in other ranks that wait for this one."""
        self.reason = self.reason or reason
        if hasattr(self, "_bytes"):
            self._bytes[self._facts + self.rank * _LINE + 8] = 1

    # ---- headers

    def write_header(self, turn: int, text: bytes, sizes: Sequence[int] = ()) -> None:
        """Write the call of this rank; ``sizes``: what it sends to each rank, then receives."""
        position = self._header_at(turn, self.rank)
        if sizes:
            self._header.pack_into(self._bytes, position, text, *sizes)
        else:
            self._bytes[position : position + TEXT] = text.ljust(TEXT, b"\0")

    def read_text(self, turn: int, rank: int) -> bytes:
        """Return the call of a rank."""
        position = self._header_at(turn, rank)
        return bytes(self._bytes[position : position + TEXT]).rstrip(b"\0")

    def read_sizes(self, turn: int, rank: int) -> tuple[int, ...]:
        """Return the sizes in the header of a rank."""
        _, *sizes = self._header.unpack_from(self._bytes, self._header_at(turn, rank))
        return tuple(sizes)

    def _header_at(self, turn: int, rank: int) -> int:
        return self._headers + (turn * self.size + rank) * self._header.size

    def write_part_header(self, position: int, *facts: int) -> None:
        """Write facts in front of a part of a message."""
        struct.pack_into("2q", self._bytes, position - _LINE, *facts)

    def read_part_header(self, position: int) -> tuple[int, ...]:
        """Return the facts in front of a part of a message."""
        return struct.unpack_from("2q", self._bytes, position - _LINE)


def _is_posted(semaphore: int) -> bool:
    value = ctypes.c_int()
    _value(semaphore, ctypes.byref(value))
    return value.value > 0
