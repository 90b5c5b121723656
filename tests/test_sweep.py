"""What a sweep tries, which of it is done, and how that is said and shown."""

from __future__ import annotations

import json
import pickle
from argparse import ArgumentTypeError, Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from pages import TEXT, Page
from runs_on_disk import make_run

from nbddp.archive.sweeps import (
    MOST,
    Row,
    State,
    count_of,
    done_before,
    facts_of,
    grid,
    key_of,
)
from nbddp.errors import ArgumentError, RequestError
from nbddp.magics.cell import CellMagics
from nbddp.magics.options import parse
from nbddp.magics.syntax import set_unread
from nbddp.magics.trial_options import check_trials, swept
from nbddp.record.cell import CellRequest
from nbddp.record.pushes import Pushed
from nbddp.ui.panel.sweep import SHOWN, sweep_html
from nbddp.ui.text.sweep import say_before, say_end, say_head, say_row, say_troubles


def cell(line: str) -> Namespace:
    return parse(CellMagics.ddp, line)


def rows_of(*states: State) -> list[Row]:
    trials = grid([("lr", tuple(range(len(states))))])
    return [Row(trial, state) for trial, state in zip(trials, states, strict=True)]


# ---- what is tried


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("lr=0.1,0.01", "lr", (0.1, 0.01)),
        ("lr=1e-3", "lr", (0.001,)),
        ("batch=16,64,16", "batch", (16, 64)),
        ("model=cnn,mlp", "model", ("cnn", "mlp")),
        ("model=cnn, 3", "model", ("cnn", 3)),
        ("flag=True,False", "flag", (True, False)),
        ("flag=True,1", "flag", (True, 1)),
        ("size=(1,2),(3,4)", "size", ((1, 2), (3, 4))),
        ("name='a b',None", "name", ("a b", None)),
        ("path=a=b", "path", ("a=b",)),
        ("opt=adam,(0.9, 0.99)", "opt", ("adam", (0.9, 0.99))),
        ("opt=[1,2],f(3,[4,5]),a", "opt", ([1, 2], "f(3,[4,5])", "a")),
        ("opt=a),b(,c", "opt", ("a)", "b(", "c")),
        ("opt=(1,a", "opt", ("(1", "a")),
        ("flag='true','false'", "flag", ("true", "false")),
    ],
)
def test_values_are_read_as_python_or_as_text(
    text: str, name: str, values: tuple[object, ...]
) -> None:
    [(found, read)] = cell(f'--sweep "{text}"').sweep
    assert (found, read) == (name, values)
    assert [*map(type, read)] == [*map(type, values)]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("opt='adam, fused','sgd'", ("adam, fused", "sgd")),
        ("opt={'a':1},{'a':'b c'}", ({"a": 1}, {"a": "b c"})),
        ("opt=[1,'x'],None", ([1, "x"], None)),
        ("opt='a','b' --nproc 2", ("a", "b")),
        ('opt="0.1, 0.2"', (0.1, 0.2)),
        ("opt='a b'", ("a b",)),
        ("opt=in/'my data',other", ("in/my data", "other")),
        ("opt=a,b # 'c'", ("a", "b")),
    ],
)
def test_quotes_in_values_are_pythons_and_around_all_a_shells(
    line: str, values: tuple[object, ...]
) -> None:
    for begin in ("--sweep ", "--sweep=", "--fresh --sweep  "):
        assert cell(begin + line).sweep == [("opt", values)]


def test_what_is_meant_for_a_bool_and_would_be_a_text_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        cell("--sweep amp=true,false")
    assert str(caught.value) == (
        "argument --sweep: true would be a text, which counts as true: write True, or 'true' in "
        "quotes for the text"
    )


@pytest.mark.parametrize("odd", ["-1", "4294967296", "1.5", "a", "True", "None"])
def test_a_seed_that_is_none_is_refused_before_anything_runs(odd: str) -> None:
    with pytest.raises(UsageError, match="expected whole numbers from 0 to 4294967295 for seed"):
        cell(f"--sweep seed=0,{odd}")
    assert cell("--sweep seed=0,4294967295").sweep == [("seed", (0, 4294967295))]


@pytest.mark.parametrize("line", ["opt=adam, sgd", "opt=[1, 2]"])
def test_values_with_spaces_that_no_quotes_hold_together_are_refused(line: str) -> None:
    with pytest.raises(UsageError) as caught:
        cell(f"--sweep {line}")
    assert str(caught.value) == (
        f"unrecognized arguments: {line.split()[1]}; values that have spaces stand in quotes, all "
        'of them: --sweep "opt=adam, sgd"'
    )


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("lr = 0.1\ntrain(lr)", 1),
        ("import os\ntorch.manual_seed(0)\nprint(1)\nbatch, lr = 4, 0.1", 4),
        ("lr: float = 0.1", 1),
        ("for lr in (0.1, 0.2):\n    train(lr)", 1),
        ("lr = lr * 2", 0),
        ("lr *= 2", 0),
        ("lr: float", 0),
        ("if rank == 0:\n    lr = 1", 0),
        ("lr.x = 1", 0),
        ("train(lr)\nlr = 1", 0),
        ("train()\nlr = 1", 0),  # it may read lr
        ("lr = best()", 0),
        ("def use():\n    return lr\nlr = 1", 0),
        ("lr_was = 1", 0),
        ("await sleep(1)\nfor batch in data:\n    lr = 1", 0),
    ],
)
def test_a_line_that_sets_a_name_before_it_can_be_read_is_found(source: str, line: int) -> None:
    assert set_unread(source, "lr") == line


@pytest.mark.parametrize("text", ["lr", "lr=", "lr=,", "=1", "0lr=1", "a.b=1", "class=1", "lr= "])
def test_what_is_no_name_with_values_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        cell(f"--sweep '{text}'")
    said = f"argument --sweep: expected a name and values like lr=0.1,0.01, got {text!r}"
    assert str(caught.value) == said


def test_names_of_nbddps_own_are_refused() -> None:
    with pytest.raises(UsageError, match="rank is set by nbddp in each rank; sweep another name"):
        cell("--sweep rank=0,1")


def test_every_combination_is_there_once_the_last_name_the_fastest() -> None:
    trials = grid([("lr", (0.1, 0.01)), ("model", ("cnn", "mlp"))], repeat=2)
    assert [each.name for each in trials] == [
        f"lr{lr}-model-{model}-seed{seed}"
        for lr in (0.1, 0.01)
        for model in ("cnn", "mlp")
        for seed in (0, 1)
    ]
    assert [each.number for each in trials] == [*range(1, 9)]
    assert len(grid([], repeat=3)) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--sweep a=1 --sweep a=2", "--sweep a: it is swept already; give all its values at once"),
        ("--sweep seed=1 --repeat 2", "--sweep seed: it is swept already; --repeat sets it"),
        (
            "--repeat 1001",
            f"a sweep has up to {MOST} combinations, these are 1001",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(line: str, words: str) -> None:
    args = cell(line)
    with pytest.raises(ArgumentError) as caught:
        grid(args.sweep or (), args.repeat or 0)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--sweep lr=1 --no-wait",
            "--no-wait and a sweep do not go together: it runs until all is done, and a stop ends "
            "it",
        ),
        (
            "--repeat 2 --out x",
            "--out and a sweep do not go together: `nbddp.log` puts numbers into each run, "
            "`nbddp.runs()` has them",
        ),
        ("--sweep lr=1 --timeline", "--timeline and a sweep do not go together: run one of them"),
        ("--sweep lr=1 --trace 1:2", "--trace and a sweep do not go together: run one of them"),
        ("--start-over", "--start-over goes with --sweep, or --repeat"),
    ],
)
def test_options_that_do_not_fit_a_sweep_are_refused(line: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_trials(cell(line))
    assert str(caught.value).startswith(words)


def test_a_setting_that_is_no_plain_value_is_recorded_as_it_is_written() -> None:
    [trial] = grid([("size", ((1, 2),)), ("lr", (0.1,)), ("mode", (None,))])
    assert trial.config == {"size": "(1, 2)", "lr": 0.1, "mode": None}


# ---- what is done already


def test_another_cell_or_another_one_before_it_is_another_sweep() -> None:
    before = CellRequest(source="x = 1")
    key = key_of("train()", [before], 2)
    assert key == key_of("train()", [CellRequest(source="x = 1", execution_count=9)], 2)
    others = [
        key_of("train(1)", [before], 2),
        key_of("train()", [], 2),
        key_of("train()", [CellRequest(source="x = 2")], 2),
        key_of("train()", [CellRequest(source="x = 1", ranks=(0,))], 2),
        key_of("train()", [before], 4),
    ]
    assert len({key, *others}) == 6


def test_other_values_that_were_pushed_are_another_sweep() -> None:
    def pushed(data: bytes) -> Pushed:
        kept = Mock()
        kept.read.return_value = data
        return Pushed(("x",), None, kept)

    def key(value: Any) -> str:
        return key_of("", [pushed(pickle.dumps({"x": value}))])

    assert key(1) == key(1) != key(2)
    assert key(torch.ones(3)) == key(torch.ones(3)) != key(torch.zeros(3))
    assert key_of("", [pushed(b"1")]) == key_of("", [pushed(b"1")])  # it cannot be opened
    assert key_of("", [pushed(b"1")]) != key_of("", [pushed(b"2")])
    assert key_of("", [Pushed(("x",), None, None, "gone")])  # it cannot be read any more


def test_only_runs_of_the_same_sweep_that_came_to_their_end_are_done(folder: Path) -> None:
    trials = grid([("lr", (0.1, 0.2, 0.3, 0.4))])
    for number, (trial, key, is_done) in enumerate(
        [(trials[0], "k", True), (trials[1], "k", False), (trials[2], "other", True)]
    ):
        make_run(folder, f"2027011{number}-080000", **facts_of(key, trial, 4, is_done=is_done))
    make_run(folder, "20270115-080000")
    newest = make_run(folder, "20270116-080000", **facts_of("k", trials[0], 4, is_done=True))
    torn = make_run(folder, "20270117-080000", **facts_of("k", trials[3], 4, is_done=True))
    (torn / "run.json").write_text('{"sweep": {"ke')
    odd = make_run(folder, "20270118-080000")
    (odd / "run.json").write_text(json.dumps({"sweep": {"key": "k", "is_done": 1, "settings": 3}}))
    assert done_before(folder, "k", trials) == {1: newest}


# ---- how it is said


def test_it_is_said_which_one_runs_and_how_many_are_left() -> None:
    rows = rows_of(State.BEFORE, State.RUNNING, State.WAITING)
    assert say_head(rows, rows[1]) == "sweep, 2 of 3: lr=1; 1 left after it"
    assert say_head(rows[:2], rows[1]) == "sweep, 2 of 2: lr=1; the last one"
    assert say_before(rows) == (
        "1 combination of 3 done before and not run again (lr=0); --start-over runs them, too"
    )
    assert say_before(rows_of(State.OK)) == ""
    assert say_before(rows_of(*[State.BEFORE] * 9)).count("lr=") == 6


def test_all_that_came_of_it_is_counted() -> None:
    rows = rows_of(State.OK, State.BEFORE, State.FAILED, State.ENDED, State.WAITING, State.WAITING)
    rows[0].seconds = 3.0
    assert say_end(rows) == (
        "sweep of 6: 1 ok, 1 done before and not run again, 1 failed, 1 ended by you, 2 not run, "
        "3.0 s"
    )
    assert count_of(rows, State.OK, State.WAITING) == 3


def test_trouble_has_its_cause_and_the_way_to_more() -> None:
    rows = rows_of(State.OK, State.FAILED, State.ENDED)
    rows[1].why, rows[1].path, rows[1].seconds = "rank 1: boom", Path("/x/20270115-run"), 2.0
    assert say_troubles(rows) == [
        "lr=1: failed: rank 1: boom, 2.0 s; `%ddp show 20270115-run` has more",
        "lr=2: ended",
    ]
    assert say_row(rows[0]) == "ok"


def test_a_page_has_a_row_for_each_and_the_one_that_runs_among_those_that_are_shown() -> None:
    rows = rows_of(State.OK, State.FAILED, State.RUNNING, State.WAITING)
    rows[1].why = "rank 0: <b>"
    page = Page(sweep_html(rows, rows[2]))
    assert "sweep, 3 of 4: lr=2; 1 left after it" in page.text
    assert "failed: rank 0: <b>" in page.text
    many = rows_of(*[State.OK] * 90, State.RUNNING, *[State.WAITING] * 9)
    shown = Page(sweep_html(many, many[90]))
    assert sum(tag == "tr" for tag, _ in shown.tags) == SHOWN + 1
    assert "lr=90" in shown.text
    assert "60 more" in shown.text
    ended = Page(sweep_html(rows_of(State.OK, State.OK)))
    assert ended.text.strip() == "sweep of 2: 2 ok"


@given(name=TEXT, why=TEXT)
def test_whatever_values_and_failures_say_stays_text(name: str, why: str) -> None:
    [trial] = grid([("lr", (name,))])
    row = Row(trial, State.FAILED, why=why, path=Path("/x/run"))
    Page(sweep_html([row], row))


@given(st.text())
def test_any_text_is_swept_or_refused_in_one_line(text: str) -> None:
    with suppress(ArgumentTypeError):
        name, values = swept(text)
        assert name.isidentifier()
        assert values
        assert grid([(name, values)])[0].name
