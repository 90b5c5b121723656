"""The panel's widgets: when a page has drawn them, and what can be chosen of its charts.

What a choice does to the page is tested in ``browser/test_charts_page.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import ipywidgets as widgets
import pytest

from nbddp.ui.charts.frame import Scale
from nbddp.ui.panel.charthtml import Drawn
from nbddp.ui.panel.widgets import PanelWidgets


class Panel(PanelWidgets):
    """A panel that keeps what was chosen of its charts, and the widgets that came later."""

    def __init__(self, *ranks: int) -> None:
        self.chosen: list[object] = []
        self.new: list[object] = []
        super().__init__(
            ranks,
            lambda _press, _rank: None,
            choose=lambda **what: self.chosen.append(what),
            on_new=self.new.append,
        )

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

    def named(self) -> dict[str, widgets.Widget]:
        """What turns the charts, by what is written on it."""
        there = [each for each in self.new if isinstance(each, widgets.HBox)]
        return {each.description: each for each in there[0].children}

    def charts(self) -> widgets.Box:
        """What the charts are in."""
        [chart, *_] = [each for each in self.new if type(each) is widgets.Box]
        return chart

    def show(self, name: str, *names: str) -> None:
        self.show_chart(Drawn(name, "", (0, 1)), names)


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


def test_what_turns_the_charts_comes_with_the_first_and_is_answered_while_the_cell_runs(
    panel: Panel,
) -> None:
    before = set(panel.depths())
    panel.show("loss")
    assert list(panel.named()) == ["Scale", "Highlight", "Smooth", "Metrics"]
    told, added = set(panel.new), panel.depths().keys() - before
    assert added - told == set(panel.named().values())  # with the row that they are in
    alone = Panel(3)
    alone.show("loss")
    assert list(alone.named()) == ["Scale", "Smooth", "Metrics"]
    alone.close()


def test_a_rank_stands_out_and_lines_are_smooth_by_classes_alone(panel: Panel) -> None:
    panel.show("loss")
    there, before = panel.named(), set(panel.charts()._dom_classes)
    for name, value, classes in (
        ("Highlight", 1, {"nbddp-only", "k1"}),
        ("Highlight", 0, {"nbddp-only", "k0"}),
        ("Smooth", True, {"nbddp-only", "k0", "nbddp-is-smooth"}),
        ("Highlight", -1, {"nbddp-is-smooth"}),
        ("Smooth", False, set()),
    ):
        there[name].value = value
        assert set(panel.charts()._dom_classes) - before == classes
    there["Scale"].value = Scale.LOG
    assert panel.chosen == [{"scale": Scale.LOG}]


def test_metrics_can_be_chosen_where_there_are_more_than_are_drawn(panel: Panel) -> None:
    panel.show("b", *"abcdefghijkl")
    offer = panel.named()["Metrics"]
    assert offer.layout.display == "none"
    panel.show("b", *"abcdefghijklm")
    [choice] = [each for each in panel.depths() if isinstance(each, widgets.SelectMultiple)]
    assert (offer.layout.display, choice.layout.display) == (None, "none")
    assert (choice.options, choice.value) == (tuple("abcdefghijklm"), tuple("abcdefghijkl"))
    assert panel.chosen == []
    offer.value = True
    assert choice.layout.display is None
    choice.value = ("b", "m")
    [chart] = panel.charts().children
    assert chart.layout.display is None
    panel.show("m", *"bmacdefghijkl")
    assert panel.chosen == [{"chosen": ("b", "m")}]
    assert (choice.options, choice.value) == (tuple("abcdefghijklm"), ("b", "m")), "in their order"
