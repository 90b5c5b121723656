"""The messages from one rank of a group to another, in parts, through a ring for each pair."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import torch

from nbddp.extensions.shm.shared_memory import PART, DifferentCallsError, Memory, copy_bytes
from nbddp.extensions.shm.slot_collectives import Piece


class Messages:
    """Sends and receives the messages of one rank."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._sent = [0] * memory.size  # parts to each rank
        self._sources = [_Source(memory, rank) for rank in range(memory.size)]

    def send(self, call: str, piece: Piece, target: int, tag: int) -> None:
        """Send a message. The receiver may read its last parts later."""
        memory, begin = self._memory, 0
        while begin == 0 or begin < piece.size:
            memory.wait({target: memory.free(memory.rank, target)}, call)
            position = memory.part(memory.rank, target, self._sent[target])
            memory.write_part_header(position, tag, piece.size)
            count = min(PART, piece.size - begin)
            copy_bytes(memory.base + position, piece.address + begin, count)
            memory.post(memory.filled(memory.rank, target))
            if begin == 0:
                memory.post(memory.message(target))
            self._sent[target] += 1
            begin += PART

    def receive(self, call: str, piece: Piece, source: int, tag: int) -> None:
        """Receive the next message with this tag. Keep messages with other tags."""
        other = self._sources[source]
        with other.lock:
            while not other.has(tag):
                self._memory.wait({source: self._memory.filled(source, self._memory.rank)}, call)
                other.read(call, piece, tag)
            other.take(call, piece, tag)

    def receive_any(self, call: str, piece: Piece, tag: int) -> int:
        """Receive a message with this tag from the first rank that sends one; return the rank."""
        memory, announced = self._memory, self._memory.message(self._memory.rank)
        while True:
            for source in memory.peers:
                other = self._sources[source]
                if not other.lock.acquire(blocking=False):
                    continue  # another call waits for a message of this rank
                try:
                    while not other.has(tag):
                        if not memory.try_wait(memory.filled(source, memory.rank)):
                            break
                        other.read(call, piece, tag)
                    else:
                        other.take(call, piece, tag)
                        return source
                finally:
                    other.lock.release()
            memory.wait(dict.fromkeys(memory.peers, announced), call, needs_all=False)


class _Source:
    """The messages from one rank."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self._memory, self._rank, self._parts = memory, rank, 0
        self.lock = threading.Lock()
        # by tag, messages that no call has taken; None for one that is where it belongs
        self._read: defaultdict[int, list[Any]] = defaultdict(list)

    def has(self, tag: int) -> bool:
        return bool(self._read[tag])

    def read(self, call: str, piece: Piece, tag: int) -> None:
        """Read a message, whose first part is there: into the piece, if it belongs there."""
        memory, begin = self._memory, 0
        memory.try_wait(memory.message(memory.rank))  # it needs to be announced no longer
        while True:
            position = memory.part(self._rank, memory.rank, self._parts)
            if begin == 0:
                own_tag, size = memory.read_part_header(position)
                fits = (own_tag, size) == (tag, piece.size)
                kept = None if fits else torch.empty(size, dtype=torch.uint8)
                address = piece.address if kept is None else kept.data_ptr()
            copy_bytes(address + begin, memory.base + position, min(PART, size - begin))
            self._parts += 1
            memory.post(memory.free(self._rank, memory.rank))
            begin += PART
            if begin >= size:
                break
            memory.wait({self._rank: memory.filled(self._rank, memory.rank)}, call)
        self._read[own_tag].append(kept)

    def take(self, call: str, piece: Piece, tag: int) -> None:
        """Take the oldest message with a tag.

        Raises:
            DifferentCallsError: it has another size.
        """
        kept = self._read[tag].pop(0)
        if kept is None:
            return
        if len(kept) != piece.size:
            raise DifferentCallsError(
                f"rank {self._rank} of a group has sent {len(kept)} bytes, and {call} on rank "
                f"{self._memory.rank} expects {piece.size}"
            )
        copy_bytes(piece.address, kept.data_ptr(), piece.size)
