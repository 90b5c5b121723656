"""A colour for each rank: in a terminal, on any page, and on pages known to be light or dark.

No two of the eight colours of a set look alike with any kind of colour blindness, as
``tests/unit/charts/test_palette.py`` measures.
"""

from __future__ import annotations

INK = "#7b7b7b"  # has the same contrast to white as to #111
ALERT = "#dd4444"  # where values are not finite, and for ranks that died
LETTERS = "ABCDEFGH"  # of compared runs; run A has the colour of rank 0

# of the terminal's 256 colours, eight that can be read on white and on black
_NUMBERS = (69, 137, 64, 169, 30, 198, 58, 26)
_LEVELS = (0, 95, 135, 175, 215, 255)  # of red, green and blue in the terminal's cube

# the same hues with a contrast of 4.5 : 1, which no colour has on both white and black;
# panel.css has them too
LIGHT = ("#0c6cd8", "#840c00", "#00543c", "#603060", "#00786c", "#c03c6c", "#846c00", "#180cd8")
DARK = ("#3c9cfc", "#fccc9c", "#84a80c", "#cc90b4", "#90f0d8", "#fc6c84", "#d8e418", "#e4ccfc")


def terminal_color(rank: int) -> int:
    """Return the colour of a rank as a number of the 256 of a terminal; eight colours repeat."""
    return _NUMBERS[rank % len(_NUMBERS)]


def rank_color(rank: int) -> str:
    """Return the same colour for CSS and matplotlib.

    >>> rank_color(0), rank_color(9)
    ('#5f87ff', '#af875f')
    """
    number = terminal_color(rank) - 16  # the cube comes after sixteen others
    return f"#{_LEVELS[number // 36]:02x}{_LEVELS[number // 6 % 6]:02x}{_LEVELS[number % 6]:02x}"


def rank_class(rank: int) -> str:
    """Return the CSS class of a rank's colour; the style sheet adapts the colour to the page.

    >>> rank_class(9)
    'nbddp-r1'
    """
    return f"nbddp-r{rank % len(_NUMBERS)}"
