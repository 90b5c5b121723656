"""A text for the notebooks: 79 of Shakespeare's 154 sonnets, which ship with the package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def sonnets() -> str:
    """Return a text to train on: 79 of William Shakespeare's sonnets, first printed in 1609.

    They are in the public domain. The spelling is modern, and the order is not that of the first
    print. Where editions differ in a word or a comma, this text follows one of them.

    Returns:
        Sonnets of 14 lines each, separated by an empty line. The text ends with a line break.

    >>> print(sonnets()[:42])
    From fairest creatures we desire increase,
    >>> len(sonnets().splitlines())
    1184
    """
    return files("nbddp.extensions.course").joinpath("sonnets.txt").read_text(encoding="utf-8")
