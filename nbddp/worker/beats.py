"""A beat that the ranks of a machine share: what they do on it, their reader is woken for once.

Most of what a letter costs the kernel is to get threads out of their sleep, with cold caches: for
64 that come together it does so once, for 64 that come one by one, 64 times.
"""

from __future__ import annotations

from math import floor


def last_beat(until: float, period: float) -> float:
    """The last beat until then, of ``time.monotonic()``, a clock that all processes share.

    >>> last_beat(10.07, 0.05), last_beat(10.05, 0.05)
    (10.05, 10.05)
    """
    return floor(until / period + 1e-6) * period


def until_next_beat(now: float, period: float) -> float:
    """Seconds until the next beat after this time.

    >>> until_next_beat(10.25, 0.5), until_next_beat(10.5, 0.5)
    (0.25, 0.5)
    """
    return last_beat(now, period) + period - now
