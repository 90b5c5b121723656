"""The course's exercises: what is right is right, and each mistake gets a hint that fits it."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import answers_functions
import nbformat
import numpy as np
import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import nbddp
from nbddp.course.code_exercises import CODE_EXERCISES
from nbddp.course.exercises import EXERCISES, VALUES, Judgement, check_answer, names_of
from nbddp.errors import ArgumentError

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CALL = re.compile(r'nbddp\.check_answer\("(\d\d\.\d)", ([^)]*)\)')
EXERCISE = re.compile(r"<details><summary><b>Exercise (\d)\.</b>(.*?)</details>", re.DOTALL)
ON_RANKS = set(CODE_EXERCISES) - set(answers_functions.RIGHT)
FAR_OFF = {int: 123456, float: 123456, str: "none"}


def right(exercise: str) -> list[Any]:
    return [value["right"] for value in VALUES[exercise]]


def with_one(exercise: str, place: int, wrong: Any) -> list[Any]:
    """The right answer, but for one of its values."""
    return [wrong if each == place else value for each, value in enumerate(right(exercise))]


def test_what_is_right_is_called_right() -> None:
    answers = answers_functions.RIGHT | {name: [right(name)] for name in VALUES}
    answers["00.1"] += [[12.0], [np.int64(12)], [torch.tensor([12])], [Fraction(12)], [12.2]]
    answers["03.1"] += [[torch.float32, "torch.float32"]]
    for exercise, given in answers.items():
        for answer in given:
            found = check_answer(exercise, *answer)
            assert found == Judgement(is_right=True, text="Right."), (exercise, answer)
            assert found
            assert repr(found) == "Right."


def hint(exercise: str, *answer: Any) -> str:
    """What is said of a wrong answer."""
    found = check_answer(exercise, *answer)
    assert not found
    assert repr(found) == found.text
    assert found.text.startswith("Not yet. ")
    return found.text


def test_each_mistake_that_is_known_gets_its_hint_and_any_other_one_the_last() -> None:
    for exercise, values in VALUES.items():
        for place, value in enumerate(values):
            kind = type(value["right"])
            for wrong, expected in value["wrong"].items():
                given = wrong if kind is str else float(wrong)
                said = hint(exercise, *with_one(exercise, place, given))
                assert said == f"Not yet. {expected}", (exercise, wrong)
            said = hint(exercise, *with_one(exercise, place, FAR_OFF[kind]))
            assert said == f"Not yet. {value['otherwise']}", exercise


@pytest.mark.parametrize(
    "given",
    ["12", True, np.bool_(True), None, 12j, torch.tensor([12, 12])],
    ids=["text", "true", "NumPy's true", "None", "complex", "two numbers"],
)
def test_what_is_no_number_is_called_so(given: Any, snapshot: SnapshotAssertion) -> None:
    assert hint("00.1", given) == snapshot


@pytest.mark.parametrize("given", [float("nan"), torch.tensor(float("nan")), 10**400, -(10**400)])
def test_an_odd_number_is_only_wrong(given: Any) -> None:
    assert hint("00.1", given) == f"Not yet. {VALUES['00.1'][0]['otherwise']}"


@pytest.mark.parametrize("exercise", answers_functions.WRONG)
def test_a_wrong_answer_that_is_tried_out_gets_a_hint_that_fits_it(
    exercise: str, snapshot: SnapshotAssertion
) -> None:
    wrong = answers_functions.WRONG[exercise]
    assert {name: hint(exercise, *answer) for name, answer in wrong.items()} == snapshot


def test_an_iterator_that_is_tried_out_leaves_the_random_state_as_it_was() -> None:
    before = torch.get_rng_state()
    assert check_answer("04.1", answers_functions.begin)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_mistake_inside_a_function_is_the_users_to_see() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        check_answer("12.3", lambda: [0])


def test_a_function_that_talks_to_other_ranks_is_not_judged_where_there_are_none(
    snapshot: SnapshotAssertion,
) -> None:
    assert len(ON_RANKS) == 7
    called = Mock()
    assert {hint(exercise, called) for exercise in ON_RANKS} == snapshot
    called.assert_not_called()


def test_no_hint_names_the_right_number() -> None:
    for exercise, values in VALUES.items():
        for value in values:
            hints = [*value["wrong"].values(), value["otherwise"]]
            words = " ".join(hints).replace(",", "").replace(".", " ").split()
            assert str(value["right"]) not in words or value["right"] in (0, 1, 2, 3), exercise


def test_an_exercise_that_is_not_there_and_too_few_values_are_refused(
    snapshot: SnapshotAssertion,
) -> None:
    refused = []
    for exercise, *answer in (("9", 1), (["00.1"], 1), ("02.3", 12), ("00.1",)):
        with pytest.raises(ArgumentError) as caught:
            nbddp.check_answer(exercise, *answer)  # type: ignore[arg-type]
        refused.append(str(caught.value))
    assert refused == snapshot


def test_each_exercise_says_how_it_is_checked_and_its_answer_is_checked() -> None:
    asked, answered = set(), set()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        for number, block in EXERCISE.findall(prose):
            name = f"{path.stem[:2]}.{number}"
            question, answer = block.split("</summary>")
            for part, found in ((question, asked), (answer, answered)):
                calls = CALL.findall(part)
                assert {exercise for exercise, _ in calls} <= {name}
                found |= {exercise for exercise, _ in calls}
            for _, names in CALL.findall(question):
                assert len(names.split(", ")) == len(names_of(name))
    assert asked == answered == set(EXERCISES)
