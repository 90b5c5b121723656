"""The course's exercises: what is right is right, and each mistake gets a hint that fits it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import answers_failures
import answers_first
import answers_further
import nbformat
import pytest

import nbddp
from nbddp.course import failures, first, further
from nbddp.course.exercises import JUDGES, Judgement, check_answer
from nbddp.errors import ArgumentError

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CALL = re.compile(r'nbddp\.check_answer\("(\d\d\.\d)", ([^)]*)\)')
PARTS = (
    pytest.param(answers_first, first, id="00 to 03"),
    pytest.param(answers_failures, failures, id="04 to 07"),
    pytest.param(answers_further, further, id="08 to 14"),
)
ANSWERS = (answers_first, answers_failures, answers_further)
RIGHT = [(name, each) for part in ANSWERS for name, all_ in part.RIGHT.items() for each in all_]
WRONG = [(name, *each) for part in ANSWERS for name, all_ in part.WRONG.items() for each in all_]
FUNCTIONS = sorted({name for part in ANSWERS for name in part.FUNCTIONS} - {"14.1"})  # a class


@pytest.mark.parametrize(("exercise", "answer"), RIGHT)
def test_what_is_right_is_called_right(exercise: str, answer: tuple[Any, ...]) -> None:
    found = check_answer(exercise, *answer)
    assert found
    assert found == Judgement(is_right=True, text="Right.")
    assert repr(found) == "Right."


@pytest.mark.parametrize(("exercise", "answer", "hint"), WRONG)
def test_a_mistake_gets_a_hint_that_fits_it(
    exercise: str, answer: tuple[Any, ...], hint: str
) -> None:
    found = check_answer(exercise, *answer)
    assert not found
    assert repr(found) == found.text
    assert found.text.startswith("Not yet. ")
    assert hint in found.text


def test_no_hint_of_the_first_names_the_right_number() -> None:
    for exercise, wrong in answers_first.WRONG.items():
        right = [each for all_ in answers_first.RIGHT[exercise] for each in all_]
        values = [each for each in right if isinstance(each, float)]
        for answer, _ in wrong:
            text = check_answer(exercise, *answer).text
            assert not [each for each in values if f" {each:g}" in text], text


def test_no_hint_about_failures_names_the_right_number() -> None:
    for exercise, wrong in answers_failures.WRONG.items():
        right = [each for all_ in answers_failures.RIGHT[exercise] for each in all_]
        numbers = {f"{each:g}" for each in right if isinstance(each, float) or each == 63}
        for answer, _ in wrong:
            words = check_answer(exercise, *answer).text.replace(",", "").rstrip(".").split()
            assert not numbers & {*words}, answer


@pytest.mark.parametrize(("answers", "part"), PARTS)
def test_each_exercise_has_right_and_wrong_answers_here_or_is_a_function(
    answers: Any, part: Any
) -> None:
    assert set(answers.RIGHT) == set(answers.WRONG) == set(part.JUDGES) - answers.FUNCTIONS


@pytest.mark.parametrize("exercise", FUNCTIONS)
def test_a_function_is_asked_for_itself(exercise: str) -> None:
    assert "without calling it" in check_answer(exercise, 3).text


def test_an_exercise_that_is_not_there_and_too_few_values_are_said() -> None:
    with pytest.raises(ArgumentError, match=r"^there is no exercise '9' to check; there are: 00.1"):
        check_answer("9", 1)
    with pytest.raises(ArgumentError, match=r"^there is no exercise \['00.1'\] to check"):
        check_answer(["00.1"], 1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError) as caught:
        check_answer("02.3", 12)
    assert str(caught.value) == (
        "exercise 02.3 asks for 4 values (steps, last_batch, twice, steps_drop_last), got 1"
    )
    with pytest.raises(ArgumentError, match=r"^exercise 00.1 asks for 1 value \(updates\), got 0$"):
        nbddp.check_answer("00.1")


def test_each_exercise_says_how_it_is_checked_and_its_answer_is_checked() -> None:
    asked, answered = set(), set()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        for number, block in re.findall(
            r"<details><summary><b>Exercise (\d)\.</b>(.*?)</details>", prose, re.DOTALL
        ):
            name = f"{path.stem[:2]}.{number}"
            question, answer = block.split("</summary>")
            for part, found in ((question, asked), (answer, answered)):
                calls = CALL.findall(part)
                assert {exercise for exercise, _ in calls} <= {name}
                found |= {exercise for exercise, _ in calls}
            for _, names in CALL.findall(question):
                wanted = inspect.signature(JUDGES[name]).parameters
                assert len(names.split(", ")) == len(wanted)
    assert asked == answered == set(JUDGES)
