"""Small curves of the step rate and the memory of each rank, over the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nbddp.charts.sparkline import sparkline
from nbddp.formatting import format_bytes
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.panel.html import escape
from nbddp.ui.report.rank_table import Curves

POINTS = 60
PERIOD = 1.0  # seconds between two points
WIDTH = 32  # CSS pixels


class RankSparklines:
    """Keeps the step rates and the memory of a few ranks."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], deque[float]] = {}
        self._next = 0.0

    def note(self, ranks: Sequence[RankSnapshot], now: float) -> None:
        """Take a point of each, once a second."""
        if now < self._next:
            return
        self._next = now + PERIOD
        for each in ranks:
            if each.is_alive and each.step is not None:
                self._add(each.rank, "step", each.steps_per_second)
            if each.is_alive and each.memory:
                self._add(each.rank, "memory", each.memory)

    def _add(self, rank: int, title: str, value: float) -> None:
        self._values.setdefault((rank, title), deque(maxlen=POINTS)).append(value)

    def columns(self, *, is_static: bool = False) -> Curves:
        """Return the functions that draw the curves, by the column of the rank table.

        ``is_static``: for a record, which pages without SVG may show.
        """

        def drawn(each: RankSnapshot, title: str) -> str:
            values = list(self._values.get((each.rank, title), ()))
            if len(values) < 2:
                return ""
            label = escape(_label(title, values))
            return sparkline(
                values, label, color=each.rank, low=0.0, width=WIDTH, is_static=is_static
            )

        return {
            "step": lambda each: drawn(each, "step"),
            "memory": lambda each: drawn(each, "memory"),
        }


def _label(title: str, values: Sequence[float]) -> str:
    """Describe a curve, with its scale."""
    name, now, top = "steps per second", f"{values[-1]:.3g}", f"{max(values):.3g}"
    if title == "memory":
        name, now, top = "memory", format_bytes(values[-1]), format_bytes(max(values))
    return f"{name}: now {now}, axis 0 to {top}, last {len(values)} s"
