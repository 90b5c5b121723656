"""The charts of a running cell, and above them what one chooses of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import ipywidgets as widgets

from nbddp.charts.axes import AxisScale
from nbddp.record.metrics import MetricsSnapshot
from nbddp.ui.chart_html import (
    CHART_SHEET,
    MAX_CHARTS,
    RenderedChart,
    highlighting,
    render_live,
)
from nbddp.ui.panel.pieces import box

logger = logging.getLogger(__name__)

NO_RANK = -1
SHOWN_CHOICES = 6  # of the names to choose from, without scrolling


class Metrics(Protocol):
    """Gives the metrics as they are now."""

    def __call__(
        self, known: Mapping[str, int], /, *, most: int, chosen: Collection[str] | None
    ) -> MetricsSnapshot:
        """The chosen ones, or the first ``most``; with the curves of those that are not known."""


class ChartArea:
    """Keeps the newest picture of each metric; before the first it is an empty box.

    The page's own style does what a choice of rank, or smooth lines, changes.

    Args:
        metrics: asked for the curves of those that have changed.
        ranks: those that may stand out.
        on_new: told of every widget that is added.

    Attributes:
        chosen: the names of those that are drawn; None for the first few.
        choices: another number after each choice that needs another drawing.
    """

    def __init__(
        self,
        metrics: Metrics,
        ranks: Sequence[int],
        on_new: Callable[[widgets.Widget], None],
    ) -> None:
        self._metrics = metrics
        self._ranks = list(ranks)
        self._on_new = on_new
        self.scale = AxisScale.AUTO
        self.chosen: Collection[str] | None = None
        self.choices = 0
        self.root = widgets.VBox([])
        self.box = box(widgets.Box, [], "nbddp-shots")
        self.box.add_class("nbddp-columns")
        self.names = widgets.SelectMultiple(rows=SHOWN_CHOICES, layout=_hidden())
        self._drawn: dict[str, int] = {}  # the version of each that was drawn
        self._failed: set[str] = set()
        self._charts: dict[str, widgets.HTML] = {}
        self._of_rank = ""
        self._is_offering = False

    def draw(self) -> list[widgets.HTML]:
        """Draw what has changed; return the widgets of charts that are new."""
        news = self._metrics(self._drawn, most=MAX_CHARTS, chosen=self.chosen)
        new = []
        for name, curves in news.curves.items():
            self._drawn[name] = news.versions[name]
            if name in self._failed:
                continue
            try:
                chart = render_live(name, curves, self.scale)
            except Exception:  # the others still come; the record says why this one does not
                logger.exception("the chart of %r could not be drawn", name)
                self._failed.add(name)
                continue
            if name in self._charts:
                self._charts[name].value = chart.html
            else:
                new.append(self._add(chart))
        if self._charts:
            self._offer([*news.versions, *news.others])
        return new

    def _add(self, chart: RenderedChart) -> widgets.HTML:
        if not self._charts:
            self._begin()
        layout = widgets.Layout(margin="0", width="auto")
        added = self._charts[chart.name] = widgets.HTML(chart.html, layout=layout)
        self._on_new(added)
        self.box.children = (*self.box.children, added)
        return added

    def _begin(self) -> None:
        """Show what is chosen with, above the first chart."""
        scale = _dropdown("Scale", [(each.value, each) for each in AxisScale])
        smooth = widgets.ToggleButton(
            description="Smooth", tooltip="Show the mean of what came before, too"
        )
        self._open_names = widgets.ToggleButton(
            description="Metrics", tooltip="Choose the metrics that are drawn", layout=_hidden()
        )
        row = [scale, smooth, self._open_names]
        if len(self._ranks) > 1:
            there = [("all", NO_RANK), *((f"rank {rank}", rank) for rank in self._ranks)]
            highlight = _dropdown("Highlight", there)
            highlight.observe(lambda change: self._let_stand_out(change["new"]), "value")
            row.insert(1, highlight)
        scale.observe(lambda change: self._take_scale(change["new"]), "value")
        smooth.observe(lambda change: self._turn_smooth(is_on=change["new"]), "value")
        self._open_names.observe(lambda change: self._show_names(is_on=change["new"]), "value")
        self.names.observe(lambda change: self._take_names(change["new"]), "value")
        sheet = f"{CHART_SHEET}<style>{highlighting(self._ranks)}</style>"
        head = [widgets.HTML(sheet, layout=_hidden()), box(widgets.HBox, row, "nbddp-choice")]
        parts = [*head, self.names, self.box]
        for each in parts:
            self._on_new(each)
        self.root.children = parts

    def _offer(self, names: Sequence[str]) -> None:
        """Let the user choose among these, if there are more than are drawn by themselves."""
        if len(names) <= MAX_CHARTS or set(names) == set(self.names.options):
            return
        chosen = self.names.value or tuple(names[:MAX_CHARTS])
        self._is_offering = True  # new options take back what was chosen
        self.names.options = tuple(names)
        self.names.value = chosen
        self._is_offering = False
        self._open_names.layout.display = None

    def _take_scale(self, scale: AxisScale) -> None:
        self.scale = scale
        self._drawn = {}  # after the scale: drawing, on another thread, asks in the other order
        self.choices += 1

    def _take_names(self, chosen: tuple[str, ...]) -> None:
        if self._is_offering:
            return
        for name, chart in self._charts.items():
            chart.layout.display = None if name in chosen else "none"
        self.chosen = chosen
        self.choices += 1

    def _let_stand_out(self, rank: int) -> None:
        before, self._of_rank = self._of_rank, f"k{rank}"
        for name in (before, "nbddp-only"):
            self.box.remove_class(name)
        if rank != NO_RANK:
            self.box.add_class(self._of_rank)
            self.box.add_class("nbddp-only")

    def _turn_smooth(self, *, is_on: bool) -> None:
        turn = self.box.add_class if is_on else self.box.remove_class
        turn("nbddp-is-smooth")

    def _show_names(self, *, is_on: bool) -> None:
        self.names.layout.display = None if is_on else "none"


def _dropdown(label: str, options: Sequence[tuple[str, object]]) -> widgets.Dropdown:
    return widgets.Dropdown(
        description=label,
        options=options,
        value=options[0][1],
        layout=widgets.Layout(width="auto"),
        style={"description_width": "auto"},
    )


def _hidden() -> widgets.Layout:
    return widgets.Layout(display="none")
