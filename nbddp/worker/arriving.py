"""When this rank comes to its collectives, from where, and how long it waits for data.

The flight recorder is read once a second, and more often where so many collectives are begun that
it would forget some; two of these reads never see the same entry. What this costs,
``benchmarks/timeline.py`` measures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from nbddp.train import place
from nbddp.wire.timing_messages import Arrivals
from nbddp.worker.arrival import RECORDED
from nbddp.worker.flight_recorder import (
    NCCLS,
    Entry,
    count_begun,
    gpu_microseconds,
    group_of,
    meets,
    recorded,
    shape_of,
)
from nbddp.worker.loaders import Loads
from nbddp.worker.main_thread import innermost_in_cell, main_cpu_time, main_frame, main_state

MOST_A_SECOND = 20_000  # rows of all ranks together: beyond that each rank leaves some out,
FEWEST = 100  # but tells at least so many
BLOCK = 32  # collectives with consecutive numbers that are told or left out together
MAX_LOADS = 300  # waits for data in one letter: the longest

CellFile = Callable[[str], bool]


class Arriving:
    """Reads the flight recorder for a rank; any thread may ask it to.

    Args:
        post: sends what is new.
        is_cell_file: whether code of this file name is a cell's.
        name_of: what a script's file is called, or another cell; empty for the cell that runs.
    """

    def __init__(
        self,
        post: Callable[[Arrivals], None],
        is_cell_file: CellFile,
        name_of: Callable[[str], str] = lambda _filename: "",
    ) -> None:
        self._post = post
        self._is_cell_file = is_cell_file
        self._name_of = name_of
        self._lock = threading.Lock()
        self._loads = Loads()
        self._seen = -1  # the newest record that was read,
        self._read_at = 0.0  # when,
        self._per_second = 0.0  # and how fast they came then
        self._begin(0, 0.0)

    def start(self) -> None:
        """Begin to note waits for data."""
        self._loads.listen()

    @property
    def has_met(self) -> bool:
        """Whether the cell had a collective, so that it is worth sampling."""
        return self._cell > 0 and not self._is_first

    # ---- what the rank says

    def begin_cell(self, cell: int, at: float) -> None:
        """A cell begins."""
        with self._lock:
            self._begin(cell, at)

    def _begin(self, cell: int, at: float) -> None:
        self._cell, self._base = cell, int(at * 1e6) * 1000
        self._is_first = True
        self._begun, self._all_begun = count_begun(), _sequences()
        self._turns: dict[str, tuple[int, int]] = {}  # of each group: its newest number, its turn
        self._names: dict[Any, str] = {}
        self._unmeasured: dict[int, tuple[Any, ...]] = {}  # NCCL's that go on: kinds by record
        self._clear()
        self._loads.begin()

    def _clear(self) -> None:
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._rows: list[tuple[int, int, int]] = []
        self._places: dict[tuple[int, str], int] = {}
        self._samples: list[int] = []
        self._durations: list[int] = []
        self._lost = 0
        self._wakes = Wakes()

    def end_cell(self, *, is_short: bool) -> None:
        """It is over; of one that nobody has looked at so far, only if it had collectives.

        Where there is no group after it, it may have had one of its own, as scripts have.
        """
        had_none = bool(self._all_begun) and _sequences() == self._all_begun
        if self._cell and not (is_short and had_none):
            self.tell(is_over=True)
        with self._lock:
            self._begin(0, 0.0)

    def tell(self, *, is_over: bool = False) -> Sequence[Entry]:
        """Read the flight recorder and send new arrivals. Return all recorded entries."""
        with self._lock:
            entries = recorded()
            self._take(entries)
            letter = self._letter(is_over=is_over) if self._cell else None
            if letter is not None:
                self._clear()
        if letter is not None:
            self._post(letter)
        return entries

    # ---- reading

    def _take(self, entries: Sequence[Entry]) -> None:
        new = [each for each in entries if int(each["record_id"]) > self._seen]
        now = time.monotonic()
        self._per_second = len(new) / max(now - self._read_at, 1e-3)
        self._read_at = now
        before, self._seen = self._seen, int(entries[-1]["record_id"]) if entries else self._seen
        if not self._cell:
            return
        mine = [each for each in new if each["time_created_ns"] >= self._base]
        if mine:
            self._lost += self._missing(mine, new, before)
            self._is_first = False
            for each in mine:
                self._add(each)
        self._measure(entries)

    def _missing(self, mine: Sequence[Entry], new: Sequence[Entry], before: int) -> int:
        """How many the recorder has forgotten since the last read, or since the cell began."""
        first = int(new[0]["record_id"])
        if not self._is_first:
            return 0 if before < NCCLS <= first else first - before - 1
        if len(mine) < len(new) or group_of(mine[0]):
            return 0
        return max(0, int(mine[0]["collective_seq_id"]) - self._begun - 1)

    def _add(self, entry: Entry) -> None:
        if entry.get("is_p2p"):
            return
        group, number = self._group(entry), int(entry["collective_seq_id"])
        newest, turn = self._turns.get(group, (0, 0))
        if number <= newest:  # the cell has formed the group anew
            turn += 1
        self._turns[group] = number, turn
        name = entry["profiling_name"].partition(":")[2]
        kind = (name, shape_of(entry), group, meets(entry), turn)
        at = (entry["time_created_ns"] - self._base) // 1000
        self._rows.append((number, at, self._kinds.setdefault(kind, len(self._kinds))))
        if int(entry["record_id"]) >= NCCLS:
            self._unmeasured[int(entry["record_id"])] = kind

    def _measure(self, entries: Sequence[Entry]) -> None:
        """Take in how long NCCL's took: that is there when they are over, or never."""
        if not self._unmeasured:
            return
        for each in entries:
            took = gpu_microseconds(each)
            if took is not None and (kind := self._unmeasured.pop(int(each["record_id"]), None)):
                self._durations += [took, self._kinds.setdefault(kind, len(self._kinds))]
        oldest = int(entries[0]["record_id"])
        for record in [each for each in self._unmeasured if each < oldest]:
            del self._unmeasured[record]  # the recorder has forgotten it

    def _group(self, entry: Entry) -> str:
        key = entry.get("pg_id"), tuple(entry.get("process_group", ()))
        if key not in self._names:
            self._names[key] = group_of(entry)
        return self._names[key]

    # ---- telling

    def _letter(self, *, is_over: bool) -> Arrivals | None:
        loads = self._loads.take(self._base // 1000, MAX_LOADS)
        has_met = bool(self._rows) or (is_over and not self._is_first)
        if not (has_met or loads or self._lost or self._durations):
            return None
        rows = _thin(self._rows, max(FEWEST, MOST_A_SECOND // place.world_size()))
        return Arrivals(
            cell=self._cell,
            base=self._base / 1e9,
            kinds=[list(each) for each in self._kinds],
            rows=[number for row in rows for number in row],
            places=[list(each) for each in self._places],
            samples=list(self._samples),
            loads=loads,
            durations=list(self._durations),
            lost=self._lost,
            thinned=len(self._rows) - len(rows),
            awake=int(self._wakes.awake * 1e6),
            cpu=int(self._wakes.cpu * 1e6),
            until=(time.time_ns() - self._base) // 1000,
            is_over=is_over,
        )

    # ---- between two looks

    def sample(self) -> None:
        """Note where the main thread is; read the recorder if it would soon forget some."""
        with self._lock:
            self._wakes.look()
            at = (time.time_ns() - self._base) // 1000
            frame, _ = innermost_in_cell(main_frame(), self._is_cell_file)
            if frame is not None:
                where = (frame.f_lineno, self._name_of(frame.f_code.co_filename))
                self._samples += [at, self._places.setdefault(where, len(self._places))]
            if (time.monotonic() - self._read_at) * self._per_second > RECORDED / 2:
                self._take(recorded())


class Wakes:
    """For how long the main thread was not asleep, and for how long it had a core.

    What is between the two it waited for a core: then it is the machine that is slow, not the rank.
    """

    def __init__(self) -> None:
        self.awake = self.cpu = 0.0
        self._at, self._cpu = time.monotonic(), main_cpu_time()

    def look(self) -> None:
        """It is now as it was since the last look; 20 looks a second make that true enough."""
        at, cpu = time.monotonic(), main_cpu_time()
        if main_state() == "R":
            self.awake += at - self._at
        self.cpu += cpu - self._cpu
        self._at, self._cpu = at, cpu


def _sequences() -> dict[tuple[str, int], int]:
    """How many each group has begun, by its name and its place in memory."""
    groups = list(dist.distributed_c10d._world.pg_names.items())
    return {(name, id(group)): count_begun(group) for group, name in groups}


def _thin(rows: list[tuple[int, int, int]], most: int) -> list[tuple[int, int, int]]:
    """Leave out blocks of consecutive numbers until no more are left than may be.

    All ranks leave out the same: every second block, or three of four, or seven of eight.
    """
    every = 1
    found = rows
    while len(found) > most:
        every *= 2
        found = [row for row in rows if row[0] // BLOCK % every == 0]
    return found
