"""Looks that matter, as inline styles: they stay where a page takes the style sheet away.

So does JupyterLab in a notebook that is not trusted. Where the sheet is there, its own colours,
which follow the page's theme, come first.
"""

from __future__ import annotations

COLORS = {"ok": "#2e9e44", "bad": "#d83434", "warn": "#d9822b", "busy": "#2196f3", "off": "#888888"}
STRONG = "font-weight:600"
CARD_HEIGHT = 600  # pixels at most: a message may have thousands of lines


def color_of(kind: str) -> str:
    """The colour of one of the sheet's kinds; where it has none, something goes on.

    >>> color_of("nbddp-bad"), color_of("")
    ('#d83434', '#2196f3')
    """
    return COLORS.get(kind.removeprefix("nbddp-"), COLORS["busy"])


def dot(kind: str) -> str:
    """A dot that says how it is."""
    return (
        f'<span class="nbddp-dot {kind}" style="display:inline-block;width:8px;height:8px;'
        f'border-radius:4px;margin-right:6px;background-color:{color_of(kind)}"></span>'
    )


def card_style(*, is_error: bool) -> str:
    """Of a few lines that nobody should miss."""
    color = COLORS["bad" if is_error else "warn"]
    scrolls = f"max-height:{CARD_HEIGHT}px;overflow-y:auto"
    return f"border-left:3px solid {color};padding:5px 10px;margin:5px 0;{scrolls}"


def ink(kind: str) -> str:
    """Of words that say that something is wrong, or waits."""
    return f"color:{COLORS[kind]}"
