"""What a record keeps of its looks on a page that takes the style sheet away."""

from __future__ import annotations

import re

import pytest

from nbddp.ui.panel.bare import COLORS, dot
from nbddp.ui.panel.html import card
from nbddp.ui.panel.style import SHEET


def test_a_failure_has_a_red_edge_and_another_card_an_orange_one() -> None:
    assert f"border-left:3px solid {COLORS['bad']}" in card("boom", is_error=True)
    assert f"border-left:3px solid {COLORS['warn']}" in card("it hangs")


@pytest.mark.parametrize("kind", ["ok", "bad", "warn", "off"])
def test_a_dot_has_a_size_and_its_colour(kind: str) -> None:
    drawn = dot(f"nbddp-{kind}")
    assert "width:8px;height:8px" in drawn
    assert f"background-color:{COLORS[kind]}" in drawn


@pytest.mark.parametrize(
    "kind", [r"dot\.nbddp-ok", r"dot\.nbddp-warn", r"dot\.nbddp-bad", "wrong", "waits"]
)
def test_where_the_sheet_is_there_its_colours_come_first(kind: str) -> None:
    [rule] = re.findall(rf"\.nbddp-{kind} {{([^}}]*)}}", SHEET)
    assert "!important" in rule
