"""Format counts, amounts of memory and lists of names."""

from __future__ import annotations

from collections.abc import Sequence

MAX_SHOWN = 4  # names that are shown of a long list


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "step"), plural(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(count: float) -> str:
    """Return an amount of memory.

    >>> [format_bytes(each) for each in (1, 36, 20_480, 1_050_624, 300 << 20, 5 << 29, 141 << 30)]
    ['1 byte', '36 bytes', '20 KiB', '1.0 MiB', '300 MiB', '2.5 GiB', '141.0 GiB']
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            digits = 1 if count < 10 * size or unit == "GiB" else 0
            return f"{count / size:.{digits}f} {unit}"
    return plural(round(count), "byte")


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun.

    >>> with_article("Answer"), with_article("CellEnded")
    ('an Answer', 'a CellEnded')
    """
    return f"an {noun}" if noun[:1] in "AEIOUaeiou" else f"a {noun}"


def format_few(names: Sequence[str], count: int = 0) -> str:
    """Return the first few names and the number of the others.

    Args:
        names: all names, or the first ones.
        count: the number of all names, if ``names`` has only the first ones.

    >>> format_few(["a", "b"]), format_few(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c, d and 1 more')
    """
    shown = ", ".join(names[:MAX_SHOWN])
    more = (count or len(names)) - MAX_SHOWN
    return f"{shown} and {more} more" if shown and more > 0 else shown


def list_some(names: Sequence[str], most: int, *, more: int = 0) -> str:
    """Return the first names, and the number of the others together with ``more``.

    >>> list_some(["a", "b"], 2), list_some(["a", "b", "c"], 2, more=1000)
    ('a, b', 'a, b, 1,001 more')
    """
    others = max(0, len(names) - most) + more
    return ", ".join([*names[:most], *([f"{others:,} more"] if others else [])])
