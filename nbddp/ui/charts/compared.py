"""A metric of several runs in one chart: each run a line, with a band over its ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nbddp.archive.comparing import Compared, Comparison, Mark, Over
from nbddp.charts.palette import rank_class, rank_color
from nbddp.formatting import plural
from nbddp.ui.charts.drawing import COARSE, RESTART, Sheet, draw_axes, draw_band, draw_lost
from nbddp.ui.charts.frame import Frame, Scale
from nbddp.ui.charts.lines import Line, lines_of, mean, newest, spread
from nbddp.ui.charts.scale import say_number

HEAL = "#2e9e44"
LETTERS = "ABCDEFGH"
UNITS = {Over.SAMPLES: "samples", Over.TIME: "s"}
UNIT_ROOM = 52.0  # CSS pixels for the longest of them


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run in the chart.

    Attributes:
        index: the run's place, which its colour goes by.
        line: the mean over its ranks; ``ranks`` are those.
        marks: where it was taken up again: on the axis, and whether it was healed.
        last: the mean of the newest values.
    """

    index: int
    line: Line
    ranks: tuple[Line, ...]
    marks: tuple[tuple[float, bool], ...]
    last: float | None

    @property
    def letter(self) -> str:
        """By which the run goes."""
        return LETTERS[self.index]


@dataclass(frozen=True, slots=True)
class ComparedChart:
    """A metric of all runs, ready to be drawn."""

    name: str
    over: Over
    runs: tuple[RunLine, ...]
    frame: Frame

    @classmethod
    def of(
        cls, comparison: Comparison, name: str, over: Over, scale: Scale = Scale.AUTO
    ) -> ComparedChart:
        """The chart of a metric; runs that have none of it have no line."""
        runs = [
            found
            for index, run in enumerate(comparison.runs)
            if (found := _line(index, run, name, over)) is not None
        ]
        lines = [line for run in runs for line in run.ranks]
        frame = Frame(lines, scale, is_time=over is Over.TIME)
        if over is not Over.STEP:
            frame.unit = UNITS[over]
            frame.left = max(frame.left, UNIT_ROOM)
        return cls(name, over, tuple(runs), frame)

    @property
    def facts(self) -> list[str]:
        """What has to be said of the picture: its scale, and what is not in it."""
        lost = self.frame.lost
        who = [run.letter for run in self.runs if any(line.lost.any() for line in run.ranks)]
        counted = plural(lost, "value")
        said = f"{counted} not finite ({', '.join(who)})" if lost else ""
        return [*filter(None, ["log scale" if self.frame.is_log else "", said])]

    def said(self) -> str:
        """All of it in words."""
        values = [f"{run.letter} {say_last(run)}" for run in self.runs]
        return f"{self.name} over {self.over.value}: {', '.join(values) or 'no values'}"


def say_last(run: RunLine) -> str:
    """The newest value in a few characters."""
    return "" if run.last is None else say_number(run.last)


def _line(index: int, run: Compared, name: str, over: Over) -> RunLine | None:
    curves = run.curves(name, over)
    ranks = [replace(each, restarts=()) for each in lines_of(curves).values()]
    if not ranks:
        return None
    line = ranks[0] if len(ranks) == 1 else mean(ranks)
    marks = tuple(
        (at, mark.kind == "heal") for mark in run.marks if (at := _at(mark, run, over)) is not None
    )
    return RunLine(index, line, tuple(ranks), marks, newest(ranks))


def _at(mark: Mark, run: Compared, over: Over) -> float | None:
    if over is Over.TIME:
        return mark.seconds
    if mark.step is None or over is Over.STEP:
        return mark.step
    return (mark.step + 1) * (run.samples_per_step or 0.0)


def draw_compared(sheet: Sheet, chart: ComparedChart, *, is_smooth: bool | None = None) -> None:
    """Draw all that is inside and beside the axes.

    Each run is a line, the mean over its ranks, with a band from their lowest to their highest
    value; where there are more values than pixels, the band has those that were put together, too.
    Values that are not finite are gaps with a red mark on top. A restart is an orange mark, a heal
    a green one.

    Args:
        sheet: what to draw on.
        chart: what to draw.
        is_smooth: whether smooth lines stand before faint ones; None for a page that may switch.
    """
    frame = chart.frame
    draw_axes(sheet, frame)
    draw_lost(sheet, frame, [line for run in chart.runs for line in run.ranks])
    grid = frame.grid(COARSE)
    for run in chart.runs:
        color = rank_color(run.index)
        with sheet.part(f"rank k{run.index} {rank_class(run.index)}"):
            around = run.ranks[0].thinned(grid) if len(run.ranks) == 1 else spread(run.ranks, grid)
            draw_band(sheet, frame, around, color)
            line = run.line.thinned(grid)
            xs, ys = frame.across(line.steps), frame.up(line.values)
            sheet.line(xs, ys, color=color, width=1.6, alpha=0.3 if is_smooth else 1.0)
            alone = _alone(ys)
            sheet.dots(xs[alone], ys[alone], color=color)
        _draw_marks(sheet, frame, run)
    if is_smooth is None:
        with sheet.part("smooth"):
            _draw_smooth(sheet, chart)
    elif is_smooth:
        _draw_smooth(sheet, chart)


def _draw_smooth(sheet: Sheet, chart: ComparedChart) -> None:
    frame = chart.frame
    for run in chart.runs:
        line = run.line.thinned(frame.grid(COARSE))
        xs, ys = frame.across(line.steps), frame.up(line.smoothed(frame.span))
        with sheet.part(f"tone k{run.index} {rank_class(run.index)}"):
            sheet.line(xs, ys, color=rank_color(run.index), width=2.0)


def _alone(ys: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[int]:
    """Points that no line would show: nothing is beside them."""
    is_there = [False, *np.isfinite(ys).tolist(), False]
    return [
        at - 1
        for at in range(1, len(is_there) - 1)
        if is_there[at] and not is_there[at - 1] and not is_there[at + 1]
    ]


def _draw_marks(sheet: Sheet, frame: Frame, run: RunLine) -> None:
    for at, is_heal in run.marks:
        [x] = frame.across(np.array([at]))
        if not frame.left <= x <= frame.right:
            continue
        color = HEAL if is_heal else RESTART
        sheet.line(np.full(2, x), np.array([frame.bottom, frame.top]), color=color, width=1.2)
        y = frame.top + 5
        foot = np.array([[x - 4, y], [x + 4, y], [x, y - 6]])
        sheet.shapes([foot], color=color, alpha=1.0)
        with sheet.part(f"rank k{run.index} {rank_class(run.index)}"):
            box = np.array([[x - 3, y + 1], [x + 3, y + 1], [x + 3, y + 4], [x - 3, y + 4]])
            sheet.shapes([box], color=rank_color(run.index), alpha=1.0)
