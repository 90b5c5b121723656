"""Ranks as rows, time across: when each computed, and when it waited; as a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nbddp.charts.palette import rank_color
from nbddp.record.spent import Timeline
from nbddp.ui.charts.drawing import ALERT, INK
from nbddp.ui.charts.paper import BOLD, Paper
from nbddp.ui.charts.scale import say_number
from nbddp.ui.rows import shown_ranks

WIDE = 860  # CSS pixels
LEFT, RIGHT, FOOT = 62, 12, 22
HEAD, NAMED = 24, 22  # above the rows; as much more where steps are named
ROW, BAR = 26, 16  # of a rank, and what is filled of it
# compute is light, waiting dark; all three have 3 to 1 against white and #111, or are behind them
COMPUTE, WAIT, DATA = ("#7b7b7b", 0.28), ("#b9690f", 1.0), ("#2f86dd", 0.9)
LEGEND = (
    ("computing, sending", COMPUTE),
    ("waiting for the last rank", WAIT),
    ("waiting for data", DATA),
)
MAX_FREED = 400  # thin lines from a last arrival to those it freed
MAX_MARKS = 24  # steps that are named
MAX_TICKS = 8


def draw_spans(line: Timeline) -> tuple[bytes, int]:
    """The picture, and how wide it is in CSS pixels."""
    ranks = shown_ranks(line)
    spans = _Spans(line, ranks)
    paper = Paper(WIDE, spans.height)
    spans.draw(paper)
    _write_legend(paper, spans.height, has_deaths=bool(line.died))
    return paper.png(), WIDE


class _Spans:
    def __init__(self, line: Timeline, ranks: Sequence[int]) -> None:
        self._line = line
        self._ranks = ranks
        self._head = HEAD + (NAMED if line.steps else 0)
        self.height = self._head + ROW * len(ranks) + FOOT
        self._scale = (WIDE - LEFT - RIGHT) / max(line.seconds, 1e-9)

    def draw(self, paper: Paper) -> None:
        """Draw all but the legend."""
        self._draw_steps(paper)
        self._draw_rows(paper)
        self._draw_freed(paper)
        self._draw_axis(paper)

    def _x(self, at: float) -> float:
        began, end = self._line.span
        return LEFT + (min(max(at, began), end) - began) * self._scale

    def _y(self, rank: int) -> float:
        """The middle of its row."""
        return self.height - self._head - ROW * (self._ranks.index(rank) + 0.5)

    def _draw_rows(self, paper: Paper) -> None:
        for rank in self._ranks:
            y = self._y(rank)
            color = rank_color(rank)
            paper.text(LEFT - 8, y - 4, f"rank {rank}", align="right", font=BOLD, color=color)
            kinds: dict[str, list[np.ndarray[tuple[int, int], np.dtype[np.float64]]]] = {}
            for kind, began, end in self._line.pieces(rank):
                kinds.setdefault(kind, []).append(_box(self._x(began), self._x(end), y))
            lived = self._x(self._line.died.get(rank, self._line.span[1]))
            whole = [_box(LEFT, lived, y)]
            for boxes, (color, alpha) in (
                (whole, COMPUTE),
                (kinds.get("data", []), DATA),
                (kinds.get("wait", []), WAIT),
            ):
                if boxes:
                    paper.shapes(boxes, color=color, alpha=alpha)
            if rank in self._line.died:
                _draw_cross(paper, lived, y)

    def _draw_freed(self, paper: Paper) -> None:
        """A thin line at each last arrival, to those who waited for it."""
        waited = sorted(
            (each for each in self._line.meetings if each.waited), key=lambda it: -it.waited
        )
        xs, ys = [], []
        for each in waited[:MAX_FREED]:
            freed = [self._y(rank) for rank, wait in each.waits.items() if self._has(rank, wait)]
            if freed and each.awaited in self._ranks:
                mine = self._y(each.awaited)
                xs += [self._x(each.at)] * 2 + [np.nan]
                ys += [min([mine, *freed]), max([mine, *freed]), np.nan]
        if xs:
            paper.line(np.array(xs), np.array(ys), width=0.8)

    def _has(self, rank: int, wait: float) -> bool:
        return bool(wait) and rank in self._ranks

    def _draw_steps(self, paper: Paper) -> None:
        steps = self._line.steps
        every = -(-len(steps) // MAX_MARKS)
        bottom, top = float(FOOT), self.height - self._head + 2.0
        free = 0.0
        for at, step in steps[:: max(1, every)]:
            x = self._x(at)
            paper.line(np.array([x, x]), np.array([bottom, top]), width=0.7, alpha=0.45)
            said = f"step {step:g}" if not free else f"{step:g}"
            if x >= free:
                paper.text(x, top + 3, said, align="center")
                free = x + paper.width_of(said) / 2 + 16

    def _draw_axis(self, paper: Paper) -> None:
        seconds = self._line.seconds
        unit, factor = ("ms", 1000.0) if seconds < 1 else ("s", 1.0)
        for at in _ticks(seconds * factor):
            x = LEFT + at / factor * self._scale
            paper.text(x, 6, f"{say_number(at)} {unit}", align="center")


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 on, few enough to be written."""
    least = max(most, 1e-6) / MAX_TICKS
    magnitude = 10.0 ** math.floor(math.log10(least))
    step = next(each for each in (1, 2, 5, 10) if each * magnitude >= least * (1 - 1e-9))
    return [number * step * magnitude for number in range(int(most / (step * magnitude)) + 1)]


def _box(left: float, right: float, y: float) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    right = max(right, left + 0.3)
    low, high = y - BAR / 2, y + BAR / 2
    return np.array([(left, low), (right, low), (right, high), (left, high)])


def _draw_cross(paper: Paper, x: float, y: float) -> None:
    """Where a rank died."""
    ends = np.array([x - 4, x + 4])
    for heights in (np.array([y - 4, y + 4]), np.array([y + 4, y - 4])):
        paper.line(ends, heights, width=1.8, color=ALERT)


def _write_legend(paper: Paper, height: int, *, has_deaths: bool) -> None:
    x, y = float(LEFT), height - 14.0
    for text, (color, alpha) in LEGEND:
        corners = np.array([(x, y - 1), (x + 11, y - 1), (x + 11, y + 9), (x, y + 9)])
        paper.shapes([corners], color=color, alpha=alpha)
        paper.text(x + 16, y, text)
        x += 16 + paper.width_of(text) + 18
    paper.line(np.array([x + 5, x + 5]), np.array([y - 2, y + 10]), width=0.8, color=INK)
    said = "the last one comes, the others go on"
    paper.text(x + 12, y, said)
    if has_deaths:
        x += 12 + paper.width_of(said) + 18
        _draw_cross(paper, x + 5, y + 4)
        paper.text(x + 14, y, "died")
