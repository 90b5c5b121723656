"""Record when this rank reached its collectives, its line over time, and its waits for data.

nbddp reads the flight recorder once a second, or more often if the recorder would overwrite
entries. No entry is reported twice. ``benchmarks/timeline.py`` measures the cost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from nbddp.accelerator import is_device_backend
from nbddp.reporting import this_rank
from nbddp.wire.collective_arrivals import CollectiveArrivals
from nbddp.worker.watch import dataloader_waits, flight_recorder, main_thread
from nbddp.worker.watch.flight_recorder import BUFFER_SIZE, Entry, record_key

MAX_ROWS_PER_SECOND = 20_000  # rows of all ranks; above it, each rank leaves some out,
MIN_ROWS = 100  # but reports at least this number
BLOCK = 32  # consecutive collectives that are reported or left out together
MAX_LOADER_WAITS = 300  # the longest waits for data in one message

Row = tuple[int, int, int]  # number in its group, time, index of its kind


class ArrivalRecorder:
    """Read the flight recorder of a rank, in any thread.

    Args:
        post: sends new arrivals.
        is_cell_file: returns whether a file name belongs to a cell or a script.
        name_of_file: returns the name to show for a file.

    Attributes:
        has_collectives: whether the cell has called a collective, so that sampling is useful.
    """

    def __init__(
        self,
        post: Callable[[CollectiveArrivals], None],
        is_cell_file: Callable[[str], bool],
        name_of_file: Callable[[str], str],
    ) -> None:
        self._post = post
        self._is_cell_file = is_cell_file
        self._name_of_file = name_of_file
        self._lock = threading.Lock()
        self._newest_records: dict[str, int] = {}  # the newest record read, by recorder,
        self._read_at = 0.0  # the time of that read,
        self._records_per_second = 0.0  # and the records per second at that time
        self.begin_cell(0, 0.0)

    def begin_cell(self, cell: int, at: float) -> None:
        """Start a cell at this ``time.time()``."""
        with self._lock:
            self._cell, self._base = cell, int(at * 1e6) * 1000  # nanoseconds
            self.has_collectives = False
            self._started_before = flight_recorder.count_started()
            self._counts_before = _count_all_started()
            # by group: its last number, and how often the cell has created the group again
            self._last_numbers: dict[str, tuple[int, int]] = {}
            self._group_names: dict[Any, str] = {}
            # calls on GPUs whose duration is not known yet
            self._unmeasured: dict[tuple[str, int], tuple[Any, ...]] = {}
            self._start_message()

    def _start_message(self) -> None:
        self._message = CollectiveArrivals(cell=self._cell, base=self._base / 1e9)
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._cell_lines: dict[tuple[int, str], int] = {}
        self._rows: list[Row] = []
        self._lost = 0
        self._activity = ThreadActivity()

    def end_cell(self, *, is_short: bool) -> None:
        """End a cell. Report a short cell only if it had collectives.

        A cell without a process group at its end may have had one of its own, as scripts do.
        """
        had_none = bool(self._counts_before) and _count_all_started() == self._counts_before
        if self._cell and not (is_short and had_none):
            self.report(is_over=True)
        self.begin_cell(0, 0.0)

    def report(self, *, is_over: bool = False) -> Sequence[Entry]:
        """Read the flight recorder and send new arrivals. Return all recorded entries."""
        with self._lock:
            entries = flight_recorder.read_entries()
            self._read(entries)
            message = self._complete_message(is_over=is_over) if self._cell else None
            if message is not None:
                self._start_message()
        if message is not None:
            self._post(message)
        return entries

    def sample(self) -> None:
        """Record the line of the main thread. Read the recorder before it overwrites entries."""
        with self._lock:
            self._activity.sample()
            frame = main_thread.main_frame()
            here, _ = main_thread.innermost_in_cell(frame, self._is_cell_file)
            if here is not None:
                file = self._name_of_file(here.f_code.co_filename)
                where = main_thread.line_of(here), file
                number = self._cell_lines.setdefault(where, len(self._cell_lines))
                self._message.samples.extend([self._microseconds(time.time_ns()), number])
            if (time.monotonic() - self._read_at) * self._records_per_second > BUFFER_SIZE / 2:
                self._read(flight_recorder.read_entries())

    def _microseconds(self, at: int) -> int:
        return (at - self._base) // 1000

    # ---- reading

    def _read(self, entries: Sequence[Entry]) -> None:
        before = self._newest_records
        new = [entry for entry in entries if entry["record_id"] > before.get(entry["recorder"], -1)]
        now = time.monotonic()
        self._records_per_second = len(new) / max(now - self._read_at, 1e-3)
        self._read_at = now
        self._newest_records = before | {entry["recorder"]: entry["record_id"] for entry in entries}
        if not self._cell:
            return
        of_cell = [each for each in new if each["time_created_ns"] >= self._base]
        if of_cell:
            self._lost += self._count_lost(of_cell, new, before)
            self.has_collectives = True
            for collective in of_cell:
                self._add(collective)
        self._add_gpu_times(entries)

    def _count_lost(
        self, of_cell: Sequence[Entry], new: Sequence[Entry], before: Mapping[str, int]
    ) -> int:
        """Count the entries that were overwritten since the last read or the start of the cell."""
        if self.has_collectives:
            oldest = {entry["recorder"]: entry["record_id"] for entry in reversed(new)}
            return sum(oldest[name] - before[name] - 1 for name in oldest.keys() & before.keys())
        if len(of_cell) < len(new) or flight_recorder.group_name(of_cell[0]):
            return 0
        return max(0, int(of_cell[0]["collective_seq_id"]) - self._started_before - 1)

    def _add(self, entry: Entry) -> None:
        if entry.get("is_p2p"):
            return
        key = entry.get("pg_id"), tuple(entry.get("process_group", ()))
        if key not in self._group_names:
            self._group_names[key] = flight_recorder.group_name(entry)
        group, number = self._group_names[key], int(entry["collective_seq_id"])
        newest, turn = self._last_numbers.get(group, (0, 0))
        if number <= newest:  # the cell has created the group again
            turn += 1
        self._last_numbers[group] = number, turn
        inputs = flight_recorder.format_inputs(entry)
        kind = entry["name"], inputs, group, flight_recorder.is_synchronizing(entry), turn
        at = self._microseconds(entry["time_created_ns"])
        self._rows.append((number, at, self._kinds.setdefault(kind, len(self._kinds))))
        if is_device_backend(entry["backend"]):
            self._unmeasured[record_key(entry)] = kind

    def _add_gpu_times(self, entries: Sequence[Entry]) -> None:
        """Add the times of collectives on GPUs. They are known after the end, or never."""
        if not self._unmeasured:
            return
        for entry in entries:
            # NCCL's watchdog adds it after the end, if TORCH_NCCL_ENABLE_TIMING is set
            milliseconds = entry.get("duration_ms")
            kind = self._unmeasured.get(record_key(entry))
            if kind is not None and milliseconds is not None:
                del self._unmeasured[record_key(entry)]
                number = self._kinds.setdefault(kind, len(self._kinds))
                self._message.durations.extend([round(1000 * milliseconds), number])
        recorded = {record_key(entry) for entry in entries}
        for key in self._unmeasured.keys() - recorded:
            del self._unmeasured[key]  # the recorder has overwritten it

    def _complete_message(self, *, is_over: bool) -> CollectiveArrivals | None:
        """Return the complete message, or None if there is nothing to report."""
        waits = dataloader_waits.pop_longest_waits(self._base // 1000, MAX_LOADER_WAITS)
        is_end = is_over and self.has_collectives
        if not (self._rows or is_end or waits or self._lost or self._message.durations):
            return None
        rows = _thin(self._rows, max(MIN_ROWS, MAX_ROWS_PER_SECOND // this_rank.world_size()))
        return replace(
            self._message,
            kinds=[[*kind] for kind in self._kinds],
            rows=[number for row in rows for number in row],
            cell_lines=[[*each] for each in self._cell_lines],
            batch_waits=waits,
            lost=self._lost,
            omitted=len(self._rows) - len(rows),
            awake_time=int(self._activity.awake * 1e6),
            cpu_time=int(self._activity.cpu * 1e6),
            sent_at=self._microseconds(time.time_ns()),
            is_over=is_over,
        )


class ThreadActivity:
    """The seconds that the main thread was runnable (``awake``), and that it ran (``cpu``).

    The difference is the time that it waited for a core: then the machine is slow, not the rank.
    """

    def __init__(self) -> None:
        self.awake = self.cpu = 0.0
        self._at, self._cpu = time.monotonic(), main_thread.main_cpu_time()

    def sample(self) -> None:
        """Count the time since the last sample as spent in the current state.

        20 samples a second are enough.
        """
        at, cpu = time.monotonic(), main_thread.main_cpu_time()
        if main_thread.main_state() == "R":
            self.awake += at - self._at
        self.cpu += cpu - self._cpu
        self._at, self._cpu = at, cpu


def _count_all_started() -> dict[tuple[str, int], int]:
    """Return the number of collectives of each group, by the group's name and id."""
    groups = list(dist.distributed_c10d._world.pg_names.items())
    return {(name, id(group)): flight_recorder.count_started(group) for group, name in groups}


def _thin(rows: list[Row], limit: int) -> list[Row]:
    """Leave out blocks of consecutive numbers until at most ``limit`` rows remain.

    All ranks leave out the same blocks: every second one, or three of four, or seven of eight.
    """
    step, found = 1, rows
    while len(found) > limit:
        step *= 2
        found = [row for row in rows if row[0] // BLOCK % step == 0]
    return found
