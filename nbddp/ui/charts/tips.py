"""What a chart tells at a place that is pointed at: the values of each rank at that step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite
from typing import TYPE_CHECKING

import numpy as np

from nbddp.ui.charts.drawing import MANY_RANKS, Chart
from nbddp.ui.charts.frame import Frame
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
    lines = list(chart.lines.values())
    return _columns(chart.frame, lines, lambda steps: _texts(chart, steps))


def tips_by_name(frame: Frame, lines: Mapping[str, Line]) -> list[Tip]:
    """The same for lines that go by a name."""
    if not lines:
        return []
    return _columns(frame, list(lines.values()), lambda steps: _named(frame, lines, steps))


def _columns(frame: Frame, lines: Sequence[Line], say: Callable[[Numbers], list[str]]) -> list[Tip]:
    steps = _steps(frame, lines)
    places = frame.across(steps)
    edges = np.concatenate([[frame.left], (places[1:] + places[:-1]) / 2, [frame.right]])
    texts = say(steps)
    columns = zip(edges.tolist(), np.diff(edges).tolist(), places.tolist(), texts, strict=False)
    return [Tip(left, width, place - left, text) for left, width, place, text in columns]


def _named(frame: Frame, lines: Mapping[str, Line], steps: Numbers) -> list[str]:
    values = {name: _values(line, steps, NEAR * frame.span) for name, line in lines.items()}
    return [
        "\n".join([_where(frame, step), *_of_each(values, at)])
        for at, step in enumerate(steps.tolist())
    ]


def _where(frame: Frame, step: float) -> str:
    return f"{say_number(step)} s" if frame.unit == "s" else f"{frame.unit} {step:.0f}"


def _of_each(values: Mapping[str, Sequence[float | None]], at: int) -> Iterator[str]:
    for name, known in values.items():
        value = known[at]
        if value is not None:
            yield f"{name}  {_say(value)}"


def _steps(frame: Frame, lines: Sequence[Line]) -> Numbers:
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    if len(steps) <= MAX_TIPS:
        return steps
    nearest = np.searchsorted(steps, frame.grid(MAX_TIPS)).clip(0, len(steps) - 1)
    return np.unique(steps[nearest])


def _texts(chart: Chart, steps: Numbers) -> list[str]:
    near = NEAR * chart.frame.span
    values = {rank: _values(line, steps, near) for rank, line in chart.lines.items()}
    means: list[float | None] = [None] * len(steps)
    if len(chart.lines) > 1 and chart.strong is not None:
        means = _values(chart.strong, steps, near)
    texts = []
    for at, (step, mean) in enumerate(zip(steps.tolist(), means, strict=True)):
        said = [] if mean is None else [f"mean  {_say(mean)}"]
        here = {rank: value for rank, each in values.items() if (value := each[at]) is not None}
        texts.append("\n".join([f"{chart.frame.unit} {step:.0f}", *said, *_rows(here)]))
    return texts


def _rows(here: Mapping[int, float]) -> list[str]:
    """Each rank; of many the lowest, the highest, and those that are not finite."""
    if len(here) <= MANY_RANKS:
        return [f"rank {rank}  {_say(value)}" for rank, value in here.items()]
    numbers = {rank: value for rank, value in here.items() if isfinite(value)}
    rows = []
    if numbers:
        low, high = min(numbers.values()), max(numbers.values())
        rows = [f"lowest  {_first(numbers, low)}", f"highest  {_first(numbers, high)}"]
    lost = len(here) - len(numbers)
    return [*rows, f"{lost} ranks {NOT_FINITE}"] if lost else rows


def _first(numbers: Mapping[int, float], wanted: float) -> str:
    """A value and the first rank that shows it, as far as one can read."""
    text = say_number(wanted)
    near = (rank for rank, value in numbers.items() if isclose(value, wanted, rel_tol=1e-3))
    return f"{text} (rank {next(rank for rank in near if say_number(numbers[rank]) == text)})"


def _values(line: Line, steps: Numbers, near: float) -> list[float | None]:
    """Its value at the nearest point to each step; None where none is near."""
    after = np.searchsorted(line.steps, steps).clip(0, len(line.steps) - 1)
    before = (after - 1).clip(0)
    is_before = np.abs(line.steps[before] - steps) < np.abs(line.steps[after] - steps)
    at = np.where(is_before, before, after)
    is_near = np.abs(line.steps[at] - steps) <= near
    found = zip(line.values[at].tolist(), is_near.tolist(), strict=True)
    return [value if is_there else None for value, is_there in found]


def _say(value: float) -> str:
    return say_number(value) if isfinite(value) else NOT_FINITE
