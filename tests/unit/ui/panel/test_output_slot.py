"""The output slot of a panel: the record is shown on each page, in any state of that page."""

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets
import pytest

from nbddp.ui import frontend
from nbddp.ui.frontend import EMPTY_OUTPUT
from nbddp.ui.panel.output_slot import OutputSlot

WIDGET = "application/vnd.jupyter.widget-view+json"
SOON = '<div class="nbddp-soon">soon</div>'
RECORD = '<div class="nbddp-record">record</div>'
HINT = '<div class="nbddp-fallback">get it</div>'


class Page:
    """The outputs of a cell, in their order, as a page keeps them."""

    def __init__(self) -> None:
        self.outputs: dict[str, dict[str, Any]] = {}

    def take(self, data: dict[str, Any], *, transient: dict[str, str], update: bool) -> None:
        """Show an output. An update of an output that is not there is dropped."""
        key = transient["display_id"]
        assert update or key not in self.outputs, "it would stand there twice"
        if not update or key in self.outputs:
            self.outputs[key] = data

    @property
    def shown(self) -> list[str]:
        """The text that a user can read."""
        there = [each for each in self.outputs.values() if each != EMPTY_OUTPUT]
        return ["panel" if WIDGET in each else each["text/html"] for each in there]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    monkeypatch.setattr(frontend, "publish_display_data", page.take)
    return page


@pytest.fixture
def slot(page: Page) -> OutputSlot:
    slot = OutputSlot()
    slot.show_placeholder("starting", "starting")
    slot.show_placeholder("soon", "soon")
    assert page.shown == [SOON]
    return slot


def show_panel(slot: OutputSlot) -> None:
    slot.open([widgets.HTML("panel")])
    slot.show_panel("panel", "get it")


def in_widget(slot: OutputSlot) -> list[str]:
    """The outputs of a page that was reloaded while the panel was shown."""
    assert slot.root is not None
    return [each.value for each in slot.root.children]


@pytest.mark.parametrize("clear", [lambda _: None, dict.clear], ids=["kept", "cleared"])
def test_a_panel_replaces_a_placeholder_and_a_record_a_panel_even_if_it_was_cleared(
    page: Page, slot: OutputSlot, clear: Callable[[dict[str, Any]], None]
) -> None:
    clear(page.outputs)
    show_panel(slot)
    assert page.shown == ["panel", HINT]
    clear(page.outputs)
    slot.show_record("record", "record")
    assert page.shown == [RECORD]


def test_the_record_of_a_short_cell_is_shown_if_its_placeholder_was_cleared(
    page: Page, slot: OutputSlot
) -> None:
    page.outputs.clear()
    slot.show_record("record", "record")
    assert page.shown == [RECORD]


def test_a_page_without_updates_shows_attempts_in_one_widget(page: Page, slot: OutputSlot) -> None:
    show_panel(slot)
    root = slot.root
    page.outputs.clear()  # it receives no later updates
    slot.show_record("record of attempt 1", "")
    assert in_widget(slot) == ["record of attempt 1"]
    slot.show_placeholder("restarting", "")
    assert in_widget(slot) == ["restarting"]
    show_panel(slot)
    assert (slot.root, in_widget(slot)) == (root, ["panel"])
    slot.show_record("record of attempt 2", "")
    assert in_widget(slot) == ["record of attempt 2"]
    slot.close()
    assert root is not None
    assert root.comm is None


def test_outputs_that_the_page_has_dropped_are_published_again(
    page: Page, slot: OutputSlot
) -> None:
    show_panel(slot)
    page.outputs.clear()
    slot.forget_outputs()
    slot.show_panel("panel", "get it")
    assert page.shown == ["panel", HINT]
    slot.show_record("record", "record")
    assert page.shown == [RECORD]


def test_output_below_the_panel_stays_below_the_record(page: Page, slot: OutputSlot) -> None:
    slot.has_output_below = True
    page.outputs["figure"] = {"text/html": "figure"}
    slot.show_record("record", "record")
    assert page.shown == [RECORD, "figure"]
