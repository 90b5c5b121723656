"""Check an answer to an exercise of the course, and return a hint if it is wrong.

``exercises.json`` has the exercises whose answers are numbers or names. It holds the right value,
hints for known mistakes, and a hint for all other values. Answers that are code are tested on all
ranks together.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import inf, isclose
from pathlib import Path
from typing import Any

from nbddp.errors import ArgumentError
from nbddp.extensions.course import (  # each registers its judges  # noqa: F401
    code_exercises,
    expert_project,
    mesh_project,
    own_classes,
    parallel_classes,
    plan_project,
    replica_project,
    ring_attention,
    training_functions,
)
from nbddp.extensions.course.grading import CODE_EXERCISES, RIGHT
from nbddp.extensions.course.survival import project  # registers a judge  # noqa: F401
from nbddp.extensions.train.collectives import all_gather
from nbddp.formatting import plural

VALUE_EXERCISES: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("exercises.json").read_text()
)
EXERCISES = sorted([*VALUE_EXERCISES, *CODE_EXERCISES])


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of an answer check; true if the answer is right.

    Attributes:
        is_right: whether the answer is right.
        text: "Right.", or a hint.
    """

    is_right: bool
    text: str

    def __bool__(self) -> bool:
        return self.is_right

    def __repr__(self) -> str:
        return self.text


def check_answer(exercise: str, *answer: Any) -> Judgement:
    """Check an answer to an exercise of the course.

    Call it in the notebook, or in a cell on all ranks. In a cell, all ranks get the same result:
    an answer is right if it is right on each rank.

    Args:
        exercise: notebook and number, such as ``"1.5b"``. Exercises that can be checked say so.
        answer: the requested values: numbers (also NumPy numbers and tensors), or a function,
            which is then tested. A function that communicates needs a cell on all ranks. The
            answer to ``"2.6a"`` is a script, by its path or as text: torchrun runs it.

    Returns:
        The result, which the cell shows: that the answer is right, or a hint.

    Raises:
        ArgumentError: there is no such exercise, or it asks for another number of values.

    >>> check_answer("1.5b", 12, 8, 3, 11)
    Right.
    >>> check_answer("1.1a", 45)
    Not yet. That is the number for one rank: four ranks take 32 images each.
    """
    if exercise not in EXERCISES:
        raise ArgumentError(
            f"there is no exercise {exercise!r} to check; there are: {', '.join(EXERCISES)}"
        )
    wanted = value_names(exercise)
    if len(answer) != len(wanted):
        raise ArgumentError(
            f"exercise {exercise} asks for {plural(len(wanted), 'value')} ({', '.join(wanted)}), "
            f"got {len(answer)}"
        )
    hints = all_gather(_hint(exercise, [*map(as_python_value, answer)]))
    wrong = {rank: hint for rank, hint in enumerate(hints) if hint != RIGHT}
    if not wrong:
        return Judgement(is_right=True, text="Right.")
    rank, hint = min(wrong.items())
    where = "" if len(wrong) == len(hints) else f"On rank {rank}: "
    return Judgement(is_right=False, text=f"Not yet. {where}{hint}")


def value_names(exercise: str) -> list[str]:
    """Return the names of the values that an exercise asks for."""
    if exercise in CODE_EXERCISES:
        return [*inspect.signature(CODE_EXERCISES[exercise]).parameters]
    return [value["name"] for value in VALUE_EXERCISES[exercise]]


def _hint(exercise: str, answer: Sequence[Any]) -> str:
    if exercise in CODE_EXERCISES:
        return CODE_EXERCISES[exercise](*answer)
    hints = (
        _grade(value, given) for value, given in zip(VALUE_EXERCISES[exercise], answer, strict=True)
    )
    return next(filter(None, hints), RIGHT)


def _grade(value: Mapping[str, Any], given: Any) -> str:
    """Return "" if one value of an answer is right, else a hint.

    Args:
        value: an entry of ``exercises.json``, for a name or a number.
        given: the answer.
    """
    right, otherwise = value["right"], value["otherwise"]
    wrong: dict[str, str] = value["wrong"]
    if isinstance(right, str):
        name = str(given).removesuffix("()").rpartition(".")[2]  # of torch.float32, loss.backward()
        return RIGHT if name == right else wrong.get(name, otherwise)
    if not isinstance(given, int | float) or isinstance(given, bool):
        return f"The answer must be a number, this is a {type(given).__name__}."
    if isclose(given, right, rel_tol=value.get("within", 0.02)):
        return RIGHT
    near = (hint for number, hint in wrong.items() if isclose(given, float(number), rel_tol=0.02))
    return next(near, otherwise)


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
