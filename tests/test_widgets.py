"""The panel's widgets: when a page has drawn them."""

from __future__ import annotations

from collections.abc import Iterator

import ipywidgets as widgets
import pytest

from nbddp.record.metrics import MetricStore
from nbddp.ui.panel.widgets import PanelWidgets


class Panel(PanelWidgets):
    """A panel with numbers of its own."""

    def __init__(self, *ranks: int) -> None:
        self.curves = MetricStore()
        super().__init__(ranks, lambda _press, _rank: None, metrics=self.curves.snapshot)

    def depths(self) -> dict[widgets.Widget, int]:
        """Every widget, with how many others are around it."""

        def walk(widget: widgets.Widget, depth: int) -> Iterator[tuple[widgets.Widget, int]]:
            yield widget, depth
            for child in getattr(widget, "children", ()):
                yield from walk(child, depth + 1)

        return dict(walk(self.root, 0))

    def counted(self) -> list[widgets.Widget]:
        """Those of which the page tells how often it shows them; the last one is the time line."""
        there = self.depths()
        return [each for each in there if getattr(each, "_view_count", None) is not None]

    def show(self, name: str) -> None:
        self.curves.add(0, 0.0, None, {name: 1.0})
        self.draw_charts()


@pytest.fixture
def panel() -> Iterator[Panel]:
    panel = Panel(0, 1)
    yield panel
    panel.close()


def test_a_panel_is_on_the_page_when_its_deepest_parts_are(panel: Panel) -> None:
    depths = panel.depths()
    assert max(depths[part] for part in panel.counted()) == max(depths.values())
    *first, last = panel.counted()
    for part in first:
        part._view_count = 1
    assert not panel.is_on_page.is_set()
    last._view_count = 1
    assert panel.is_on_page.is_set()
    grew_at = panel.grew_at
    panel.show("loss")  # it has to be on the page, too
    assert not panel.is_on_page.is_set()
    assert panel.grew_at >= grew_at
    [chart] = [part for part in panel.counted() if not part._view_count]
    chart._view_count = 1
    assert panel.is_on_page.is_set()
    panel.show("loss")  # the same picture, drawn anew
    assert panel.is_on_page.is_set()
    panel.count_no_more()
    assert panel.counted() == [last]  # which tells when the panel is gone


def test_a_panel_is_gone_when_the_page_that_showed_it_does_so_no_more(panel: Panel) -> None:
    line = panel.counted()[-1]
    line.set_state({"_view_count": 1})
    assert (panel.is_shown, panel.is_gone.is_set(), panel.times_gone) == (True, False, 0)
    line.set_state({"_view_count": 1})  # 0 and 1, held back until the first was answered
    assert (panel.is_shown, panel.is_gone.is_set(), panel.times_gone) == (True, False, 1)
    line.set_state({"_view_count": 0})
    assert (panel.is_shown, panel.is_gone.is_set(), panel.times_gone) == (False, True, 2)
    line.set_state({"_view_count": 1})  # its cell was moved: it is drawn anew
    assert (panel.is_shown, panel.is_gone.is_set(), panel.times_gone) == (True, False, 2)
