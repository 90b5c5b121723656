"""The course's exercises: right answers are accepted, and each mistake gets a fitting hint."""

import re
import signal
import threading
from contextlib import nullcontext
from copy import deepcopy
from datetime import timedelta
from fractions import Fraction
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lessons import definitions
from processes import wait_until
from refusals import refusal
from syrupy.assertion import SnapshotAssertion
from torch import nn

import nbddp
from nbddp.errors import ArgumentError
from nbddp.extensions.course import grading, time_limit
from nbddp.extensions.course.exercises import (
    EXERCISES,
    VALUE_EXERCISES,
    Judgement,
    check_answer,
    value_names,
)
from nbddp.extensions.course.grading import HINTS
from nbddp.extensions.course.mesh_project import GPT, LENGTH, LETTERS
from nbddp.extensions.course.plan_project import Layout, best_layout


def begin(loader, state):
    batches = iter(loader)
    torch.set_rng_state(state)
    return batches


def missing(store, rank, world_size, seconds):
    keys = [f"here/{each}" for each in range(world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistStoreError:
        return [each for each, key in enumerate(keys) if not store.check([key])]
    return []


def in_turn(store, rank, world_size, seconds):
    store.set(f"here/{rank}", "")
    absent = []
    for other in range(world_size):
        try:
            store.wait([f"here/{other}"], timedelta(seconds=seconds))
        except dist.DistStoreError:
            absent.append(other)
    return absent


class Server:
    """As notebook A1 has it."""

    def __init__(self):
        self.lock = threading.RLock()
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.version, self.history, self.is_open = 0, [], True

    def push(self, trainer, version, gradients, loss):
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            self.history.append((trainer, self.version - version, loss))
            self.version += 1
            return self.is_open

    def close(self):
        self.is_open = False


def refusing(*, above: int, says: Any = None, notes: bool = False) -> type[Server]:

    class Strict(Server):
        def push(self, trainer, version, gradients, loss):
            with self.lock:
                if self.version - version <= above:
                    return super().push(trainer, version, gradients, loss)
                if notes:
                    self.history.append((trainer, self.version - version, loss))
                return self.is_open if says is None else says

    return Strict


class Unlocked(Server):
    def push(self, trainer, version, *given):
        if self.version - version > 4:
            return self.is_open
        return super().push(trainer, version, *given)


class LockedTwice(Server):
    def push(self, trainer, version, *given):
        with self.lock:
            is_stale = self.version - version > 4
        return self.is_open if is_stale else super().push(trainer, version, *given)


class WithoutLock(refusing(above=4)):
    def push(self, *given):
        self.lock = nullcontext()
        return super().push(*given)


class Counting(refusing(above=4)):
    def push(self, trainer, version, *given):
        if self.version - version > 4:
            self.version += 1
        return super().push(trainer, version, *given)


class NotApplying(refusing(above=4)):
    def push(self, *given):
        before = deepcopy(self.model.state_dict())
        answer = super().push(*given)
        self.model.load_state_dict(before)
        return answer


class Noting(refusing(above=4)):
    def push(self, trainer, version, *given):
        answer = super().push(trainer, version, *given)
        self.history[:] = [(trainer, version, loss) for trainer, _, loss in self.history]
        return answer


LINES = """
if rank == 5:
    dist.all_reduce(x){}
    dist.all_reduce(y){}
"""
OK = "  # nbddp: ok ND101"


exec(definitions("3.9", "pack", "pack_tightly"))
in_order, tightly = locals()["pack"], locals()["pack_tightly"]


def first_fit(lengths, size):
    rows = []
    for document, length in enumerate(lengths):
        fits = (row for row in rows if length + sum(lengths[each] for each in row) <= size)
        row = next(fits, [])
        rows += [] if row else [row]
        row.append(document)
    return rows


def too_soon(loader, state):
    torch.set_rng_state(state)
    return iter(loader)


def plan(shape, cluster, texts):
    return tuple(best_layout(shape, cluster, texts))


def planning(**changes):
    """Return a plan with another number for each changed one, if it is a number of ranks."""

    def other(shape, cluster, texts):
        layout = best_layout(shape, cluster, texts)
        return layout._replace(**{name: change(layout) for name, change in changes.items()})

    return other


PLAN = definitions("3.8", "needed", "seconds", "plan")


def with_formula(old, new):
    """Return the notebook's plan with another formula."""
    assert PLAN.count(old) == 1, old
    names: dict[str, Any] = {}
    exec(PLAN.replace(old, new), names)
    return names["plan"]


def one_way(name):
    def other(_, cluster, texts):
        ranks = cluster.machines * cluster.gpus
        return Layout(1, 1, 1, texts)._replace(**{name: ranks, "batches": 1})

    return other


RIGHT_ANSWERS: dict[str, list[tuple[Any, ...]]] = {
    "1.2b": [(missing,), (lambda *given: set(missing(*given)),)],
    "3.1c": [(1.0078125,), (1 + 2**-7,)],
    "2.1a": [(begin,)],
    "2.1b": [({1, 2},), ([1, 2],), ((2, 1, 2),), ({"1", "2"},)],
    "2.3b": [(0.3, 1.2), (1.18, 10.36)],
    "2.5a": [(LINES.format(OK, ""),), (LINES.format("  #nbddp: ok ND101, ND102", ""),)],
    "2.5c": [({3, 6, 8, 9, 11},), ([11, 9, 8, 6, 3],), (torch.tensor([3, 6, 8, 9, 11]),)],
    "3.5c": [
        (lambda rank: range(rank // 8 * 8, rank // 8 * 8 + 8),),
        (lambda rank: torch.arange(64).view(8, 8)[rank // 8].tolist(),),
        (lambda rank: torch.arange(64).view(8, 8)[rank // 8],),
        (lambda rank: range(rank // 4 * 4, rank // 4 * 4 + 4),),
        (lambda rank: {rank, rank ^ 1},),
    ],
    "3.8b": [(plan,), (lambda *given: best_layout(*given),), (lambda *given: [*plan(*given)],)],
    "3.9b": [(tightly,), (lambda lengths, size: tightly(lengths, size)[::-1],)],
    "A1a": [(refusing(above=4),)],
}
WRONG_ANSWERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "1.2b": {
        "an error": (lambda store, *_: store.wait(["never"], timedelta(seconds=0.1)),),
        "no key set": (lambda store, *_: [n for n in range(4) if not store.check([f"here/{n}"])],),
        "no time for a late rank": (lambda s, rank, size, _: missing(s, rank, size, 0.2),),
        "too long": (lambda s, rank, size, sec: missing(s, rank, size + 1, sec * 0.9)[:-1],),
        "each in turn": (in_turn,),
        "one of two": (lambda *given: missing(*given)[:1],),
        "those that came": (lambda *given: [n for n in range(4) if n not in missing(*given)],),
        "a number": (lambda *given: len(missing(*given)),),
        "nothing": (lambda *given: missing(*given) or None,),
        "no function": ([],),
    },
    "3.1c": {
        "fp32's": (1 + 2**-23,),
        "fp16's": (1 + 2**-10,),
        "half of it": (1 + 2**-8,),
        "one": (1,),
        "no number": ("more",),
    },
    "2.1a": {
        "restored too soon": (too_soon,),
        "one batch taken": (lambda *given: islice(begin(*given), 1, None),),
        "the loader": (lambda *given: given[0],),
        "nothing": (lambda *_: None,),
        "no function": (3,),
    },
    "2.1b": {
        "the older alone": ({1},),
        "the newer alone": ({2},),
        "none": (set(),),
        "one that is not there": ({0, 1},),
        "a number": (1,),
        "text": ("12",),
    },
    "2.3b": {
        "cheaper": (1.2, 0.3),
        "the same": (0.3, 0.3),
        "nothing": (0, 0.3),
        "no number": (None, 0.3),
        "true": (0.3, True),
        "not a number": (float("nan"), 1.0),
    },
    "2.5a": {
        "as before": (LINES.format("", ""),),
        "another rule": (LINES.format("  # nbddp: ok ND102", ""),),
        "the other line": (LINES.format("", OK),),
        "both lines": (LINES.format(OK, OK),),
        "a line of its own": ("# nbddp: ok ND101\n" + LINES.format("", ""),),
        "other lines": ("dist.all_reduce(x)",),
        "no Python": ("if rank == 5",),
        "a number": (5,),
    },
    "2.5c": {
        **{f"without {each}": ({3, 6, 8, 9, 11} - {each},) for each in (3, 6, 8, 9, 11)},
        **{f"and {each}": ({3, 6, 8, 9, 11, each},) for each in (1, 2, 4, 5, 7, 10, 12)},
        "none": (set(),),
        "a name": ({"ND210"},),
        "a number": (3,),
        "text": ("3",),
    },
    "3.5c": {
        "a rank of each machine": (lambda rank: range(rank % 8, 64, 8),),
        "without itself": (lambda rank: [each for each in range(8) if each != rank],),
        "itself alone": (lambda rank: [rank],),
        "groups that overlap": (lambda rank: {rank, rank // 8 * 8},),
        "unequal groups": (
            lambda rank: [rank] if rank % 8 > 3 else range(rank // 8 * 8, rank // 8 * 8 + 4),
        ),
        "the machine": (lambda rank: rank // 8,),
        "text": (lambda rank: [str(rank)],),
        "no function": (3,),
    },
    "3.8b": {
        "no function": ((8, 1, 1, 4),),
        "nothing": (lambda *_: None,),
        "three numbers": (lambda *given: plan(*given)[:3],),
        "a fraction": (lambda *given: (plan(*given)[0] / 2, *plan(*given)[1:]),),
        "too few ranks": (planning(data=lambda at: max(1, at.data // 2)),),
        "only data": (one_way("data"),),
        "only tensor": (one_way("tensor"),),
        "only a pipeline": (one_way("pipeline"),),
        "three texts of a batch": (planning(batches=lambda _: 3),),
        "no micro-batches": (planning(batches=lambda _: 1),),
        "no loss": (with_formula(" + 12 * words / t * tokens", ""),),
        "no whole parameters": (with_formula("state + whole", "state"),),
        "all stages in flight": (with_formula("min(p, m)", "p"),),
        "no bubble": (with_formula(" * (m + p - 1) / m", ""),),
        "no passing": (with_formula(" + passing", ""),),
        "passing inside": (with_formula("d * t * p <=", "1 <="),),
        "gathering between machines": (with_formula("d * t <=", "d * t * 1000 <="),),
        "heads in parts": (with_formula("== shape.heads % n == 0", "== 0"),),
        "more micro-batches": (lambda *given: (*plan(*given)[:3], 8),),
        "more tensor": (lambda _, c, n: (c.machines, 8, 1, max(1, n // c.machines)),),
        "a pipeline on one machine": (lambda *_: (2, 1, 4, 32),),
        "as for one machine": (
            lambda s, c, n: (
                plan(s, c, n) if c.machines == 1 else (c.machines, 8, 1, n // c.machines)
            ),
        ),
    },
    "3.9b": {
        "a row for each": (lambda lengths, _: [[each] for each in range(len(lengths))],),
        "in order": (in_order,),
        "first fit": (first_fit,),
        "rows too long": (lambda lengths, size: tightly(lengths, size + 60),),
        "a row lost": (lambda *given: tightly(*given)[1:],),
        "a row twice": (lambda *given: [*tightly(*given), tightly(*given)[0]],),
        "lengths, not documents": (lambda lengths, _: [[each] for each in lengths],),
        "documents cut": (lambda lengths, _: [[*range(len(lengths))]],),
        "a number": (lambda *given: len(tightly(*given)),),
        "no function": (3,),
    },
    "A1a": {
        "never refuses": (Server,),
        "refuses above 5": (refusing(above=5),),
        "refuses above 3": (refusing(above=3),),
        "notes what it refuses": (refusing(above=4, notes=True),),
        "counts what it refuses": (Counting,),
        "counts, and does not apply": (NotApplying,),
        "notes versions": (Noting,),
        "answers nothing": (refusing(above=4, says=()),),
        "answers open": (refusing(above=4, says=True),),
        "checks without the lock": (Unlocked,),
        "takes the lock twice": (LockedTwice,),
        "uses no lock": (WithoutLock,),
        "a server, not the class": (refusing(above=4)(),),
        "another class": (dict,),
    },
}


NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
CALL = re.compile(r'nbddp\.check_answer\("(\S+)", ([^)]*)\)')
EXERCISE = re.compile(r"<details><summary><b>Exercise (\S+)\.</b>(.*?)</details>", re.DOTALL)
ON_RANKS = set(grading.CODE_EXERCISES) - {*RIGHT_ANSWERS, "2.6a"}  # it starts ranks of its own
FAR_OFF = {int: 123456, float: 123456, str: "none"}


def right(exercise: str) -> list[Any]:
    return [value["right"] for value in VALUE_EXERCISES[exercise]]


def test_right_answers_are_accepted() -> None:
    before = torch.get_rng_state()
    answers = RIGHT_ANSWERS | {name: [right(name)] for name in VALUE_EXERCISES}
    answers["1.1a"] += [[12.0], [np.int64(12)], [torch.tensor([12])], [Fraction(12)], [12.2]]
    answers["3.4b"] += [[0.0159], [0.016]]
    answers["3.1a"] += [[torch.float32, "torch.float32"]]
    answers["2.3h"] += [[6, "dist.all_gather", "shapes", "pad"]]
    answers["2.5e"] += [[3, "loss.backward()", "killed", "restart"]]
    for exercise, given in answers.items():
        for answer in given:
            found = check_answer(exercise, *answer)
            assert found == Judgement(is_right=True, text="Right."), (exercise, answer)
            assert found
            assert repr(found) == "Right."
            assert torch.equal(torch.get_rng_state(), before), exercise


def hint(exercise: str, *answer: Any) -> str:
    found = check_answer(exercise, *answer)
    assert not found
    assert repr(found) == found.text
    assert found.text.startswith("Not yet. ")
    return found.text


def test_each_known_mistake_gets_its_hint_and_any_other_mistake_the_general_hint() -> None:
    for exercise, values in VALUE_EXERCISES.items():
        for place, value in enumerate(values):
            kind = type(value["right"])
            convert = str if kind is str else float
            expected = {convert(wrong): said for wrong, said in value["wrong"].items()}
            for given, text in (expected | {FAR_OFF[kind]: value["otherwise"]}).items():
                answer = right(exercise)
                answer[place] = given
                assert hint(exercise, *answer) == f"Not yet. {text}", (exercise, given)


@pytest.mark.parametrize(
    "given",
    ["12", True, np.bool_(True), None, 12j, torch.tensor([12, 12])],
    ids=["text", "true", "NumPy's true", "None", "complex", "two numbers"],
)
def test_an_answer_that_is_not_a_number_gets_a_hint(
    given: Any, snapshot: SnapshotAssertion
) -> None:
    assert hint("1.1a", given) == snapshot


@pytest.mark.parametrize("given", [float("nan"), torch.tensor(float("nan")), 10**400, -(10**400)])
def test_unusual_numbers_get_the_general_hint(given: Any) -> None:
    assert hint("1.1a", given) == f"Not yet. {VALUE_EXERCISES['1.1a'][0]['otherwise']}"


@pytest.mark.parametrize("exercise", WRONG_ANSWERS)
def test_a_wrong_function_gets_a_hint_that_fits_its_mistake(
    exercise: str, snapshot: SnapshotAssertion
) -> None:
    wrong = WRONG_ANSWERS[exercise]
    assert {name: hint(exercise, *answer) for name, answer in wrong.items()} == snapshot


def test_an_error_inside_a_users_function_is_raised() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        check_answer("3.5c", lambda: [0])


def test_an_answer_that_waits_forever_gets_a_hint(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(time_limit, "SECONDS", 0.5)

    def wait(*_: Any) -> Any:
        Event().wait()

    def loop(store: Any, *_: Any) -> Any:
        while not store.check(["never"]):
            pass

    waiting = {"A1a": type("Waiting", (Server,), {"push": wait}), "2.1a": wait, "3.5c": wait}
    before, threads = signal.getsignal(signal.SIGALRM), threading.active_count()
    assert {name: hint(name, each) for name, each in (waiting | {"1.2b": loop}).items()} == snapshot
    assert signal.getsignal(signal.SIGALRM) is before
    wait_until(lambda: threading.active_count() == threads)


def test_a_function_with_collectives_is_not_called_outside_of_ranks(
    snapshot: SnapshotAssertion,
) -> None:
    assert len(ON_RANKS) == 21
    called = Mock()
    hints = {hint(each, *[called] * len(value_names(each))) for each in ON_RANKS}
    assert hints == snapshot
    called.assert_not_called()


def test_no_hint_contains_the_right_number() -> None:
    for exercise, values in VALUE_EXERCISES.items():
        for value in values:
            hints = [*value["wrong"].values(), value["otherwise"]]
            words = " ".join(hints).replace(",", "").replace(".", " ").split()
            assert str(value["right"]) not in words or value["right"] in (0, 1, 2, 3), exercise


def test_each_hint_to_code_is_used_and_each_mistake_has_one() -> None:
    sources = "".join(path.read_text() for path in Path(grading.__file__).parent.rglob("*.py"))
    named = {*re.findall(r'"((?:any|(?:\d\.|A)\d[a-z]) [^"{]+)"', sources)}
    computed = re.compile(
        r"2\.5c \d+|2\.6a (event|fault) \w+|4\.3a gradient of \w+|(?!any)\S+ hangs"
    )
    assert {each for each in HINTS if not computed.fullmatch(each)} <= named <= {*HINTS}


def test_the_clinic_has_each_cause_once_and_both_notebooks_explain_its_words() -> None:
    cases = {name: each for name, each in VALUE_EXERCISES.items() if each[-1]["name"] == "remedy"}
    causes = [values[2]["right"] for values in cases.values()]
    assert len(causes) == len({*causes}) == 12
    for path in (*NOTEBOOKS.glob("2.3_*.ipynb"), *NOTEBOOKS.glob("2.5_*.ipynb")):
        rows = re.findall(r"^\| (?:`(\w+)`)? \| .* \| `(\w+)` \| .+ \|$", clinic(path), re.M)
        cause_words, remedy_words = ({*words} for words in zip(*rows, strict=True))
        assert {*causes} == cause_words - {""}
        for name, (*_, cause, remedy) in cases.items():
            assert {cause["right"], *cause["wrong"]} <= cause_words, name
            assert {remedy["right"], *remedy["wrong"]} <= remedy_words, name


def clinic(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    [section] = [cell.source for cell in cells if cell.source.startswith("## The clinic")]
    return str(section)


def test_unknown_exercises_and_too_few_values_are_refused(snapshot: SnapshotAssertion) -> None:
    wrong = (("9", 1), (["1.1a"], 1), ("1.5b", 12), ("1.1a",))
    refused = [refusal(ArgumentError, nbddp.check_answer, *given) for given in wrong]
    assert refused == snapshot


def test_each_exercise_and_its_answer_in_the_notebooks_call_check_answer() -> None:
    asked, answered = set(), set()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        numbered = EXERCISE.findall(prose)
        number = path.name.partition("_")[0]
        names = [f"{number}{letter}" for letter in "abcdefghij"]
        assert [name for name, _ in numbered] == names[: len(numbered)]
        for name, block in numbered:
            question, answer = block.split("</summary>")
            for part, found in ((question, asked), (answer, answered)):
                calls = CALL.findall(part)
                assert {exercise for exercise, _ in calls} <= {name}
                found |= {exercise for exercise, _ in calls}
            for _, names in CALL.findall(question):
                assert len(names.split(", ")) == len(value_names(name))
                assert name in grading.CODE_EXERCISES or names == ", ".join(value_names(name))
    assert asked == answered == set(EXERCISES)


def test_the_gpt_of_the_judge_is_that_of_the_notebook() -> None:
    [notebook] = NOTEBOOKS.glob("3.7_*.ipynb")
    cells = nbformat.read(notebook, as_version=4).cells
    [source] = [each.source for each in cells if "class GPT(nn.Module)" in each.source]
    names: dict[str, Any] = {"torch": torch, "device": torch.device("cpu"), "world_size": 4}
    names["dist"] = Mock(get_backend=lambda: "gloo")
    exec(source.partition("\n")[2], names)
    theirs = names["make_model"]()
    torch.manual_seed(0)
    ours = GPT().double()
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    assert [name for name, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    numbers = torch.arange(2 * LENGTH).view(2, LENGTH) % LETTERS
    assert torch.equal(ours(numbers), theirs(numbers))
