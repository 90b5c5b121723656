"""All numbers of a run in columns, by metric and rank: read once, for any axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nbddp.record.series import HUGE, Curve
from nbddp.record.tally import SmallCurve

NOT_NUMBERS = frozenset({"time", "rank", "attempt", "step"})

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A metric of one rank: when it was reported, at which step (NaN: none was given), and it."""

    times: Sequence[float]
    steps: Sequence[float]
    values: Sequence[float]

    @property
    def ascends(self) -> bool:
        """Whether every value has a step of its own, above the one before."""
        return all(one < other for one, other in pairwise(self.steps)) and self.steps[0] > -HUGE

    def curve(self, places: Sequence[float]) -> Curve:
        """The values at these places, each a point of its own."""
        lost = tuple(not -HUGE < value < HUGE for value in self.values)
        values = tuple(self.values)
        if any(lost):
            known = zip(self.values, lost, strict=True)
            values = tuple(math.nan if is_lost else value for value, is_lost in known)
        counts = tuple(map(int, lost))
        return Curve(tuple(places), values, values, values, counts, self.values[-1])


class Numbers:
    """The columns of a run's rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        groups: dict[tuple[int, tuple[str, ...]], list[Row]] = {}
        for row in rows:
            groups.setdefault((row["rank"], tuple(row)), []).append(row)
        parts: dict[str, dict[int, list[list[Row]]]] = {}
        for (rank, names), group in groups.items():
            for name in names:
                if name not in NOT_NUMBERS:
                    parts.setdefault(name, {}).setdefault(rank, []).append(group)
        self._columns = {
            name: {rank: _column(name, by_rank[rank]) for rank in sorted(by_rank)}
            for name, by_rank in parts.items()
        }
        self.began = min((row["time"] for row in rows), default=0.0)
        self.ended = max((row["time"] for row in rows), default=0.0)

    def names(self) -> list[str]:
        """The metrics that there are, in the order in which they came."""
        return list(self._columns)

    def last(self, name: str) -> dict[int, float]:
        """The newest value of each rank."""
        return {rank: column.values[-1] for rank, column in self._columns.get(name, {}).items()}

    def small_curve(self, name: str) -> list[list[float]]:
        """One rank's lowest and highest values along the run, 48 pairs at most."""
        curve = SmallCurve()
        columns = self._columns.get(name, {})
        for value in columns[min(columns)].values if columns else ():
            curve.add(value)
        return curve.pairs()

    def by_time(self, name: str) -> dict[int, Curve]:
        """The curve of each rank, over the seconds since the first number of the run."""
        began = self.began
        return {
            rank: column.curve([at - began for at in column.times])
            for rank, column in self._columns.get(name, {}).items()
        }

    def by_step(self, name: str) -> dict[int, Curve] | None:
        """The same over steps; None where they do not ascend, so that they must be counted on."""
        columns = self._columns.get(name, {})
        if not all(column.ascends for column in columns.values()):
            return None
        return {rank: column.curve(column.steps) for rank, column in columns.items()}


def _column(name: str, groups: Sequence[Sequence[Row]]) -> Column:
    rows: Sequence[Row] = groups[0]
    if len(groups) > 1:  # it is reported with others sometimes, and alone at other times
        rows = sorted((row for group in groups for row in group), key=lambda row: row["time"])
    return Column(
        [row["time"] for row in rows],
        [float(row.get("step", math.nan)) for row in rows],
        [row[name] for row in rows],
    )
