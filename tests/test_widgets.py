"""The panel's widgets: when a page has drawn them."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.ui.charts.frame import Scale
from nbddp.ui.panel.charthtml import Drawn
from nbddp.ui.panel.widgets import PanelWidgets


def panel_of(ranks: Sequence[int], chosen: list[object] | None = None) -> PanelWidgets:
    """A panel; what is chosen of its charts is added to a list."""
    found = [] if chosen is None else chosen
    return PanelWidgets(ranks, lambda _press, _rank: None, choose=lambda **what: found.append(what))


def chart(html: str = "", name: str = "loss") -> Drawn:
    return Drawn(name, html, (0, 1))


def test_a_panel_is_on_the_page_when_its_deepest_parts_are() -> None:
    panel = panel_of([0, 1])
    *first, last = panel._deepest
    for part in first:
        assert part._view_count == 0, "the page is asked to count"
        part._view_count = 1
    assert not panel.is_on_page.is_set()
    last._view_count = 1
    assert panel.is_on_page.is_set()
    panel.close()


def test_when_the_panel_is_about_to_go_the_page_counts_no_more() -> None:
    panel = panel_of([0])
    panel.show_chart(chart())
    panel.count_no_more()
    counted = [part for part in panel._deepest if part._view_count is not None]
    assert counted == [panel._line]  # which tells when the panel is gone


def test_a_panel_is_gone_when_the_page_that_showed_it_does_so_no_more() -> None:
    panel = panel_of([0])
    assert not panel.is_gone.is_set()
    panel._line._view_count = 1
    panel._line._view_count = 0
    assert panel.is_gone.is_set()
    panel._line._view_count = 1  # its cell was moved: it is drawn anew
    assert not panel.is_gone.is_set()
    assert panel.is_shown
    panel.close()


def test_a_panel_that_goes_and_comes_between_two_words_of_the_page_was_gone() -> None:
    panel = panel_of([0])
    panel._line.set_state({"_view_count": 1})
    assert panel.times_gone == 0
    panel._line.set_state({"_view_count": 1})  # 0 and 1, held back until the first was answered
    assert panel.times_gone == 1
    assert panel.is_shown
    assert not panel.is_gone.is_set()
    panel._line.set_state({"_view_count": 0})
    assert panel.times_gone == 2
    panel.close()


def test_a_chart_that_comes_later_has_to_be_on_the_page_too() -> None:
    panel = panel_of([0])
    for part in panel._deepest:
        part._view_count = 1
    assert panel.is_on_page.is_set()
    grew_at = panel.grew_at
    panel.show_chart(chart())
    assert not panel.is_on_page.is_set()
    assert panel.grew_at >= grew_at
    panel._deepest[-1]._view_count = 1
    assert panel.is_on_page.is_set()
    panel.show_chart(chart("newer"))  # the same picture, drawn anew
    assert panel.is_on_page.is_set()
    panel.close()


def test_every_part_of_a_panel_lies_no_deeper_than_one_that_is_counted() -> None:
    panel = panel_of([0, 1])

    def depths(widget: object, depth: int = 0) -> dict[object, int]:
        found = {widget: depth}
        for child in getattr(widget, "children", ()):
            found |= depths(child, depth + 1)
        return found

    known = depths(panel.root)
    assert max(known[part] for part in panel._deepest) == max(known.values())
    panel.close()


# ---- what is chosen of the charts


def parts(panel: PanelWidgets) -> dict[str, object]:
    """The widgets that turn the charts, by what is written on them."""
    turns = panel._shots.turns
    assert turns is not None
    return {each.description: each for each in turns.parts[1].children}


def test_before_there_is_a_chart_there_is_nothing_to_turn() -> None:
    panel = panel_of([0, 1])
    assert panel._shots.root.children == ()
    panel.show_chart(chart())
    assert len(panel._shots.root.children) == 4
    panel.close()


def test_what_is_added_later_is_made_known_so_that_it_is_answered_while_the_cell_runs() -> None:
    known: list[object] = []
    panel = PanelWidgets(
        [0, 1], lambda _press, _rank: None, choose=lambda **_what: None, on_new=known.append
    )
    panel.show_chart(chart())
    row = panel._shots.root.children[1]
    assert row in known
    assert set(parts(panel).values()) == set(row.children)
    assert panel._shots.turns.box.children[0] in known
    panel.close()


def test_a_scale_is_asked_for() -> None:
    chosen: list[object] = []
    panel = panel_of([0, 1], chosen)
    panel.show_chart(chart())
    parts(panel)["Scale"].value = Scale.LOG
    assert chosen == [{"scale": Scale.LOG}]
    panel.close()


def test_a_rank_stands_out_and_lines_are_smooth_by_classes_alone() -> None:
    panel = panel_of([0, 1])
    panel.show_chart(chart())
    there = parts(panel)
    classes = lambda: set(panel._shots.turns.box._dom_classes) - {"nbddp-shots"}  # noqa: E731
    there["Highlight"].value = 1
    assert classes() == {"nbddp-only", "k1"}
    there["Highlight"].value = 0
    assert classes() == {"nbddp-only", "k0"}
    there["Smooth"].value = True
    there["Highlight"].value = -1
    assert classes() == {"nbddp-is-smooth"}
    there["Smooth"].value = False
    assert classes() == set()
    panel.close()


def test_one_rank_alone_cannot_stand_out() -> None:
    panel = panel_of([3])
    panel.show_chart(chart())
    assert list(parts(panel)) == ["Scale", "Smooth", "Metrics"]
    panel.close()


def test_metrics_are_chosen_by_name_and_those_that_are_not_are_hidden() -> None:
    chosen: list[object] = []
    panel = panel_of([0, 1], chosen)
    panel.show_chart(chart(name="a"))
    panel.show_chart(chart(name="b"))
    assert parts(panel)["Metrics"].layout.display == "none"
    names = [*"abcdefghijklm"]
    panel.show_chart(chart(name="b"), names[:12])
    assert parts(panel)["Metrics"].layout.display == "none", "all of them are drawn"
    panel.show_chart(chart(name="b"), names)
    assert parts(panel)["Metrics"].layout.display is None
    choice = panel._shots.turns.names
    assert (choice.options, choice.value) == (tuple(names), tuple(names[:12]))
    assert choice.layout.display == "none", "it is folded"
    assert chosen == []
    parts(panel)["Metrics"].value = True
    assert choice.layout.display is None
    choice.value = ("b", "m")
    assert chosen == [{"chosen": ("b", "m")}]
    shown = [each.layout.display for each in panel._shots.turns.box.children]
    assert shown == ["none", None]
    panel.show_chart(chart(name="m"), ["b", "m", *"acdefghijkl"])
    assert (choice.options, choice.value) == (tuple(names), ("b", "m")), "they stay in their order"
    panel.close()
