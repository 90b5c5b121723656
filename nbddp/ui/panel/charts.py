"""The charts of a cell's metrics: drawn on a thread of their own, and only when there is news."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextvars import copy_context
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from nbddp.interrupts import begin
from nbddp.record.metrics import Curve, MetricsSnapshot
from nbddp.ui.panel.budget import Budget
from nbddp.ui.words import say_left_out

if TYPE_CHECKING:
    from nbddp.ui.charts.frame import Scale
    from nbddp.ui.panel.charthtml import Drawn

logger = logging.getLogger(__name__)

MAX_CHARTS = 12  # unless others are chosen
MAX_NAMED = 20  # metrics without a chart that are named
LOOK_PERIOD = 0.5  # seconds between two looks for news
MAX_PAUSE = 5.0  # seconds; many ranks and metrics are shown all the same
SHARE = 0.015  # of a core goes into drawing: the ranks need it, and charts are not read in haste


class Take(Protocol):
    """Gives the metrics as they are now."""

    def __call__(
        self, known: Mapping[str, int], /, *, most: int, chosen: Collection[str] | None
    ) -> MetricsSnapshot:
        """The chosen ones, or the first ``most``; with the curves of those that are not known."""


class Charts:
    """Keeps the newest picture of each metric; ``show`` gets each as it is drawn.

    ``take`` is asked for the metrics, with the curves of those that changed since a version.

    Attributes:
        chosen: the names of those that are drawn; None for the first few.
    """

    def __init__(
        self,
        take: Take,
        show: Callable[[Drawn], None],
        *,
        chosen: Collection[str] | None = None,
    ) -> None:
        self._take = take
        self._show = show
        self.chosen = chosen
        self._scale: Scale | None = None
        self._metrics = MetricsSnapshot({}, {}, 0)
        self._drawn: dict[str, int] = {}  # the version of each that was shown
        self._kept: dict[str, tuple[object, Drawn]] = {}
        self._failed: dict[str, str] = {}
        self._over = threading.Event()
        self._nudge = threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._draw_news,), name="nbddp-charts", daemon=True
        )

    def draw_on_thread(self) -> None:
        """Begin to draw what comes."""
        begin(self._thread)

    @property
    def names(self) -> list[str]:
        """The metrics that can be chosen from, those that are drawn first."""
        return [*self._metrics.versions, *self._metrics.others]

    def choose(self, *, scale: Scale | None = None, chosen: Collection[str] | None = None) -> None:
        """Draw on another scale, or other metrics; what is None stays. Any thread may ask."""
        if scale is not None:
            self._scale, self._drawn = scale, {}
        if chosen is not None:
            self.chosen = chosen
        self._nudge.set()

    def finish(self) -> list[Drawn]:
        """Draw what is to be kept, for the last time: the charts, in the order of the names.

        These are not shown any more: what showed them is about to be replaced.
        """
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        if not self._look({}).versions:
            return []
        from nbddp.ui.panel.charthtml import kept_chart

        for name, curves in self._metrics.curves.items():
            seen = self._metrics.versions[name], self._scale
            if name not in self._kept or self._kept[name][0] != seen:
                drawn = self._draw(kept_chart, name, curves)
                if drawn is not None:
                    self._kept[name] = seen, drawn
        return [self._kept[name][1] for name in self._metrics.versions if name in self._kept]

    def stop(self) -> None:
        """Draw no more."""
        self._over.set()
        self._nudge.set()

    def note(self) -> str:
        """Return a word on metrics that have no chart; empty if all have one."""
        said = [f"{name} could not be drawn: {why}" for name, why in self._failed.items()]
        if self._metrics.left_out:
            said.append(_say_left_out(self._metrics))
        return "; ".join(said)

    def _draw_news(self) -> None:
        budget, pause = Budget(SHARE, least=LOOK_PERIOD, most=MAX_PAUSE), 0.0
        while not self._is_over_after(pause):
            pause = budget.pause(self._look_and_draw())

    def _is_over_after(self, pause: float) -> bool:
        """Wait until it is time to look again, or somebody chose something."""
        self._nudge.wait(pause)
        if not self._over.is_set():
            self._nudge.clear()
        return self._over.is_set()

    def _look_and_draw(self) -> float:
        """Draw what has changed: the CPU seconds that it took."""
        began = time.thread_time()
        drawn = self._drawn  # another one, if another scale is chosen meanwhile
        news = self._look(drawn)
        if news.curves:
            began += _load_drawing()
            self._refresh(news, drawn)
        return time.thread_time() - began

    def _refresh(self, news: MetricsSnapshot, drawn: dict[str, int]) -> None:
        from nbddp.ui.panel.charthtml import live_chart

        for name, curves in news.curves.items():
            if self._over.is_set():
                return
            chart = self._draw(live_chart, name, curves)
            if chart is not None:
                drawn[name] = news.versions[name]
                self._show(chart)

    def _look(self, known: Mapping[str, int]) -> MetricsSnapshot:
        self._metrics = self._take(known, most=MAX_CHARTS, chosen=self.chosen)
        return self._metrics

    def _draw(
        self, draw: Callable[..., Drawn], name: str, curves: Mapping[int, Curve]
    ) -> Drawn | None:
        """Draw one metric; where that fails, the others and the record still come."""
        if name in self._failed:
            return None
        try:
            return draw(name, curves) if self._scale is None else draw(name, curves, self._scale)
        except Exception as error:
            logger.exception("the chart of %r could not be drawn", name)
            self._failed[name] = f"{type(error).__name__}: {error}"
            return None


def _load_drawing() -> float:
    """Load NumPy, once: the CPU seconds of it, which are no drawing."""
    began = time.thread_time()
    import_module("nbddp.ui.panel.charthtml")
    return time.thread_time() - began


def _say_left_out(metrics: MetricsSnapshot) -> str:
    return say_left_out(metrics.others[:MAX_NAMED], metrics.left_out, does="draws them")
