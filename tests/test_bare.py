"""What a record keeps of its looks on a page that takes the style sheet away."""

from __future__ import annotations

import re

import pytest

from nbddp.ui.html_pieces import COLORS, SHEET, card, dot


def test_cards_and_dots_have_their_colours_in_themselves() -> None:
    assert COLORS["bad"] in card("boom", is_error=True)
    assert COLORS["warn"] in card("it hangs")
    for kind in ("ok", "bad", "warn", "off"):
        assert f"background-color:{COLORS[kind]}" in dot(kind)


@pytest.mark.parametrize(
    "kind", [r"dot\.nbddp-ok", r"dot\.nbddp-warn", r"dot\.nbddp-bad", "wrong", "waits"]
)
def test_where_the_sheet_is_there_its_colours_come_first(kind: str) -> None:
    [rule] = re.findall(rf"\.nbddp-{kind} {{([^}}]*)}}", SHEET)
    assert "!important" in rule
