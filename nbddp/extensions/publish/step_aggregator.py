"""Aggregate the reports of all ranks step by step: mean and spread. No input or output.

A tracker has one run for all ranks. If several ranks report a metric, ``loss`` is the mean,
``loss/rank0`` the value of rank 0, and ``loss/min`` and ``loss/max`` the lowest and highest value.
If only one rank reports a metric, there is only ``loss``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from nbddp.extensions.runs.stored_run import NOT_METRICS

STEP_TIMEOUT = 5.0  # seconds that a step waits for ranks that have not reported a later one

Key = tuple[int, int, int]  # cell, repetition of its steps, step
BEFORE_ALL: Key = (-2, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatedStep:
    """One step of all ranks that reported it.

    Attributes:
        step: the reported step; for metrics without steps, their count. If steps moved back, they
            continue after the last step, as in :class:`~nbddp.record.metrics.MetricSeries`.
        time: the ``time.time()`` of its first report.
        attempt: the attempt that reported it.
        cell: the index of its cell in the order in which cells ran; -1 before the first cell.
        is_again: whether that cell repeated an earlier cell.
        values: the aggregated values by name.
    """

    step: int
    time: float
    attempt: int
    cell: int
    is_again: bool
    values: Mapping[str, float]


@dataclass(slots=True)
class _Step:
    time: float
    attempt: int
    arrived_at: float
    values: dict[str, dict[int, float]] = field(default_factory=dict)


class StepAggregator:
    """Combines the rows of ranks into steps.

    If a rank reports a step again, or a lower step than before, a new series of steps starts, as
    in a second training in one cell.

    Attributes:
        late: the number of values that arrived after their step was returned, and were dropped.
        ranks: the ranks of this attempt.
    """

    def __init__(self) -> None:
        self.late = 0
        self.ranks: frozenset[int] = frozenset()
        self._cell_starts: list[float] = []
        self._is_again: list[bool] = []
        self._cell = -1
        self._open: dict[Key, _Step] = {}
        self._newest: dict[tuple[str, int], Key] = {}  # the newest step of each metric and rank
        self._last_popped: dict[str, Key] = {}  # the highest returned step of each metric
        # by metric: the highest step of its newest series, the offset of this series, the stride
        self._ends: dict[str, tuple[int, int, int]] = {}
        self._offsets: dict[tuple[str, int, int], int] = {}  # by metric, cell and repetition
        self._counts: dict[str, int] = {}  # the next count of each metric without steps
        self._first_counts: dict[str, int] = {}  # these counts at the start of the cell

    def begin_cell(self, at: float, *, is_again: bool) -> None:
        """Record that a cell began at a ``time.time()``."""
        self._cell_starts.append(at)
        self._is_again.append(is_again)

    def add(self, row: Mapping[str, Any], now: float) -> None:
        """Add a row that a rank reported; ``now`` is in ``time.monotonic()``."""
        cell = bisect_right(self._cell_starts, row["time"]) - 1
        if cell > self._cell:
            self._cell, self._first_counts = cell, dict(self._counts)
        for name, value in row.items():
            if name in NOT_METRICS or not isinstance(value, int | float):
                continue
            rank = int(row["rank"])
            key = self._newest[name, rank] = self._key_of(name, rank, row.get("step"))
            if key <= self._last_popped.get(name, BEFORE_ALL):
                self.late += 1
                continue
            if key not in self._open:
                self._open[key] = _Step(row["time"], int(row["attempt"]), now)
            self._open[key].values.setdefault(name, {})[rank] = float(value)

    def _key_of(self, name: str, rank: int, step: Any) -> Key:
        last = self._newest.get((name, rank), BEFORE_ALL)
        is_first = last[0] != self._cell
        if isinstance(step, int | float) and math.isfinite(step):
            again = 0 if is_first else last[1]
            if not is_first and step + self._offsets.get((name, self._cell, again), 0) <= last[2]:
                again += 1
            number = self._continued(name, again, int(step))
            end, offset, stride = self._ends[name]
            if last[:2] == (self._cell, again) and number > last[2]:
                stride = number - last[2]
            self._ends[name] = max(end, number), offset, stride
            return self._cell, again, number
        count = self._first_counts.get(name, 0) if is_first else last[2] + 1
        self._counts[name] = max(self._counts.get(name, 0), count + 1)
        return self._cell, 0 if is_first else last[1], count

    def _continued(self, name: str, again: int, step: int) -> int:
        """Return the number of a step. A series that begins again continues the earlier ones."""
        series = name, self._cell, again
        if series not in self._offsets:
            end, offset, stride = self._ends.get(name, (step, 0, 1))
            # steps that are repeated after a failure keep their numbers
            is_retry = not again and not offset and self._is_again_at(self._cell)
            if step + offset < end and not is_retry:
                offset = end + stride - step
            self._offsets[series] = offset
            self._ends[name] = step + offset, offset, stride
        return step + self._offsets[series]

    def _is_again_at(self, cell: int) -> bool:
        return cell >= 0 and self._is_again[cell]

    def pop_complete(self, now: float) -> list[AggregatedStep]:
        """Remove and return the complete steps, in the order of their first reports.

        A step is complete if all ranks have reported a later step of the same metrics, after
        :data:`STEP_TIMEOUT`, or if another cell runs. At an infinite time, all steps are complete.
        """
        taken = []
        for key, step in list(self._open.items()):
            newest = [self._newest.get((name, rank)) for name in step.values for rank in self.ranks]
            is_passed = all(each is not None and each > key for each in newest)
            if not (now - step.arrived_at > STEP_TIMEOUT or key[0] < self._cell or is_passed):
                break
            del self._open[key]
            for name in step.values:
                self._last_popped[name] = max(self._last_popped.get(name, BEFORE_ALL), key)
            taken.append(self._aggregate(key, step))
        return taken

    def _aggregate(self, key: Key, step: _Step) -> AggregatedStep:
        cell, _, number = key
        means: dict[str, float] = {}
        spread: dict[str, float] = {}  # how ranks differ
        for name, values in step.values.items():
            numbers = [*values.values()]  # NaN on one rank makes the mean NaN
            is_finite = all(map(math.isfinite, numbers))
            means[name] = fmean(numbers) if is_finite else sum(numbers) / len(numbers)
            if len(values) > 1:
                usable = [value for value in numbers if not math.isnan(value)] or [math.nan]
                spread |= {f"{name}/rank0": values[0]} if 0 in values else {}
                spread |= {f"{name}/min": min(usable), f"{name}/max": max(usable)}
        return AggregatedStep(
            step=number,
            time=step.time,
            attempt=step.attempt,
            cell=cell,
            is_again=self._is_again_at(cell),
            values=spread | means,
        )
