"""A colour for each rank: in a terminal, on any page, and on pages known to be light or dark.

The eight colours of a set can be told apart with every kind of colour blindness:
``tests/unit/charts/test_palette.py`` measures it.
"""

from __future__ import annotations

from collections.abc import Sequence

INK = "#7b7b7b"  # has the same contrast to white as to #111
ALERT = "#dd4444"  # for values that are not finite, and for ranks that died
LETTERS = "ABCDEFGH"  # of compared runs; run A has the colour of rank 0

# eight of the terminal's 256 colours that are readable on white and on black
_NUMBERS = (69, 137, 64, 169, 30, 198, 58, 26)
_LEVELS = (0, 95, 135, 175, 215, 255)  # of red, green and blue in the terminal's colour cube

# The same hues with a contrast of 4.5 : 1. No colour has that on both white and black.
# panel.css has a copy.
LIGHT = ("#0c6cd8", "#840c00", "#00543c", "#603060", "#00786c", "#c03c6c", "#846c00", "#180cd8")
DARK = ("#3c9cfc", "#fccc9c", "#84a80c", "#cc90b4", "#90f0d8", "#fc6c84", "#d8e418", "#e4ccfc")


def terminal_color(rank: int) -> int:
    """Return a rank's index into the terminal's 256 colours; eight colours repeat."""
    return _NUMBERS[rank % len(_NUMBERS)]


def rank_color(rank: int) -> str:
    """Return the same colour as hexadecimal RGB, for CSS and matplotlib.

    >>> rank_color(0), rank_color(9)
    ('#5f87ff', '#af875f')
    """
    return f"#{bytes(cube_rgb(terminal_color(rank))).hex()}"


def cube_rgb(color: int) -> Sequence[int]:
    """Return red, green and blue of a colour in the terminal's cube, from 16 to 231."""
    return [_LEVELS[(color - 16) // step % 6] for step in (36, 6, 1)]


def rank_class(rank: int) -> str:
    """Return the CSS class of a rank's colour; the style sheet adapts the colour to the page.

    >>> rank_class(9)
    'nbddp-r1'
    """
    return f"nbddp-r{rank % len(_NUMBERS)}"
