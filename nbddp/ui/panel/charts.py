"""The charts of a cell's metrics: drawn on a thread of their own, and only when there is news."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import copy_context
from importlib import import_module
from typing import Protocol

from nbddp.record.curves import MetricsSnapshot
from nbddp.record.series import Curve
from nbddp.ui.panel.record import Chart

logger = logging.getLogger(__name__)

MAX_CHARTS = 12
LOOK_PERIOD = 0.5  # seconds between two looks for news
SHARE = 0.2  # of the time goes into drawing: the ranks need the cores
MAX_PAUSE = 2.0  # seconds; a machine that is busy shows the charts all the same


class Take(Protocol):
    """Gives the metrics as they are now."""

    def __call__(self, known: Mapping[str, int], /, *, most: int) -> MetricsSnapshot:
        """The first ``most``, with the curves of those whose version is not the known one."""


class Charts:
    """Keeps the newest picture of each metric; ``show`` gets each as it is drawn.

    ``take`` is asked for the metrics, with the curves of those that changed since a version.
    """

    def __init__(self, take: Take, show: Callable[[str, bytes], None]) -> None:
        self._take = take
        self._show = show
        self._metrics = MetricsSnapshot({}, {}, 0)
        self._drawn: dict[str, tuple[int, bytes]] = {}
        self._failed: dict[str, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._draw_news,), name="nbddp-charts", daemon=True
        )

    def draw_on_thread(self) -> None:
        """Begin to draw what comes."""
        self._thread.start()

    def finish(self) -> list[Chart]:
        """Draw what is not drawn yet, for the last time: the charts, in the order of the names.

        These are not shown any more: what showed them is about to be replaced.
        """
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._refresh()
        drawn = self._drawn
        return [(name, drawn[name][1]) for name in self._metrics.versions if name in drawn]

    def stop(self) -> None:
        """Draw no more."""
        self._over.set()

    def note(self) -> str:
        """A word on metrics that have no chart, or count on; empty if there is none."""
        said = [f"{name} could not be drawn: {why}" for name, why in self._failed.items()]
        if self._metrics.falls:
            said.append(_say_falls(self._metrics.falls))
        if self._metrics.left_out:
            said.append(f"{self._metrics.left_out} more metrics are in metrics.jsonl")
        return "; ".join(said)

    def _draw_news(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            self._look()
            if not self._metrics.versions:
                pause = LOOK_PERIOD
                continue
            import_module("nbddp.ui.panel.chart")  # loads matplotlib, once: that is no drawing
            began = time.monotonic()
            self._refresh(is_last=False)
            spent = time.monotonic() - began
            pause = min(MAX_PAUSE, max(LOOK_PERIOD, spent * (1 - SHARE) / SHARE))

    def _refresh(self, *, is_last: bool = True) -> None:
        self._look()
        for name, curves in self._metrics.curves.items():
            if self._over.is_set() and not is_last:
                return
            if name in self._failed:
                continue
            self._draw(name, curves)
            if not is_last and name in self._drawn:
                self._show(name, self._drawn[name][1])

    def _look(self) -> None:
        known = {name: version for name, (version, _) in self._drawn.items()}
        self._metrics = self._take(known, most=MAX_CHARTS)

    def _draw(self, name: str, curves: Mapping[int, Curve]) -> None:
        """Draw one metric; where that fails, the others and the record still come."""
        from nbddp.ui.panel.chart import draw  # loads matplotlib: not before there is a metric

        try:
            png = draw(name, curves)
        except Exception as error:
            logger.exception("the chart of %r could not be drawn", name)
            self._failed[name] = f"{type(error).__name__}: {error}"
            return
        self._drawn[name] = self._metrics.versions[name], png


def _say_falls(falls: Mapping[str, int]) -> str:
    times = max(falls.values())
    often = "once" if times == 1 else f"{times:,} times"
    if len(falls) == 1:
        return f"the step of {next(iter(falls))} fell back {often}: its chart counts on from there"
    names = ", ".join(falls)
    return f"the steps of {names} fell back ({often}): their charts count on from there"
