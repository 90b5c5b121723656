"""Grade an answer: return an empty text if it is right, else a hint."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import wraps
from math import inf, isclose
from typing import Any

from nbddp.train import this_rank
from nbddp.train.collectives import all_gather

RIGHT = ""
NEEDS_FUNCTION = "Give the function itself, without calling it: it is tested here."
NEEDS_CLASS = "Give the class itself, without creating an object: it is tested here."
NEEDS_MORE_RANKS = (
    "A single process has no other rank to talk to: call this in a `%%ddp` cell, on two ranks or "
    "more."
)


class WrongError(Exception):
    """An answer is wrong. The text is the hint; it is empty if only other ranks have one."""


def stop_if(hint: str | None) -> None:
    """Stop all ranks if one of them has a hint, as the next test may contain a collective."""
    if any(all_gather(hint or "")):
        raise WrongError(hint or "")


def needs_ranks(grade: Callable[[Any], str]) -> Callable[[Any], str]:
    """Decorate a grader of functions that communicate: all ranks must give a function."""

    @wraps(grade)
    def graded(function: Any) -> str:
        are_functions = all_gather(callable(function))
        if not all(are_functions):  # a rank that called its function would wait for the others
            return RIGHT if callable(function) else NEEDS_FUNCTION
        return grade(function) if len(are_functions) > 1 else NEEDS_MORE_RANKS

    return graded


def needs_class(grade: Callable[[Any], str | None]) -> Callable[[Any], str]:
    """Decorate a grader of classes that communicate. It returns its hint, or raises it."""

    @wraps(grade)
    def graded(given: Any) -> str:
        import torch  # answers that are numbers need no torch

        if this_rank.world_size() == 1:
            return NEEDS_MORE_RANKS
        try:
            stop_if(None if isinstance(given, type) else NEEDS_CLASS)
            with torch.random.fork_rng(devices=[]):
                return grade(given) or RIGHT
        except WrongError as wrong:
            return str(wrong)

    return graded


def hint_to_function(given: Any, names: Sequence[str]) -> str:
    """Return a hint if this is no function, or one that does not take these arguments."""
    import torch  # answers that are numbers need no torch

    if not callable(given) or isinstance(given, torch.nn.Module):
        return NEEDS_FUNCTION
    return hint_to_signature(given, names)


def hint_to_signature(given: Callable[..., Any], names: Sequence[str]) -> str:
    """Return a hint if a function or class cannot be called with these positional arguments."""
    try:
        signature = inspect.signature(given)
    except ValueError:  # some functions in C have none
        return RIGHT
    try:
        signature.bind(*names)
    except TypeError:
        return f"It is called with `({', '.join(names)})`. Yours takes `{signature}`."
    return RIGHT


def as_python_value(given: Any) -> Any:
    """Convert NumPy and torch numbers to Python numbers or lists.

    >>> as_python_value(Fraction(1, 4)), as_python_value(10**400), as_python_value("12")
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


def grade_number(
    given: Any, right: float, hints: Mapping[float, str], otherwise: str, *, within: float = 0.02
) -> str:
    """Return "" if a number is right within a relative tolerance, else a hint.

    Args:
        given: the answer.
        right: the right number.
        hints: hints by the numbers that result from known mistakes.
        otherwise: the hint for all other numbers.
        within: the relative tolerance.
    """
    if not isinstance(given, int | float) or isinstance(given, bool):
        return f"The answer must be a number, this is a {type(given).__name__}."
    if isclose(given, right, rel_tol=within):
        return RIGHT
    near = (hint for wrong, hint in hints.items() if isclose(given, wrong, rel_tol=0.02))
    return next(near, otherwise)


def grade(value: Mapping[str, Any], given: Any) -> str:
    """Return "" if one value of an answer is right, else a hint.

    Args:
        value: an entry of ``exercises.json``, for a name or a number.
        given: the answer.
    """
    right, wrong, otherwise = value["right"], value["wrong"], value["otherwise"]
    if isinstance(right, str):
        name = str(given).removeprefix("torch.")  # a dtype
        return RIGHT if name == right else wrong.get(name, otherwise)
    hints = {float(each): hint for each, hint in wrong.items()}
    return grade_number(given, right, hints, otherwise, within=value.get("within", 0.02))
