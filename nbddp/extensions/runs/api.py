"""``nbddp.Run`` and ``nbddp.runs()``: read runs on disk, from a notebook or a script."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Collection
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError
from nbddp.extensions.runs.comparison import compare as compare_folders
from nbddp.extensions.runs.comparison import no_such_metric
from nbddp.extensions.runs.comparison_view import comparison_report
from nbddp.extensions.runs.find import find_run, runs_below
from nbddp.extensions.runs.stored_run import StoredCell, StoredRun
from nbddp.extensions.runs.summary import describe_run_end
from nbddp.formatting import plural
from nbddp.record.run_events import TrialEnded
from nbddp.ui.report.render import render_text

MAX_CHARTS = 12  # of a figure, unless the user names others

logger = logging.getLogger("nbddp")

LEADING_COLUMNS = ("time", "rank", "attempt", "step")


class Run:
    """A run, opened from its folder; this needs no ranks, no kernel and no torch.

    Parts of the record are read when they are first used. If the kernel of the run was killed, the
    record ends with the last complete line. If the run is going on, it has what is there at that
    moment.

    Args:
        path: the folder of the run; or its name, or a part of the name, in the working folder. The
            newest run that matches is opened.

    Raises:
        RequestError: no run matches, or the folder holds no run.
    """

    def __init__(self, path: str | os.PathLike[str] = "") -> None:
        is_folder = isinstance(path, Path) and os.path.isdir(path)  # noqa: PTH112 - never raises
        self.path = Path(path) if is_folder else find_run(os.fspath(path) or None, Path.cwd())
        self._recorded = StoredRun(self.path)

    def __repr__(self) -> str:
        cells = plural(len(self.cells), "cell")
        return f"nbddp.Run({self.name!r}: {cells}, {self.outcome or self.ending})"

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.path.name

    @property
    def facts(self) -> dict[str, Any]:
        """The contents of ``run.json``: git, versions, devices, options, pace."""
        return self._recorded.facts

    @property
    def config(self) -> dict[str, Any]:
        """The settings that ``nbddp.config`` recorded, by name."""
        config = self.facts.get("config")
        return dict(config) if isinstance(config, dict) else {}

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events in order, each with ``time`` (as ``time.time()``), ``kind`` and facts."""
        events = self._recorded.events
        return [{"time": event.time, "kind": event.kind, **event.facts()} for event in events]

    @property
    def cells(self) -> tuple[StoredCell, ...]:
        """The cells in order of execution, with ``source``, ``outcome``, ``seconds``, ..."""
        return self._recorded.cells

    @property
    def outcome(self) -> str:
        """``ok``, or the failure of the last cell in one line; empty if it was not recorded.

        ``ended by you`` if you ended a run of a sweep or a scaling before its cell began.
        """
        for event in self._recorded.events:
            if isinstance(event, TrialEnded):
                return event.outcome
        return next((each.outcome for each in reversed(self.cells)), "")

    @property
    def ending(self) -> str:
        """How the run ended, as far as is known on this machine: stopped, killed, running."""
        return describe_run_end(self._recorded, current=None)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        return list(self._recorded.metric_rows())

    def metrics(self) -> Any:
        """Return all numbers that the ranks reported: a row for each report, in order of the file.

        Returns:
            A ``pandas.DataFrame`` if pandas is installed, else a dict of lists. Both have columns
            like ``metrics["loss"]``. The columns are ``time`` (seconds, as ``time.time()``),
            ``rank``, ``attempt``, ``step`` and the metrics; a value that a row does not have is
            NaN.
        """
        names = dict.fromkeys((*LEADING_COLUMNS, *chain.from_iterable(self._rows)))
        columns = {name: [row.get(name, math.nan) for row in self._rows] for name in names}
        if importlib.util.find_spec("pandas") is None:
            return columns
        return importlib.import_module("pandas").DataFrame(columns)

    def figure(self, metrics: Collection[str] | None = None) -> Any:
        """Return charts of the metrics over steps, mean and ranks, as a ``matplotlib`` figure.

        Args:
            metrics: the names of the metrics to draw, or one name; None for the first twelve.

        Raises:
            RequestError: the run has no such metric, or no metrics.
        """
        from nbddp.charts.chart_lines import rank_chart
        from nbddp.charts.figure import draw_charts  # loads matplotlib

        chosen = [metrics] if isinstance(metrics, str) else metrics
        run = StoredRun(self.path, frozenset(chosen).__contains__) if chosen else self._recorded
        store = run.metrics()
        for name in chosen or ():
            if name not in store.names():
                recorded = self._recorded.metrics()
                raise no_such_metric(name, recorded.names(), of="run", more=recorded.dropped_names)
        if not store.names():
            raise RequestError(f"run {self.name} has no metrics to draw")
        shown = chosen or store.names()[:MAX_CHARTS]
        return draw_charts([rank_chart(name, store.curves(name)) for name in shown])


def runs(path: str | os.PathLike[str] = ".") -> list[Run]:
    """Return the runs that were started in a folder, newest first.

    Args:
        path: the folder; the working folder by default.

    Returns:
        The runs that can be opened. The logger ``nbddp`` names the others.
    """
    found = []
    for folder in runs_below(Path(path)):
        try:
            found.append(Run(folder))
        except RequestError as error:
            logger.warning("left out: %s", error)
    return found


def compare(*compared: Run | str | os.PathLike[str], metrics: str = "") -> str:
    """Compare runs: return their results and the differences of their settings as text.

    Args:
        compared: two to eight runs, or arguments of :class:`Run`.
        metrics: names of metrics, or patterns of names, separated by commas.

    Raises:
        ArgumentError: there are too few or too many runs, or no run has such a metric.
        RequestError: a run does not exist or is damaged.
    """
    found = [each if isinstance(each, Run) else Run(each) for each in compared]
    comparison = compare_folders([each.path for each in found], metrics)
    return render_text(comparison_report(comparison))
