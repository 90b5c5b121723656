"""What judges share: an answer is right, or there is a hint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import wraps
from math import inf, isclose
from typing import Any

from nbddp.train.distributed import all_gather

RIGHT = ""
FUNCTION = "Give the function itself, without calling it: it is tried out here."
ALONE = (
    "One process alone has nobody to talk to: call this in a `%%ddp` cell, on two ranks or more."
)


def tried_on_ranks(judge: Callable[[Any], str]) -> Callable[[Any], str]:
    """For answers whose functions talk to other ranks: there must be some, with functions too."""

    @wraps(judge)
    def judged(function: Any) -> str:
        are_functions = all_gather(callable(function))
        if not all(are_functions):  # whoever tried one out would wait for the others
            return RIGHT if callable(function) else FUNCTION
        return judge(function) if len(are_functions) > 1 else ALONE

    return judged


def as_plain(given: Any) -> Any:
    """What NumPy and torch give for a number or several, as Python has it.

    >>> as_plain(Fraction(1, 4)), as_plain(10**400), as_plain("12")
    (0.25, inf, '12')
    """
    if hasattr(given, "tolist") and hasattr(given, "item"):
        given = given.tolist()
        while isinstance(given, list) and len(given) == 1:
            [given] = given
    if isinstance(given, Decimal | Fraction):
        return float(given)
    if isinstance(given, int) and abs(given) > sys.float_info.max:
        return inf if given > 0 else -inf
    return given


def judge_number(
    given: Any, right: float, hints: Mapping[float, str], otherwise: str, *, within: float = 0.02
) -> str:
    """Judge a number, to ``within``; ``hints`` are for those that one comes to by a mistake."""
    if not isinstance(given, int | float) or isinstance(given, bool):
        return f"A number is asked for, this is a {type(given).__name__}."
    if isclose(given, right, rel_tol=within):
        return RIGHT
    near = (hint for wrong, hint in hints.items() if isclose(given, wrong, rel_tol=0.02))
    return next(near, otherwise)


def first_hint(*judged: str) -> str:
    """Of an answer in parts: the first hint, or that all of it is right."""
    return next(filter(None, judged), RIGHT)
