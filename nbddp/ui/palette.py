"""A colour for each rank, the same in the panel as in a terminal."""

from __future__ import annotations

# of the terminal's 256 colours, eight that can be told apart on white and on black
_NUMBERS = (32, 166, 35, 133, 37, 168, 136, 69)
_LEVELS = (0, 95, 135, 175, 215, 255)  # of red, green and blue in the terminal's cube


def terminal_color(rank: int) -> int:
    """The colour of a rank as a number of the terminal's 256; after eight ranks they repeat."""
    return _NUMBERS[rank % len(_NUMBERS)]


def rank_color(rank: int) -> str:
    """The same colour, as CSS and matplotlib write it.

    >>> rank_color(0), rank_color(9)
    ('#0087d7', '#d75f00')
    """
    number = terminal_color(rank) - 16  # the cube comes after sixteen others
    return f"#{_LEVELS[number // 36]:02x}{_LEVELS[number // 6 % 6]:02x}{_LEVELS[number % 6]:02x}"
