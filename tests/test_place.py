"""Where a panel stands: nothing that a page may have cleared is replaced."""

from __future__ import annotations

from typing import Any

import pytest

from nbddp.ui.panel import place as place_module
from nbddp.ui.panel.place import EMPTY, Place

PANEL = {"text/html": "panel", "text/plain": "panel"}
RECORD = {"text/html": "record", "text/plain": "record"}


class Page:
    """The outputs of a cell, in their order, as a page keeps them."""

    def __init__(self) -> None:
        self.outputs: dict[str, dict[str, Any]] = {}

    def take(self, data: dict[str, Any], *, transient: dict[str, str], update: bool) -> None:
        """What is to replace an output that is not there is dropped."""
        key = transient["display_id"]
        assert update or key not in self.outputs, "it would stand there twice"
        if not update or key in self.outputs:
            self.outputs[key] = data

    @property
    def shown(self) -> list[str]:
        """What one can read."""
        return [each["text/html"] for each in self.outputs.values() if each != EMPTY]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    monkeypatch.setattr(place_module, "publish_display_data", page.take)
    return page


@pytest.fixture
def place(page: Page) -> Place:
    place = Place()
    place.begin("starting", "starting")
    place.begin("soon", "soon")
    assert page.shown == ['<div class="nbddp-soon">soon</div>']
    return place


def test_what_comes_takes_the_place_of_what_was_there_first(page: Page, place: Place) -> None:
    place.replace(PANEL)
    assert page.shown == ["panel"]
    place.replace(RECORD)
    assert list(page.outputs.values()) == [EMPTY, RECORD]


def test_what_comes_after_the_output_was_cleared_is_shown_all_the_same(
    page: Page, place: Place
) -> None:
    page.outputs.clear()
    place.replace(PANEL)
    assert page.shown == ["panel"]
    page.outputs.clear()
    place.distrust()
    place.replace(RECORD)
    assert page.shown == ["record"]
    page.outputs.clear()
    place.forget()  # it is known to be cleared: nothing is left to be emptied
    place.replace(PANEL)
    assert list(page.outputs.values()) == [PANEL]


def test_what_belongs_below_stays_below(page: Page, place: Place) -> None:
    place.is_followed = True
    page.outputs["figure"] = {"text/html": "figure"}
    place.replace(RECORD)
    assert page.shown == ["record", "figure"]
