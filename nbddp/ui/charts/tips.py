"""What a chart tells at a place that is pointed at: the values of each rank at that step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nbddp.ui.charts.drawing import MANY_RANKS, Chart
from nbddp.ui.charts.lines import Line
from nbddp.ui.charts.scale import say_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

MAX_TIPS = 60  # places along a chart
NEAR = 0.03  # of the steps: a rank that has nothing so near is not told of
NOT_FINITE = "not finite"


@dataclass(frozen=True, slots=True)
class Tip:
    """A column over the chart, in CSS pixels, and what it tells of the step at ``at``."""

    left: float
    width: float
    at: float
    text: str


def tips(chart: Chart) -> list[Tip]:
    """From left to right; together they cover the chart."""
    if chart.strong is None:
        return []
    frame = chart.frame
    steps = _steps(chart)
    places = frame.across(steps)
    edges = np.concatenate([[frame.left], (places[1:] + places[:-1]) / 2, [frame.right]])
    texts = _texts(chart, steps)
    columns = zip(edges.tolist(), np.diff(edges).tolist(), places.tolist(), texts, strict=False)
    return [Tip(left, width, place - left, text) for left, width, place, text in columns]


def _steps(chart: Chart) -> Numbers:
    steps = np.unique(np.concatenate([line.steps for line in chart.lines.values()]))
    if len(steps) <= MAX_TIPS:
        return steps
    nearest = np.searchsorted(steps, chart.frame.grid(MAX_TIPS)).clip(0, len(steps) - 1)
    return np.unique(steps[nearest])


def _texts(chart: Chart, steps: Numbers) -> list[str]:
    near = NEAR * chart.frame.span
    values = {rank: _said(line, steps, near) for rank, line in chart.lines.items()}
    means = [""] * len(steps)
    if len(chart.lines) > 1 and chart.strong is not None:
        means = _said(chart.strong, steps, near)
    texts = []
    for at, step in enumerate(steps.tolist()):
        mean = [f"mean  {means[at]}"] if means[at] else []
        here = {rank: each[at] for rank, each in values.items() if each[at]}
        rows = [f"{chart.frame.unit} {step:.0f}", *mean, *_rows(here)]
        texts.append("\n".join(rows))
    return texts


def _rows(here: Mapping[int, str]) -> list[str]:
    """Each rank; of many the lowest, the highest, and those that are not finite."""
    if len(here) <= MANY_RANKS:
        return [f"rank {rank}  {text}" for rank, text in here.items()]
    numbers = {rank: float(text) for rank, text in here.items() if text != NOT_FINITE}
    rows = []
    if numbers:
        low, high = min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__)
        rows = [f"lowest  {here[low]} (rank {low})", f"highest  {here[high]} (rank {high})"]
    lost = len(here) - len(numbers)
    return [*rows, f"{lost} ranks {NOT_FINITE}"] if lost else rows


def _said(line: Line, steps: Numbers, near: float) -> list[str]:
    """Its value at the nearest point to each step; empty where none is near."""
    after = np.searchsorted(line.steps, steps).clip(0, len(line.steps) - 1)
    before = (after - 1).clip(0)
    is_before = np.abs(line.steps[before] - steps) < np.abs(line.steps[after] - steps)
    at = np.where(is_before, before, after)
    is_near = np.abs(line.steps[at] - steps) <= near
    said = zip(line.values[at].tolist(), is_near.tolist(), strict=True)
    return [_say(value) if is_there else "" for value, is_there in said]


def _say(value: float) -> str:
    return say_number(value) if np.isfinite(value) else NOT_FINITE
