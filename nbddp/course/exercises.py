"""The course's exercises: whether an answer is right, or what to think of next.

``exercises.json`` has those whose answer is numbers or names: for each value the right one, hints
for known mistakes, and a hint for all else. Answers that are code are tried out, on all ranks
together.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.course.code_exercises import CODE_EXERCISES
from nbddp.course.grading import RIGHT, as_python_value, grade
from nbddp.errors import ArgumentError
from nbddp.formatting import plural
from nbddp.train.collectives import all_gather

VALUE_EXERCISES: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("exercises.json").read_text()
)
EXERCISES = sorted([*VALUE_EXERCISES, *CODE_EXERCISES])


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came of an answer; true if it is right.

    Attributes:
        is_right: whether it is.
        text: that it is, or a hint.
    """

    is_right: bool
    text: str

    def __bool__(self) -> bool:
        return self.is_right

    def __repr__(self) -> str:
        return self.text


def check_answer(exercise: str, *answer: Any) -> Judgement:
    """Look at an answer to an exercise of the course.

    Call it in the notebook, or in a cell on all ranks. There all ranks get the same verdict: an
    answer is right if it is right on each rank.

    Args:
        exercise: notebook and number, as ``"02.3"``; only those that say so have an answer that
            can be looked at.
        answer: what the exercise asks for: numbers (of NumPy and tensors, too), or a function,
            which is tried out. A function that talks to other ranks needs a cell on all ranks.

    Returns:
        Shown under the cell: that it is right, or a hint.

    Raises:
        ArgumentError: there is no such exercise, or it asks for more or fewer values.

    >>> check_answer("02.3", 12, 8, 3, 11)
    Right.
    >>> check_answer("00.1", 45)
    Not yet. That is one rank's: four take 32 images each.
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
        grade(value, given) for value, given in zip(VALUE_EXERCISES[exercise], answer, strict=True)
    )
    return next(filter(None, hints), RIGHT)
