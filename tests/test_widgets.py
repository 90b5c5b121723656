"""The panel's widgets: when a page has drawn them."""

from __future__ import annotations

from nbddp.ui.panel.widgets import PanelWidgets


def test_a_panel_is_on_the_page_when_its_deepest_parts_are() -> None:
    panel = PanelWidgets([0, 1], lambda _press, _rank: None)
    *first, last = panel._deepest
    for part in first:
        assert part._view_count == 0, "the page is asked to count"
        part._view_count = 1
    assert not panel.is_on_page.is_set()
    last._view_count = 1
    assert panel.is_on_page.is_set()
    panel.close()


def test_when_the_panel_is_about_to_go_the_page_counts_no_more() -> None:
    panel = PanelWidgets([0], lambda _press, _rank: None)
    panel.show_chart("loss", b"")
    panel.count_no_more()
    counted = [part for part in panel._deepest if part._view_count is not None]
    assert counted == [panel._line]  # which tells when the panel is gone


def test_a_panel_is_gone_when_the_page_that_showed_it_does_so_no_more() -> None:
    panel = PanelWidgets([0], lambda _press, _rank: None)
    assert not panel.is_gone.is_set()
    panel._line._view_count = 1
    panel._line._view_count = 0
    assert panel.is_gone.is_set()
    panel._line._view_count = 1  # its cell was moved: it is drawn anew
    assert not panel.is_gone.is_set()
    assert panel.is_shown
    panel.close()


def test_a_chart_that_comes_later_has_to_be_on_the_page_too() -> None:
    panel = PanelWidgets([0], lambda _press, _rank: None)
    for part in panel._deepest:
        part._view_count = 1
    assert panel.is_on_page.is_set()
    grew_at = panel.grew_at
    panel.show_chart("loss", b"")
    assert not panel.is_on_page.is_set()
    assert panel.grew_at >= grew_at
    panel._deepest[-1]._view_count = 1
    assert panel.is_on_page.is_set()
    panel.show_chart("loss", b"newer")  # the same picture, drawn anew
    assert panel.is_on_page.is_set()
    panel.close()


def test_every_part_of_a_panel_lies_no_deeper_than_one_that_is_counted() -> None:
    panel = PanelWidgets([0, 1], lambda _press, _rank: None)

    def depths(widget: object, depth: int = 0) -> dict[object, int]:
        found = {widget: depth}
        for child in getattr(widget, "children", ()):
            found |= depths(child, depth + 1)
        return found

    known = depths(panel.root)
    assert max(known[part] for part in panel._deepest) == max(known.values())
    panel.close()
