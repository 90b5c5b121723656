"""The collectives of one rank of a group: each rank writes to its slot, all meet, and read.

Tensors of any size go through the slots in pieces. The slot of a turn is written again two meetings
later, when all ranks have read it, so one meeting for each piece is enough. A large all_reduce has
two: each rank reduces a part of the piece for all.

The first piece carries the call of each rank. If the calls differ, all ranks see that, and raise
the same error, before they write to any tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbddp.extensions.shm.shared_memory import TEXT, TURNS, DifferentCallsError, Memory, copy_bytes

SMALL = 64 << 10  # bytes up to which each rank reduces a whole all_reduce, after one meeting
LINE = 64  # bytes: the unit of the parts that ranks reduce
_Kind: Any = dist.ReduceOp.RedOpType
FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    _Kind.SUM: torch.add,
    _Kind.AVG: torch.add,
    _Kind.PRODUCT: torch.mul,
    _Kind.MIN: torch.minimum,
    _Kind.MAX: torch.maximum,
    _Kind.BAND: torch.bitwise_and,
    _Kind.BOR: torch.bitwise_or,
    _Kind.BXOR: torch.bitwise_xor,
}


@dataclass(frozen=True)
class Piece:
    """Contiguous memory of a tensor, which must live as long as the piece."""

    address: int
    size: int


@dataclass(frozen=True)
class Reducing:
    """How to reduce the values of the ranks."""

    dtype: torch.dtype
    kind: Any

    def reduce(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce rows in the order of the ranks. ``out`` may be the memory of one of them."""
        function = FUNCTIONS[self.kind]
        first, *middle = rows[:-1] or rows
        total = first
        for row in middle:
            total = function(total, row, out=torch.empty_like(out) if total is first else total)
        if len(rows) > 1:
            function(total, rows[-1], out=out)
        else:
            out.copy_(first)
        if self.kind == _Kind.AVG:
            is_whole = not (self.dtype.is_floating_point or self.dtype.is_complex)
            out.div_(len(rows), rounding_mode="trunc" if is_whole else None)


class Collectives:
    """Carries out the collectives of one rank, one after the other."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._turn = memory, 0
        self._rows: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def exchange(
        self,
        call: str,
        sent: Sequence[Piece],
        received: Sequence[Piece],
        *,
        largest: int | None,
        is_split: bool = False,
        reducing: Reducing | None = None,
    ) -> None:
        """Send pieces of memory to the other ranks, and receive theirs.

        Args:
            call: describes the call; it must be the same on all ranks.
            sent: one for all ranks or, if ``is_split``, one for each; empty if this rank has none.
            received: one from each rank, or empty; if ``reducing``, one for the result.
            largest: bytes of the largest piece of any rank; None if the sizes differ.
            is_split: whether each rank gets another piece.
            reducing: how to reduce what is received.
        """
        memory = self._memory
        step = memory.slot_size // memory.size & -LINE if is_split else memory.slot_size
        place = memory.rank * step if is_split else 0  # of pieces for this rank in a slot
        sizes = [each.size for each in (*sent, *received)] if largest is None else []
        begin = 0
        while begin == 0 or begin < (largest or 0):
            turn = self._next_turn()
            slot = memory.slot(turn, memory.rank)
            for index, piece in enumerate(sent):
                if (count := min(step, piece.size - begin)) > 0:
                    copy_bytes(slot + index * step, piece.address + begin, count)
            self._meet(call, turn, sizes, is_first=begin == 0)
            if largest is None:
                largest = self._agree_on_sizes(call, turn)
            for source, piece in enumerate(received):
                if (count := min(step, piece.size - begin)) <= 0:
                    continue
                if reducing is None:
                    copy_bytes(piece.address + begin, memory.slot(turn, source) + place, count)
                else:
                    result = self._reduce(reducing, turn, place, count)
                    copy_bytes(piece.address + begin, result.data_ptr(), count)
            begin += step

    def all_reduce(self, call: str, piece: Piece, reducing: Reducing, root: int = -1) -> None:
        """Reduce the pieces of all ranks, in place. With a root, only there."""
        memory, is_receiver = self._memory, root in (-1, self._memory.rank)
        begin = 0
        while begin == 0 or begin < piece.size:
            turn = self._next_turn()
            count = min(memory.slot_size, piece.size - begin)
            copy_bytes(memory.slot(turn, memory.rank), piece.address + begin, count)
            self._meet(call, turn, is_first=begin == 0)
            if piece.size <= SMALL:
                if is_receiver and count:
                    result = self._reduce(reducing, turn, 0, count)
                    copy_bytes(piece.address, result.data_ptr(), count)
                return
            part = -(-count // memory.size) + LINE - 1 & -LINE
            place = memory.rank * part
            if (length := min(part, count - place)) > 0:
                self._reduce(reducing, turn, place, length, in_slot=True)
            memory.meet(call)
            for rank in range(memory.size) if is_receiver else ():
                place = rank * part
                if (length := min(part, count - place)) > 0:
                    address = memory.slot(turn, rank) + place
                    copy_bytes(piece.address + begin + place, address, length)
            begin += count

    def _next_turn(self) -> int:
        self._turn = (self._turn + 1) % TURNS
        return self._turn

    def _meet(self, call: str, turn: int, sizes: Sequence[int] = (), *, is_first: bool) -> None:
        """Meet the other ranks, at first with the description of the call.

        Raises:
            DifferentCallsError: on all ranks, if they have made different calls.
        """
        memory, text = self._memory, call.encode()[:TEXT]
        if is_first:
            memory.write_header(turn, text, sizes)
        memory.meet(call)
        if not is_first or all(memory.read_text(turn, peer) == text for peer in memory.peers):
            return
        texts = [memory.read_text(turn, rank) for rank in range(memory.size)]
        calls = [text.decode(errors="replace") for text in texts]
        other = next(rank for rank, other in enumerate(calls) if other != calls[0])
        raise DifferentCallsError(
            f"the ranks of a group have called different collectives: rank 0 called {calls[0]}, "
            f"and rank {other} called {calls[other]}"
        )

    def _agree_on_sizes(self, call: str, turn: int) -> int:
        """Return the size of the largest piece. What a rank sends, the other must expect."""
        size = self._memory.size
        tables = [self._memory.read_sizes(turn, rank) for rank in range(size)]
        for source in range(size):
            for target in range(size):
                sent, expected = tables[source][target], tables[target][size + source]
                if sent != expected:
                    raise DifferentCallsError(
                        f"rank {source} of a group sends {sent} bytes to rank {target} in {call}, "
                        f"and rank {target} expects {expected}"
                    )
        return max(map(max, tables))

    def _reduce(
        self, reducing: Reducing, turn: int, begin: int, count: int, *, in_slot: bool = False
    ) -> torch.Tensor:
        """Reduce so many bytes of all slots. Return the result, perhaps in this rank's slot."""
        key = turn, reducing.dtype
        if (rows := self._rows.get(key)) is None:
            rows = self._rows[key] = self._memory.rows(turn, reducing.dtype)
        size = reducing.dtype.itemsize
        parts = [*rows[:, begin // size : (begin + count) // size]]
        out = parts[self._memory.rank] if in_slot else torch.empty_like(parts[0])
        reducing.reduce(parts, out)
        return out
