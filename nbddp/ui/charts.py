"""The charts of a cell's metrics: drawn on a thread of their own, and only when there is news."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from importlib import import_module

from nbddp.record.curves import Metrics
from nbddp.ui.record import Chart

logger = logging.getLogger(__name__)

MAX_CHARTS = 12
LOOK_PERIOD = 0.5  # seconds between two looks for news
SHARE = 0.2  # of the time goes into drawing: the ranks need the cores
MAX_PAUSE = 2.0  # seconds; a machine that is busy shows the charts all the same


class Charts:
    """Keeps the newest picture of each metric; ``show`` gets each as it is drawn."""

    def __init__(self, metrics: Metrics, show: Callable[[str, bytes], None]) -> None:
        self._metrics = metrics
        self._show = show
        self._drawn: dict[str, tuple[int, bytes]] = {}
        self._failed: dict[str, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="nbddp-charts", daemon=True
        )

    def start(self) -> None:
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
        names = self._metrics.names()
        return [(name, self._drawn[name][1]) for name in names if name in self._drawn]

    def stop(self) -> None:
        """Draw no more."""
        self._over.set()

    def note(self) -> str:
        """A word on metrics that have no chart; empty if all have."""
        left_out = len(self._metrics.names()) - MAX_CHARTS + self._metrics.dropped_names
        said = [f"{name} could not be drawn: {why}" for name, why in self._failed.items()]
        if left_out > 0:
            said.append(f"{left_out} more metrics are in metrics.jsonl")
        return "; ".join(said)

    def _run(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            if not self._metrics.names():
                pause = LOOK_PERIOD
                continue
            import_module("nbddp.ui.chart")  # loads matplotlib, once: that is no drawing
            began = time.monotonic()
            self._refresh(is_last=False)
            spent = time.monotonic() - began
            pause = min(MAX_PAUSE, max(LOOK_PERIOD, spent * (1 - SHARE) / SHARE))

    def _refresh(self, *, is_last: bool = True) -> None:
        for name in self._metrics.names()[:MAX_CHARTS]:
            if self._over.is_set() and not is_last:
                return
            version = self._metrics.version_of(name)
            if name not in self._failed and version != self._drawn.get(name, (0, b""))[0]:
                self._draw(name, version)
                if not is_last and name in self._drawn:
                    self._show(name, self._drawn[name][1])

    def _draw(self, name: str, version: int) -> None:
        """Draw one metric; where that fails, the others and the record still come."""
        from nbddp.ui.chart import draw  # loads matplotlib: not before there is a metric

        try:
            png = draw(name, self._metrics.curves(name))
        except Exception as error:
            logger.exception("the chart of %r could not be drawn", name)
            self._failed[name] = f"{type(error).__name__}: {error}"
            return
        self._drawn[name] = version, png
