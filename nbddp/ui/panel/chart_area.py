"""The charts of a running cell, with their controls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import ipywidgets as widgets

from nbddp.charts.axes import AxisScale
from nbddp.charts.chart_lines import MANY_RANKS, rank_chart
from nbddp.charts.palette import rank_class
from nbddp.record.metrics import Curve, MetricsSnapshot
from nbddp.ui.chart_html import render
from nbddp.ui.html_pieces import MAX_CHARTS
from nbddp.ui.panel.plain_widgets import PlainWidget, box, close, html, toggle

logger = logging.getLogger(__name__)

VISIBLE_NAMES = 6  # metrics in the list without scrolling
CLASSES = ("nbddp-shots", "nbddp-columns")


class ChartArea:
    """Shows a chart for each metric; empty before the first reported value.

    "Highlight" and "Smooth" change CSS classes only.

    Args:
        metrics: ``MetricStore.snapshot``.
        ranks: the ranks of the cell.

    Attributes:
        choice: the chosen scale and metrics; None instead of metrics means the first few.
    """

    def __init__(self, metrics: Callable[..., MetricsSnapshot], ranks: Sequence[int]) -> None:
        self.choice: tuple[AxisScale, Collection[str] | None] = (AxisScale.AUTO, None)
        self.root = widgets.VBox([])
        self.box = widgets.Box([], _dom_classes=CLASSES)
        self._metrics = metrics
        self._ranks = ranks
        self._scale = AxisScale.AUTO  # of the drawn charts
        self._drawn_versions: dict[str, int] = {}
        self._charts: dict[str, PlainWidget] = {}
        self._failed: set[str] = set()
        self._is_updating_names = False

    def draw(self) -> None:
        """Draw the charts that have changed."""
        scale, chosen = self.choice
        if scale is not self._scale:
            self._scale, self._drawn_versions = scale, {}
        snapshot = self._metrics(self._drawn_versions, most=MAX_CHARTS, chosen=chosen)
        for name, curves in snapshot.curves.items():
            self._drawn_versions[name] = snapshot.versions[name]
            if name not in self._failed:
                self._draw_chart(name, curves)
        shown = [self._charts[name] for name in snapshot.versions if name in self._charts]
        if shown != list(self.box.children):
            self.box.children = shown
        if self._charts:
            self._update_names([*snapshot.versions, *snapshot.hidden_names])

    def close(self) -> None:
        """Close all widgets, including hidden ones."""
        for widget in (self.root, self.box, *self._charts.values()):
            close(widget)

    def _draw_chart(self, name: str, curves: Mapping[int, Curve]) -> None:
        try:
            drawn = render(rank_chart(name, curves, self._scale), is_live=True)
        except Exception:  # the record will give the reason
            logger.exception("the chart of %r could not be drawn", name)
            self._failed.add(name)
            return
        if not self._charts:
            self._show_controls()
        if name not in self._charts:
            self._charts[name] = html()
        self._charts[name].value = drawn

    def _show_controls(self) -> None:
        """Show the controls above the first chart."""
        self._scales = _dropdown("Scale", [(each.value, each) for each in AxisScale])
        ranks = [(f"rank {rank}", rank_class(rank).replace("-r", "-only-")) for rank in self._ranks]
        self._highlight = _dropdown("Highlight", [("all", ""), *ranks])
        if not 1 < len(ranks) <= MANY_RANKS:  # only two of more ranks have a line
            self._highlight.layout.display = "none"
        self._smooth = toggle(
            "Smooth", "Also show a smoothed line: the weighted mean of earlier values"
        )
        self._names_toggle = toggle("Metrics", "Choose the metrics to draw")
        self._names = widgets.SelectMultiple(rows=VISIBLE_NAMES)
        self._names_toggle.layout.display = self._names.layout.display = "none"
        for control in (self._scales, self._names):
            control.observe(self._update_choice, "value")
        for control in (self._highlight, self._smooth):
            control.observe(self._update_classes, "value")
        self._names_toggle.observe(self._show_names, "value")
        row = [self._scales, self._highlight, self._smooth, self._names_toggle]
        self.root.children = [box(widgets.HBox, row, "nbddp-choice"), self._names, self.box]

    def _update_names(self, names: Sequence[str]) -> None:
        """Let the user choose metrics if there are more than fit."""
        if len(names) <= MAX_CHARTS or set(names) == set(self._names.options):
            return
        chosen = self._names.value or names[:MAX_CHARTS]
        self._is_updating_names = True  # new options clear the value
        self._names.options = tuple(names)
        self._names.value = tuple(chosen)
        self._is_updating_names = False
        self._names_toggle.layout.display = None

    def _update_choice(self, _change: object) -> None:
        if not self._is_updating_names:
            self.choice = (self._scales.value, self._names.value or None)

    def _update_classes(self, _change: object) -> None:
        smooth = "nbddp-is-smooth" if self._smooth.value else ""
        self.box._dom_classes = [*CLASSES, *filter(None, (smooth, self._highlight.value))]

    def _show_names(self, _change: object) -> None:
        self._names.layout.display = None if self._names_toggle.value else "none"


def _dropdown(label: str, options: Sequence[tuple[str, object]]) -> widgets.Dropdown:
    return widgets.Dropdown(
        description=label,
        options=options,
        layout={"width": "auto"},
        style={"description_width": "auto"},
    )
