"""The course's exercises: what is right is right, and each mistake gets a hint that fits it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import answers_failures
import answers_first
import answers_functions
import answers_further
import nbformat
import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import nbddp
from nbddp.course import failures, first, further
from nbddp.course.exercises import JUDGES, Judgement, check_answer
from nbddp.errors import ArgumentError

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CALL = re.compile(r'nbddp\.check_answer\("(\d\d\.\d)", ([^)]*)\)')
EXERCISE = re.compile(r"<details><summary><b>Exercise (\d)\.</b>(.*?)</details>", re.DOTALL)
PARTS = ((answers_first, first), (answers_failures, failures), (answers_further, further))
RIGHT = {name: each for answers, _ in PARTS for name, each in answers.RIGHT.items()}
WRONG = {name: each for answers, _ in PARTS for name, each in answers.WRONG.items()}
FUNCTIONS = set().union(*(answers.FUNCTIONS for answers, _ in PARTS))
ON_RANKS = FUNCTIONS - set(answers_functions.WRONG)


def test_each_exercise_has_right_and_wrong_answers_here_or_is_a_function() -> None:
    for answers, part in PARTS:
        assert set(answers.RIGHT) == set(answers.WRONG) == set(part.JUDGES) - answers.FUNCTIONS


def test_what_is_right_is_called_right() -> None:
    functions = {name: [(each,) for each in all_] for name, all_ in answers_functions.RIGHT.items()}
    for exercise, answers in (RIGHT | functions).items():
        for answer in answers:
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


@pytest.mark.parametrize("exercise", WRONG)
def test_a_mistake_gets_a_hint_that_fits_it(exercise: str, snapshot: SnapshotAssertion) -> None:
    hints = [
        f"{', '.join(map(str, answer)):.120}: {hint(exercise, *answer)}"
        for answer in WRONG[exercise]
    ]
    assert hints == snapshot


@pytest.mark.parametrize("exercise", answers_functions.WRONG)
def test_a_wrong_function_gets_a_hint_that_fits_it(
    exercise: str, snapshot: SnapshotAssertion
) -> None:
    wrong = answers_functions.WRONG[exercise]
    assert {name: hint(exercise, answer) for name, answer in wrong.items()} == snapshot


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


def test_a_function_is_asked_for_itself(snapshot: SnapshotAssertion) -> None:
    assert {name: hint(name, 3) for name in sorted(FUNCTIONS)} == snapshot


def test_no_hint_names_the_right_number() -> None:
    for answers in (answers_first, answers_failures):
        for exercise, wrong in answers.WRONG.items():
            right = [each for all_ in answers.RIGHT[exercise] for each in all_]
            numbers = {f"{each:g}" for each in right if isinstance(each, float) or each == 63}
            for answer in wrong:
                words = hint(exercise, *answer).replace(",", "").rstrip(".").split()
                assert not numbers & {*words}, (exercise, answer)


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
                assert len(names.split(", ")) == len(inspect.signature(JUDGES[name]).parameters)
    assert asked == answered == set(JUDGES)
