"""What could not be carried to a new rank, in a bounded number of words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

NAMES = 20  # for one reason: each is lost as a whole
PARTS = 5  # of what came, for one reason
MOST = 60  # of all of them
REASONS = 20  # that are told apart where there are more
LONGEST = 300  # characters of a reason


def few_of(left: Mapping[str, str]) -> tuple[dict[str, str], dict[str, int]]:
    """Some of what was left, in its order, and by reason how many more there are.

    Names go before parts of what came. Reasons that are too many are counted as ``""``.

    >>> few_of({f"locks[{number}]": "a lock" for number in range(3000)})[1]
    {'a lock': 2995}
    """
    told: dict[str, str] = {}
    more: Counter[str] = Counter()
    counts: Counter[tuple[str, bool]] = Counter()
    for name in sorted(left, key=lambda each: not each.isidentifier()):
        why, is_name = left[name][:LONGEST], name.isidentifier()
        counts[why, is_name] += 1
        if counts[why, is_name] <= (NAMES if is_name else PARTS) and len(told) < MOST:
            told[name] = why
        else:
            more[why if why in more or len(more) < REASONS else ""] += 1
    return {name: told[name] for name in left if name in told}, dict(more)
