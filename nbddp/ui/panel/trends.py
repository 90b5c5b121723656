"""What became of each rank's pace and memory, as small curves beside the numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nbddp.charts.palette import rank_class, rank_color
from nbddp.formatting import format_bytes
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.panel.html import escape, svg_source
from nbddp.ui.report.rank_table import Curves, DrawCurve
from nbddp.ui.words import say_seconds

POINTS = 40  # of a small curve
PERIOD = 1.0  # seconds between two of them
_WIDTH, _HEIGHT = 32, 14
_SIZE = f'width="{_WIDTH}" height="{_HEIGHT}"'
_STEPS, _CPU, _LOAD = "steps per second", "CPU in percent", "GPU in percent"


class Whole:
    """Values from the first to the last; where they are many, the highest of each few."""

    def __init__(self) -> None:
        self.each = 1  # so many values are a point
        self._points: list[float] = []
        self._open: list[float] = []

    def add(self, value: float) -> None:
        """The next value."""
        self._open.append(value)
        if len(self._open) < self.each:
            return
        self._points.append(max(self._open))
        self._open = []
        if len(self._points) == POINTS:
            self._points = [max(pair) for pair in list(pairwise(self._points))[::2]]
            self.each *= 2

    @property
    def points(self) -> list[float]:
        """The curve; it ends in the newest value."""
        return [*self._points, *self._open[-1:]]

    @property
    def seconds(self) -> float:
        """From the first value to the last."""
        return (len(self._points) * self.each + len(self._open) - 1) * PERIOD


@dataclass(slots=True)
class _Rank:
    """The curves of a rank."""

    kind: str = ""  # what ``pace`` is of
    pace: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))
    memory: Whole = field(default_factory=Whole)
    gpu_memory: Whole = field(default_factory=Whole)

    def note(self, each: RankSnapshot) -> None:
        kind, value = _telling(each)
        if kind != self.kind:
            self.kind = kind
            self.pace.clear()
        self.pace.append(value)
        for whole, used in ((self.memory, each.memory), (self.gpu_memory, each.gpu_memory)):
            if used:
                whole.add(used)


class Trends:
    """The curves of a few ranks: their pace, or else their use of GPU or CPU, and their memory."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._next = 0.0

    def note(self, ranks: Sequence[RankSnapshot], now: float) -> None:
        """Take a point of each, now and then."""
        if now < self._next:
            return
        self._next = now + PERIOD
        for each in ranks:
            if each.is_alive:
                self._ranks.setdefault(each.rank, _Rank()).note(each)

    def columns(self, *, is_kept: bool = False) -> Curves:
        """What draws them, by the title of the table's column that they stand in.

        ``is_kept``: for a record, which other pages show, too.
        """
        blank = _blank(is_kept=is_kept)

        def pace(kind: str) -> DrawCurve:
            return self._aligned(lambda rank: self._pace(rank, kind, is_kept=is_kept), blank)

        def memory(name: str) -> DrawCurve:
            return self._aligned(lambda rank: self._memory(rank, name, is_kept=is_kept), blank)

        gpu = pace(_LOAD), memory("GPU memory")
        return {
            "step": pace(_STEPS),
            "CPU": pace(_CPU),
            "memory": memory("memory"),
            "GPU": lambda each: " ".join(filter(None, (draw(each) for draw in gpu))),
        }

    def _aligned(self, draw: Callable[[int], str], blank: str) -> DrawCurve:
        """Where some rank has a curve, one that has none gets its room: all numbers are in line."""
        room = blank if any(map(draw, self._ranks)) else ""
        return lambda each: draw(each.rank) or room

    def _pace(self, rank: int, kind: str, *, is_kept: bool) -> str:
        known = self._ranks.get(rank, _Rank())
        if known.kind != kind or len(known.pace) < 2:
            return ""
        values = list(known.pace)
        said = _say(kind, f"{values[-1]:.3g}", f"{max(values):.3g}", (len(values) - 1) * PERIOD)
        return _curve(rank, values, said, is_kept=is_kept)

    def _memory(self, rank: int, name: str, *, is_kept: bool) -> str:
        known = self._ranks.get(rank, _Rank())
        whole = known.memory if name == "memory" else known.gpu_memory
        values = whole.points
        if len(values) < 2:
            return ""
        said = _say(name, format_bytes(values[-1]), format_bytes(max(values)), whole.seconds)
        return _curve(rank, values, said, is_kept=is_kept)


def _say(name: str, now: str, top: str, seconds: float) -> str:
    """What a curve shows, with its scale."""
    return f"{name}: now {now}, axis 0 to {top}, over {say_seconds(seconds)}"


def _curve(rank: int, values: Sequence[float], said: str, *, is_kept: bool) -> str:
    """A curve in a colour that fits the page, and what it shows where the mouse rests.

    In a record it is there a second time, as an image, for a page that takes SVG away: without our
    style sheet, that one is seen.
    """
    said = escape(said)
    drawn = (
        f'<svg class="{rank_class(rank)}" style="color:{rank_color(rank)}" role="img"'
        f' aria-label="{said}" {_SIZE}>{_line(values, "currentColor")}</svg>'
    )
    if is_kept:
        drawn += _image(_line(values, rank_color(rank)), said)
    return f'<span title="{said}">{drawn}</span>'


def _blank(*, is_kept: bool) -> str:
    """The room of a curve, with nothing in it."""
    return f'<svg aria-hidden="true" {_SIZE}></svg>' + (_image("", "") if is_kept else "")


def _image(drawn: str, said: str) -> str:
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" {_SIZE}>{drawn}</svg>'
    return f'<img alt="{said}" {_SIZE} src="{svg_source(picture)}">'


def _line(values: Sequence[float], color: str) -> str:
    top = max(*values, 1e-9)
    step = _WIDTH / (len(values) - 1)
    points = " ".join(
        f"{at * step:.1f},{_HEIGHT - 1 - value / top * (_HEIGHT - 2):.1f}"
        for at, value in enumerate(values)
    )
    return f'<path d="M{points}" fill="none" stroke="{color}" stroke-width="1.5"></path>'


def _telling(each: RankSnapshot) -> tuple[str, float]:
    if each.step is not None:
        return _STEPS, each.steps_per_second
    if each.gpu_use.load >= 0:
        return _LOAD, each.gpu_use.load
    return _CPU, max(0.0, each.cpu)
