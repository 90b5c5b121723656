"""The charts of a panel: what is drawn goes in as HTML, what is chosen comes out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import ipywidgets as widgets

from nbddp.ui.charts.frame import Scale
from nbddp.ui.panel.charthtml import SHEET, Drawn, highlighting
from nbddp.ui.panel.charts import MAX_CHARTS
from nbddp.ui.panel.pieces import box

NO_RANK = -1
SHOWN_CHOICES = 6  # of the names to choose from, without scrolling


class Choose(Protocol):
    """Draws on another scale, or other metrics."""

    def __call__(
        self, *, scale: Scale | None = None, chosen: Collection[str] | None = None
    ) -> None:
        """What is None stays."""


class Shots:
    """The charts of a cell; before the first one there is nothing but an empty box.

    Attributes:
        turns: what is above the charts, as soon as there is one.
    """

    def __init__(
        self, ranks: Sequence[int], choose: Choose, on_new: Callable[[widgets.Widget], None]
    ) -> None:
        self._choose = choose
        self._on_new = on_new
        self._ranks = list(ranks)
        self.turns: Turns | None = None
        self.root = widgets.VBox([])

    def show(self, chart: Drawn) -> widgets.HTML | None:
        """Show a chart, in the place that it has or in a new one at the end, which is returned."""
        if self.turns is None:
            self.turns = self._begin()
        return self.turns.show(chart)

    def offer(self, names: Sequence[str]) -> None:
        """Let the user choose among these, if there are more than are drawn by themselves."""
        if self.turns is not None:
            self.turns.offer(names)

    def _begin(self) -> Turns:
        turns = Turns(self._ranks, self._choose, self._on_new)
        for each in turns.parts:
            self._on_new(each)
        self.root.children = turns.parts
        return turns


class Turns:
    """The charts, and above them what turns them; the page's own style does the rest."""

    def __init__(
        self, ranks: Sequence[int], choose: Choose, on_new: Callable[[widgets.Widget], None]
    ) -> None:
        self._choose = choose
        self._on_new = on_new
        self._charts: dict[str, widgets.HTML] = {}
        self._of_rank = ""
        self._is_offering = False
        self.box = box(widgets.Box, [], "nbddp-shots")
        self._scale = _choice("Scale", [(each.value, each) for each in Scale])
        self._smooth = widgets.ToggleButton(
            description="Smooth", tooltip="Show the mean of what came before, too"
        )
        self._metrics = widgets.ToggleButton(
            description="Metrics", tooltip="Choose the metrics that are drawn", layout=_hidden()
        )
        self.names = widgets.SelectMultiple(rows=SHOWN_CHOICES, layout=_hidden())
        row = [self._scale, self._smooth, self._metrics]
        if len(ranks) > 1:
            row.insert(1, self._rank_choice(ranks))
        self._scale.observe(lambda _: choose(scale=self._scale.value), "value")
        self._smooth.observe(lambda _: self._turn_smooth(), "value")
        self._metrics.observe(lambda _: self._open_names(), "value")
        self.names.observe(lambda _: self._take_names(), "value")
        sheet = f"{SHEET}<style>{highlighting(ranks)}</style>"
        head = [widgets.HTML(sheet, layout=_hidden()), box(widgets.HBox, row, "nbddp-choice")]
        self.parts: list[widgets.Widget] = [*head, self.names, self.box]

    def show(self, chart: Drawn) -> widgets.HTML | None:
        """Show a chart; it is returned if it is new."""
        if chart.name in self._charts:
            self._charts[chart.name].value = chart.html
            return None
        new = self._charts[chart.name] = widgets.HTML(chart.html, layout=widgets.Layout(margin="0"))
        self._on_new(new)
        self.box.children = (*self.box.children, new)
        return new

    def offer(self, names: Sequence[str]) -> None:
        """Let the user choose among these, if there are more than are drawn by themselves."""
        if len(names) <= MAX_CHARTS or set(names) == set(self.names.options):
            return
        chosen = self.names.value or tuple(names[:MAX_CHARTS])
        self._is_offering = True  # new options take back what was chosen
        self.names.options = tuple(names)
        self.names.value = chosen
        self._is_offering = False
        self._metrics.layout.display = None

    def _rank_choice(self, ranks: Sequence[int]) -> widgets.Dropdown:
        there = [("all", NO_RANK), *((f"rank {rank}", rank) for rank in ranks)]
        choice = _choice("Highlight", there)
        choice.observe(lambda change: self._let_stand_out(change["new"]), "value")
        return choice

    def _let_stand_out(self, rank: int) -> None:
        before, self._of_rank = self._of_rank, f"k{rank}"
        for name in (before, "nbddp-only"):
            self.box.remove_class(name)
        if rank != NO_RANK:
            self.box.add_class(self._of_rank)
            self.box.add_class("nbddp-only")

    def _turn_smooth(self) -> None:
        turn = self.box.add_class if self._smooth.value else self.box.remove_class
        turn("nbddp-is-smooth")

    def _open_names(self) -> None:
        self.names.layout.display = None if self._metrics.value else "none"

    def _take_names(self) -> None:
        if self._is_offering:
            return
        chosen = self.names.value
        for name, chart in self._charts.items():
            chart.layout.display = None if name in chosen else "none"
        self._choose(chosen=chosen)


def _choice(label: str, options: Sequence[tuple[str, object]]) -> widgets.Dropdown:
    return widgets.Dropdown(
        description=label,
        options=options,
        value=options[0][1],
        layout=widgets.Layout(width="auto"),
        style={"description_width": "auto"},
    )


def _hidden() -> widgets.Layout:
    return widgets.Layout(display="none")
