"""A text for the notebooks: 79 of Shakespeare's 154 sonnets, which ship with the package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def sonnets() -> str:
    """A text to train on: 79 of William Shakespeare's sonnets, first printed in 1609.

    They are in the public domain. The spelling is modern, the order is not that of the first print,
    and where editions differ in a word or a comma this text goes with one of them.

    Returns:
        14 lines each, an empty line between two of them, and a line's end after the last.

    >>> print(sonnets()[:42])
    From fairest creatures we desire increase,
    >>> len(sonnets().splitlines())
    1184
    """
    return files("nbddp.train").joinpath("sonnets.txt").read_text(encoding="utf-8")
