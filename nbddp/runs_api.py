"""``nbddp.Run`` and ``nbddp.runs()``: what is on disk, for notebooks and scripts of any kind."""

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

from nbddp.archive.comparison import compare as compare_folders
from nbddp.archive.find import find_run, runs_below
from nbddp.archive.stored_run import StoredCell, StoredRun
from nbddp.archive.summary import UNREADABLE, describe_run_end
from nbddp.errors import RequestError
from nbddp.formatting import plural
from nbddp.ui.report.comparison import comparison_report
from nbddp.ui.report.render import render_text

MAX_CHARTS = 12  # of a figure, unless others are asked for

logger = logging.getLogger("nbddp")

LEADING_COLUMNS = ("time", "rank", "attempt", "step")


class Run:
    """A run, opened from its folder; without ranks, kernel or torch.

    Its record is read when something of it is first asked for. Of a run whose kernel was killed,
    that is all up to the last line; of a run that goes on, what is there at that moment.

    Args:
        path: its folder, or its name, or a part of that, among the runs of the working folder; the
            newest that fits.

    Raises:
        RequestError: there is none, or what lies there is no run.
    """

    def __init__(self, path: str | os.PathLike[str] = "") -> None:
        is_folder = isinstance(path, Path) and os.path.isdir(path)  # noqa: PTH112 - never raises
        self.path = Path(path) if is_folder else find_run(os.fspath(path) or None, Path.cwd())
        self._recorded = _read_run(self.path)

    def __repr__(self) -> str:
        cells = plural(len(self.cells), "cell")
        return f"nbddp.Run({self.name!r}: {cells}, {self.outcome or self.ending})"

    @property
    def name(self) -> str:
        """Its folder's."""
        return self.path.name

    @property
    def facts(self) -> dict[str, Any]:
        """What its ``run.json`` says: git, versions, devices, options, pace."""
        return self._recorded.facts

    @property
    def config(self) -> dict[str, Any]:
        """What ``nbddp.config`` said in it, by name."""
        config = self.facts.get("config")
        return dict(config) if isinstance(config, dict) else {}

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened, in its order: each with ``time`` (as ``time.time()``), ``kind``, facts."""
        events = self._recorded.events
        return [{"time": each.at, "kind": each.kind, **each.facts} for each in events]

    @property
    def cells(self) -> tuple[StoredCell, ...]:
        """Its cells in the order in which they ran: ``source``, ``outcome``, ``seconds``, ..."""
        return self._recorded.cells

    @property
    def outcome(self) -> str:
        """``ok``, or what ended its last cell, in a line; empty if that is not recorded."""
        return next((each.outcome for each in reversed(self.cells)), "")

    @property
    def ending(self) -> str:
        """How it ended, as far as its record and this machine know: stopped, killed, running."""
        return describe_run_end(self._recorded, current=None)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        return list(self._recorded.metric_rows())

    def metrics(self) -> Any:
        """All numbers that its ranks reported, a row for each report, in the order of the file.

        Returns:
            A ``pandas.DataFrame`` where pandas is installed, else a dict of lists: both have a
            column as ``metrics["loss"]``. The columns are ``time`` (seconds, as ``time.time()``),
            ``rank``, ``attempt``, ``step`` and the metrics, NaN where a row has none.
        """
        names = dict.fromkeys((*LEADING_COLUMNS, *chain.from_iterable(self._rows)))
        columns = {name: [row.get(name, math.nan) for row in self._rows] for name in names}
        if importlib.util.find_spec("pandas") is None:
            return columns
        return importlib.import_module("pandas").DataFrame(columns)

    def figure(self, metrics: Collection[str] | None = None) -> Any:
        """The charts of its metrics, mean and ranks over steps, as a ``matplotlib`` figure.

        Args:
            metrics: the names of those to draw, or one name; None for the first twelve.

        Raises:
            RequestError: it has no such metric, or none at all.
        """
        from nbddp.charts.chart_lines import rank_chart
        from nbddp.charts.figure import draw_charts  # loads matplotlib

        chosen = [metrics] if isinstance(metrics, str) else metrics
        run = StoredRun(self.path, frozenset(chosen).__contains__) if chosen else self._recorded
        store = run.metrics()
        missing = [name for name in chosen or () if name not in store.names()]
        if missing or not store.names():
            raise self._no_metric(*missing)
        shown = chosen or store.names()[:MAX_CHARTS]
        return draw_charts([rank_chart(name, store.curves(name)) for name in shown])

    def _no_metric(self, missing: str = "", *_: str) -> RequestError:
        store = self._recorded.metrics()
        if not store.names():
            return RequestError(f"run {self.name} has no metrics to draw")
        more = [f"{store.dropped_names:,} more"] if store.dropped_names else []
        known = ", ".join([*store.names(), *more])
        return RequestError(f"run {self.name} has no metric {missing!r}; its metrics are: {known}")


def runs(path: str | os.PathLike[str] = ".") -> list[Run]:
    """The runs that were started in a folder, the newest first.

    Args:
        path: where they were started; the working folder if none is named.

    Returns:
        Those that can be opened; the logger ``nbddp`` names the others.
    """
    found = []
    for folder in runs_below(Path(path)):
        try:
            found.append(Run(folder))
        except RequestError as error:
            logger.warning("left out: %s", error)
    return found


def compare(*compared: Run | str | os.PathLike[str], metrics: str = "") -> str:
    """Put runs next to each other, as text: what they came to, and in what they differ.

    Args:
        compared: two to eight runs, or what :class:`Run` takes.
        metrics: the names, or patterns of names, of those to show, with commas between them.

    Raises:
        ArgumentError: there are too few runs, or too many, or none has such a metric.
        RequestError: there is no such run, or it is damaged.
    """
    found = [each if isinstance(each, Run) else Run(each) for each in compared]
    comparison = compare_folders([each.path for each in found], metrics)
    return render_text(comparison_report(comparison))


def _read_run(path: Path) -> StoredRun:
    """The record, looked at as far as everything else builds on it.

    Raises:
        RequestError: it is damaged, or of something else.
    """
    try:
        run = StoredRun(path)
        _ = run.cells, run.ranks
    except UNREADABLE as error:
        what = f"{type(error).__name__}: {error}"
        raise RequestError(f"{path.name} is damaged, or no run of nbddp's ({what})") from None
    return run
