"""The panel's widgets: what is drawn goes in as HTML and pictures, what is pressed comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import ipywidgets as widgets

from nbddp.record.metrics import MetricsSnapshot
from nbddp.record.snapshot import Snapshot
from nbddp.ui.panel.chart_area import ChartArea
from nbddp.ui.panel.controls import Controls, Press
from nbddp.ui.panel.html import alarm, late, state_line, time_line
from nbddp.ui.panel.log_area import LogWidgets
from nbddp.ui.panel.pieces import Plain, box, bundle, close, html
from nbddp.ui.panel.rank_sparklines import RankSparklines
from nbddp.ui.panel.style import SHEET
from nbddp.ui.report.rank_table import FEW, ranks_html


class Counted(Plain):
    """HTML that knows how often it was drawn anew between two words of its page.

    A page holds back what it has to say until its last word was answered, and of several it then
    says the newest. Of what was taken away and drawn again meanwhile it tells the old count.
    """

    def __init__(self, on_drawn_anew: Callable[[], None]) -> None:
        super().__init__(_dom_classes=("nbddp-html",))
        self._on_drawn_anew = on_drawn_anew

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take what the page says; a count that it has told already is news, too."""
        is_anew = bool(self._view_count) and sync_data.get("_view_count") == self._view_count
        super().set_state(sync_data)
        if is_anew:
            self._on_drawn_anew()


class PanelWidgets:
    """One panel; drawn from one thread, pressed on another.

    ``metrics`` gives what its charts draw; ``on_new`` is told of every widget that is added.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        press: Callable[[Press, int], None],
        *,
        metrics: Callable[..., MetricsSnapshot],
        on_new: Callable[[widgets.Widget], None] = lambda _widget: None,
    ) -> None:
        self._ranks = list(ranks)
        self._state, self._note, self._table = html(), html(), html()
        self._line = Counted(self._note_drawn_anew)
        self._controls = Controls(self._ranks, press)
        self.log = LogWidgets(ranks, on_new)
        self.charts = ChartArea(metrics, self._ranks, on_new)
        head = box(widgets.HBox, [self._state, self._controls.row], "nbddp-head")
        self.sparklines = RankSparklines()
        self._all = widgets.ToggleButton(
            description="All ranks", tooltip="Show a field for each rank", icon="th"
        )
        self._all.layout.display = "none" if len(self._ranks) <= FEW else ""
        self._all.add_class("nbddp-all")
        parts = [
            head,
            self._note,
            self._all,
            self._table,
            self.charts.root,
            self.log.root,
            self._line,
        ]
        self.root = box(widgets.VBox, [widgets.HTML(SHEET), *parts], "nbddp-panel")
        self.is_on_page = Event()  # the page has drawn all of it
        self.was_shown = False  # on some page, once
        self.is_gone = Event()  # from every page that shows what becomes of it
        self.times_gone = 0  # a cell that is moved is drawn anew
        self._deepest: list[widgets.DOMWidget] = []
        for each in (self._controls.buttons[Press.KILL], *self.log.parts, self._line):
            self._await(each)

    def bundle(self) -> dict[str, object]:
        """What a page shows it by."""
        return bundle(self.root)

    def _await(self, part: widgets.DOMWidget) -> None:
        """From here on the panel is on the page when this part is, too."""
        part._view_count = 0  # from None: the page then counts how often it shows it
        part.observe(self._note_shown, "_view_count")
        self._deepest.append(part)
        self.is_on_page.clear()
        self.grew_at = time.monotonic()

    def await_log(self) -> None:
        """The panel is on the page when the newest lines are, too."""
        if (last := self.log.begin_end()) is not None:
            self._await(last)

    @property
    def is_shown(self) -> bool:
        """Whether a page shows the panel, or had it when it was closed or loaded again."""
        return bool(self._line._view_count)

    def count_no_more(self) -> None:
        """The panel is about to go: all that the page shall still tell is when it is gone."""
        for each in self._deepest:
            if each is not self._line:
                each._view_count = None

    def _note_shown(self, _change: object) -> None:
        if all(each._view_count for each in self._deepest):
            self.is_on_page.set()
        if self.is_shown:
            self.was_shown = True
            self.is_gone.clear()
        elif self.was_shown:
            self.is_gone.set()
            self.times_gone += 1

    def _note_drawn_anew(self) -> None:
        self.times_gone += 1

    def draw(self, snapshot: Snapshot, *, note: str = "") -> None:
        """Show a snapshot; what has not changed is not sent."""
        self._state.value = f'<div class="nbddp">{state_line(snapshot)}</div>'
        self._note.value = alarm(snapshot) + late(snapshot) + note
        if len(snapshot.ranks) <= FEW:
            self.sparklines.note(snapshot.ranks, snapshot.at)
        curves = self.sparklines.columns()
        table = ranks_html(snapshot.ranks, is_open=self._all.value, curves=curves)
        self._table.value = (
            f'<div class="nbddp" tabindex="0" role="region" aria-label="ranks">{table}</div>'
        )
        self._line.value = f'<div class="nbddp">{time_line(snapshot)}</div>'
        self._controls.draw(snapshot)

    def draw_charts(self) -> None:
        """Draw the metrics that have changed."""
        for new in self.charts.draw():
            self._await(new)

    def become(self, record: str) -> None:
        """Turn into a record, for a page that is not told of another: it was loaded again, say."""
        if self.root.comm is None:
            return  # it was taken away meanwhile
        self._line._view_count = None
        before, self.root.children = self.root.children, [widgets.HTML(record)]
        for each in before:
            close(each)

    def close(self) -> None:
        """Take everything off the page and out of the kernel's memory."""
        close(self.root)
