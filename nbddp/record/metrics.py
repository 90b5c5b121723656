"""Metrics that ranks report, reduced so that a run of any length fits in memory."""

from __future__ import annotations

import math
import operator
import threading
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

from nbddp.record.step_rate import RATE_WINDOW, RateEstimator, StepRate

MAX_NAMES = 64
MAX_DROPPED = 10_000  # maximum number of counted names without a series
MAX_BUCKETS = 1000  # of one metric of one rank: more than the pixels of a chart
MAX_COARSE_PAIRS = 48  # of a coarse curve
MAX_RESUMES = 64  # newest marks of one curve
MAX_STEP = 2.0**53  # a float cannot hold all larger integers
MAX_FINITE = 1e300  # the sum of a million smaller values is finite; larger ones count as infinite

Pairs = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one rank, in buckets of neighbouring steps; the steps ascend.

    Each bucket is one step until there are more than 1,000. Then each bucket is several steps, with
    their lowest and highest value, so that no spike is lost.

    Attributes:
        times: mean ``time.time()`` of the values of each bucket.
        steps: their mean step. After a step that moved back, the count continues upwards.
        mean: mean of the finite values of each bucket; NaN if there are none.
        low: the lowest finite value; NaN if there are none. ``high`` is the highest.
        nonfinite: number of values that were NaN, infinite or beyond 1e300.
        last: the newest value, finite or not.
        resume_points: steps at which another attempt resumed the work.
    """

    times: tuple[float, ...]
    steps: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    nonfinite: tuple[int, ...]
    last: float
    resume_points: tuple[float, ...] = ()

    def coarse(self) -> list[list[float]]:
        """Return the lowest and highest value in each of at most 48 sections of equal length."""
        return _coarse([*zip(self.low, self.high, strict=True)])


def _coarse(pairs: Pairs) -> list[list[float]]:
    """Merge neighbours until at most 48 pairs are left; NaN where no value was finite."""
    width = math.ceil(len(pairs) / MAX_COARSE_PAIRS) or 1
    merged = []
    for start in range(0, len(pairs), width):
        finite = [pair for pair in pairs[start : start + width] if math.isfinite(pair[0] + pair[1])]
        lows, highs = zip(*finite, strict=True) if finite else ([nan], [nan])
        merged.append([min(lows), max(highs)])
    return merged


# merge the columns of two buckets: five sums, the lowest and the highest value
_MERGES: Sequence[Callable[[float, float], float]] = (*[operator.add] * 5, min, max)


class MetricSeries:
    """One metric of one rank, as a row of buckets; the last bucket is open.

    If a step moves back, a new loop has started: the count continues upwards, so that no value is
    lost. After :meth:`resume`, repeated steps replace the earlier ones instead, unless the step had
    moved back before.

    Attributes:
        last: the newest value.
        step: the newest step; NaN if there is none.
        step_count: number of steps, repeated steps included.
        timed_steps: number of steps that followed another step without a pause.
        seconds: total duration of the timed steps.
        rate: estimates the step rate, if this metric is the first of its reports.
    """

    def __init__(self) -> None:
        self.last = self.step = nan
        self.step_count = self.timed_steps = 0
        self.seconds = 0.0
        self.rate: RateEstimator | None = None
        self._columns = [array("d") for _ in _MERGES]
        self._times, self._steps, self._totals, self._counts = self._columns[:4]
        self._nonfinite, self._lows, self._highs = self._columns[4:]
        self._width = 1  # values of a bucket before the next step opens another
        self._at = nan  # time of the newest step, NaN after a pause
        self._stride = 1.0  # from one step to the next
        self._offset = 0.0  # the count minus the step
        self._has_fallen = self._is_resuming = self._is_following = False
        self._resume_points: deque[float] = deque(maxlen=MAX_RESUMES)

    def add(self, at: float, step: float | None, value: float) -> None:
        """Add a value to the bucket of its step. Without a step, use the next one."""
        if step is None:
            step = 0.0 if math.isnan(self.step) else self.step + 1.0
        if step != self.step or self._is_resuming or self._is_following:
            self._start_step(at, step)
        self._times[-1] += at
        self._steps[-1] += step + self._offset
        self.last = value
        if not -MAX_FINITE < value < MAX_FINITE:  # true for NaN
            self._nonfinite[-1] += 1
            return
        self._totals[-1] += value
        self._counts[-1] += 1
        self._lows[-1] = min(self._lows[-1], value)
        self._highs[-1] = max(self._highs[-1], value)

    def fill(self, times: Sequence[float], steps: Sequence[float], values: Sequence[float]) -> None:
        """Add the first values, if :func:`_can_fill`: a whole run in a tenth of the time."""
        count = len(values)
        while math.ceil(count / self._width) > MAX_BUCKETS:
            self._width *= 2
        parts = [slice(start, start + self._width) for start in range(0, count, self._width)]
        for column, whole in zip(self._columns, (times, steps, values), strict=False):
            column.extend([sum(whole[part]) for part in parts])
        self._counts.extend([len(values[part]) for part in parts])
        self._nonfinite.extend([0] * len(parts))
        self._lows.extend([min(values[part]) for part in parts])
        self._highs.extend([max(values[part]) for part in parts])
        self.last, self.step, self._at = values[-1], float(steps[-1]), times[-1]
        self._stride = float(steps[-1] - steps[-2]) if count > 1 else 1.0
        self.step_count, self.timed_steps = count, count - 1
        self.seconds = max(0.0, times[-1] - times[0])

    def resume(self) -> None:
        """Expect the next value from another attempt at the same work."""
        self._is_resuming = not math.isnan(self.step)

    def follow(self, other: MetricSeries) -> None:
        """Expect the next value from another cell: continue the count of another rank."""
        if not self._is_resuming:
            self._is_following = True
            self.step, self._stride, self._offset = other.step, other._stride, other._offset
            self._has_fallen = self._has_fallen or other._has_fallen

    def curve(self) -> Curve:
        """Return the buckets as a curve."""
        counts = self._counts
        if counts.count(1.0) == len(counts) and not any(self._nonfinite):
            mean = low = high = tuple(self._totals)  # the usual case: every bucket is one value
            sizes = counts
        else:
            sizes = array("d", map(operator.add, counts, self._nonfinite))
            low = tuple(nan if end == inf else end for end in self._lows)
            high = tuple(nan if end == -inf else end for end in self._highs)
            # rounding, and sums that overflow, must not take a mean out of its bucket
            buckets = zip(self._totals, counts, low, high, strict=True)
            mean = tuple(
                min(max(total / count, at_least), at_most) if count else nan
                for total, count, at_least, at_most in buckets
            )
        return Curve(
            times=tuple(map(operator.truediv, self._times, sizes)),
            steps=tuple(map(operator.truediv, self._steps, sizes)),
            mean=mean,
            low=low,
            high=high,
            nonfinite=tuple(map(int, self._nonfinite)),
            last=self.last,
            resume_points=tuple(self._resume_points),
        )

    def _start_step(self, at: float, step: float) -> None:
        self._is_following = False
        if self._is_resuming:
            self._resume_at(step)
        elif step < self.step:
            self._continue_count(step)
            self._has_fallen = True
        elif step > self.step:  # false for the first step, after NaN
            self._stride = step - self.step
        self.step_count += 1
        if at >= self._at:  # false after a pause, and if the clock was set back
            self.timed_steps += 1
            self.seconds += at - self._at
        self.step, self._at = step, at
        if not self._counts or self._counts[-1] + self._nonfinite[-1] >= self._width:
            self._open_bucket()

    def _continue_count(self, step: float) -> None:
        self._offset += self.step + self._stride - step

    def _resume_at(self, step: float) -> None:
        self._is_resuming, self._at = False, nan
        if step <= self.step and self._has_fallen:
            self._continue_count(step)
        elif step <= self.step:
            counts, steps = self._counts, self._steps
            while counts and steps[-1] >= step * (counts[-1] + self._nonfinite[-1]):
                for column in self._columns:
                    column.pop()
            self._width = self._width if counts else 1
            while self._resume_points and self._resume_points[-1] > step:
                self._resume_points.pop()
        self._resume_points.append(step + self._offset)

    def _open_bucket(self) -> None:
        if len(self._counts) >= MAX_BUCKETS:
            for column, merge in zip(self._columns, _MERGES, strict=True):
                column[:] = array("d", map(merge, column[::2], column[1::2]))
            self._width *= 2
        for column, value in zip(self._columns, (0, 0, 0, 0, 0, inf, -inf), strict=True):
            column.append(value)


def _can_fill(steps: Sequence[float], values: Sequence[float]) -> bool:
    """Return whether the steps ascend and all values are finite."""
    is_ascending = all(map(operator.lt, steps, steps[1:]))
    is_small = steps[0] >= -MAX_STEP and steps[-1] <= MAX_STEP
    are_finite = (
        min(values) > -MAX_FINITE and max(values) < MAX_FINITE and math.isfinite(sum(values))
    )
    return is_ascending and is_small and are_finite


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The metrics at one moment.

    Attributes:
        versions: version of each metric, in the order of the first reports; each value changes it.
        curves: curves by rank of each metric that changed since the known version.
        hidden: number of metrics without a curve.
        hidden_names: the names of hidden metrics, as far as they are known.
    """

    versions: Mapping[str, int]
    curves: Mapping[str, Mapping[int, Curve]]
    hidden: int
    hidden_names: tuple[str, ...] = ()


class MetricStore:
    """Keeps a series for each name and rank. One thread adds; any thread may read.

    Only the first 64 names have series. Other names are counted, up to 10,000.

    Attributes:
        began: the first ``time.time()`` of a report.
        ended: the last one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = 0
        self._series: dict[str, dict[int, MetricSeries]] = {}
        self._versions: dict[str, int] = {}
        self._furthest: dict[str, MetricSeries] = {}  # for ranks that begin in a later cell
        self._dropped: set[str] = set()
        self.began, self.ended = inf, -inf

    @property
    def dropped_names(self) -> int:
        """Number of names without a series."""
        return len(self._dropped)

    def add(self, rank: int, at: float, step: float | None, values: Mapping[str, float]) -> None:
        """Add the values that a rank reported for a step, at its ``time.time()``.

        Without a step, each name counts its own steps.
        """
        if step is not None:  # any integer
            step = float(min(MAX_STEP, max(-MAX_STEP, step)))
        first: MetricSeries | None = None
        with self._lock:
            self._version += 1
            self.began, self.ended = min(self.began, at), max(self.ended, at)
            for name, value in values.items():
                ranks = self._series.get(name)
                if ranks is None and (ranks := self._new_metric(name)) is None:
                    continue
                series = ranks.get(rank)
                if series is None:
                    series = ranks[rank] = MetricSeries()
                    if name in self._furthest:
                        series.follow(self._furthest[name])
                series.add(at, step, value)
                first = first or series
                self._versions[name] = self._version
            if first is not None:
                first.rate = first.rate or RateEstimator()
                first.rate.add(at, first.step)

    def extend(
        self,
        rank: int,
        name: str,
        times: Sequence[float],
        steps: Sequence[float | None],
        values: Sequence[float],
    ) -> None:
        """Add all values that a rank reported under a name, in order."""
        given = [step for step in steps if step is not None]
        is_new = rank not in self._series.get(name, {}) and name not in self._furthest
        if not (is_new and len(given) == len(steps) and _can_fill(given, values)):
            for at, step, value in zip(times, steps, values, strict=True):
                self.add(rank, at, step, {name: value})
            return
        with self._lock:
            ranks = self._series.get(name) or self._new_metric(name)
            if ranks is None:
                return
            self._version = self._versions[name] = self._version + 1
            self.began, self.ended = min(self.began, *times), max(self.ended, *times)
            series = ranks[rank] = MetricSeries()
            series.fill(times, given, values)
            series.rate = RateEstimator()
            newest = slice(bisect_left(times, times[-1] - 2 * RATE_WINDOW), None)
            for at, step in zip(times[newest], given[newest], strict=True):
                series.rate.add(at, step)

    def resume(self) -> None:
        """Expect the next values from another attempt at the same work."""
        with self._lock:
            self._furthest.clear()
            for ranks in self._series.values():
                for series in ranks.values():
                    series.resume()

    def begin_cell(self, name: str) -> None:
        """Expect the next values of a metric from another cell.

        If a step moves back, the count of each rank continues after the rank that is furthest
        ahead, so that a rank without values in the earlier cells does not begin beside them.
        """
        with self._lock:
            ranks = self._series.get(name, {}).values()
            if ranks:
                self._furthest[name] = copy(max(ranks, key=lambda each: each.step + each._offset))
            for series in ranks:
                series.follow(self._furthest[name])

    def clear(self) -> None:
        """Remove all metrics."""
        with self._lock:
            self._version += 1
            self._series.clear()
            self._furthest.clear()
            self._versions.clear()
            self._dropped.clear()
            self.began, self.ended = inf, -inf

    def snapshot(
        self,
        sent: Mapping[str, int] | None = None,
        *,
        most: int,
        chosen: Collection[str] | None = None,
    ) -> MetricsSnapshot:
        """Return the chosen metrics, or the first ``most``.

        Only metrics that changed since the ``sent`` versions have their curves.
        """
        names, sent = self.names(), sent or {}
        selected = names[:most] if chosen is None else [name for name in names if name in chosen]
        shown = {name: self._versions.get(name, 0) for name in selected}
        return MetricsSnapshot(
            versions=shown,
            curves={name: self.curves(name) for name, at in shown.items() if sent.get(name) != at},
            hidden=len(names) - len(selected) + self.dropped_names,
            hidden_names=tuple(name for name in names if name not in shown),
        )

    def names(self) -> list[str]:
        """Return the names of the metrics in the order of their first reports.

        Speeds and epochs come last, because the first ones are drawn.
        """
        with self._lock:
            return sorted(
                self._series, key=lambda name: name == "epoch" or name.endswith("_per_second")
            )

    def series(self, name: str) -> dict[int, MetricSeries]:
        """Return the series of each rank that reported this metric, in order of rank."""
        with self._lock:
            return dict(sorted(self._series.get(name, {}).items()))

    def curves(self, name: str) -> dict[int, Curve]:
        """Return the curve of each rank that reported this metric."""
        curves = {}
        for rank, series in self.series(name).items():
            with self._lock:  # for one rank at a time, so that the adding thread waits briefly
                curves[rank] = series.curve()
        return curves

    def last(self, name: str) -> dict[int, float]:
        """Return the newest value of each rank that reported this metric."""
        return {rank: series.last for rank, series in self.series(name).items()}

    def step_rate(self, rank: int) -> StepRate | None:
        """Return the step and step rate of a rank; None if it reported no metrics.

        Loops that count different things, such as batches and epochs, are kept separate. The
        fastest loop that made a step in the last seconds counts.
        """
        with self._lock:
            rates = [
                series.rate.rate(name)
                for name, ranks in self._series.items()
                if (series := ranks.get(rank)) is not None and series.rate is not None
            ]
        newest = max((rate.at for rate in rates), default=0.0)
        recent = [rate for rate in rates if newest - rate.at <= RATE_WINDOW]
        return max(recent, key=lambda rate: rate.per_second, default=None)

    def _new_metric(self, name: str) -> dict[int, MetricSeries] | None:
        if len(self._series) < MAX_NAMES:
            return self._series.setdefault(name, {})
        if len(self._dropped) < MAX_DROPPED:
            self._dropped.add(name)
        return None


@dataclass(frozen=True, slots=True)
class _MetricTotals:
    steps: int = 0  # of the rank with the most
    timed_steps: int = 0  # of all ranks
    seconds: float = 0.0
    last: Mapping[int, float] = field(default_factory=dict)
    curve: Pairs = ()


class RunTotals:
    """Totals over all cells of a run, for ``run.json``.

    Repeated steps count again. Pauses between cells are no training time.
    """

    def __init__(self) -> None:
        self._of_ended_cells: dict[str, _MetricTotals] = {}

    def add(self, cell: MetricStore) -> None:
        """Add the metrics of a cell that ended."""
        self._of_ended_cells = self._with(cell)

    def facts(self, cell: MetricStore | None = None) -> dict[str, Any]:
        """Return the totals, with the metrics of the running cell; empty if there are none."""
        totals = self._with(cell) if cell is not None else self._of_ended_cells
        if not totals:
            return {}
        loop = max(totals.values(), key=lambda metric: metric.steps)
        return {
            "steps": loop.steps,
            "steps_per_second": round(loop.timed_steps / loop.seconds, 4) if loop.seconds else None,
            "last": {name: spread(metric.last) for name, metric in totals.items()},
            "curves": {name: metric.curve for name, metric in totals.items()},
        }

    def _with(self, cell: MetricStore) -> dict[str, _MetricTotals]:
        totals = dict(self._of_ended_cells)
        for name in cell.names():
            if name not in totals and len(totals) >= MAX_NAMES:
                continue
            before, series = totals.get(name, _MetricTotals()), cell.series(name)
            all_series = series.values()
            totals[name] = _MetricTotals(
                steps=before.steps + max(each.step_count for each in all_series),
                timed_steps=before.timed_steps + sum(each.timed_steps for each in all_series),
                seconds=before.seconds + sum(each.seconds for each in all_series),
                last={**before.last, **{rank: each.last for rank, each in series.items()}},
                curve=_coarse([*before.curve, *series[min(series)].curve().coarse()]),
            )
        return totals


def spread(last: Mapping[int, float]) -> dict[str, float]:
    """Return mean, lowest and highest over ranks; all equal if a value is not finite."""
    values = [*last.values()]
    nonfinite = [value for value in values if not math.isfinite(value)]
    if nonfinite:
        return dict.fromkeys(("mean", "low", "high"), nonfinite[0])
    mean = sum(value / len(values) for value in values)  # the sum of the values may overflow
    return {"mean": mean, "low": min(values), "high": max(values)}
