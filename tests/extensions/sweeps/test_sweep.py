"""The points of a sweep, which points are done, and how they are described and shown."""

import copy
import json
from argparse import ArgumentTypeError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from pages import Page
from refusals import refusal
from runs_on_disk import make_run
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import ArgumentError
from nbddp.extensions.sweeps import SweepOptions
from nbddp.extensions.sweeps import grid as sweep_grid
from nbddp.extensions.sweeps.grid import (
    MAX_COMBINATIONS,
    SweepEntry,
    SweepState,
    completed_runs,
    count_in,
    run_json_entry,
    sweep_key,
    sweep_points,
)
from nbddp.extensions.sweeps.sweep import Sweep, assigned_before_use
from nbddp.extensions.sweeps.sweep_view import (
    MAX_ROWS,
    describe_current,
    describe_done,
    describe_failures,
    describe_outcome,
    describe_row,
    sweep_report,
)
from nbddp.magics.parser import CELL, parse_line
from nbddp.record.cell import CellRequest
from nbddp.record.push_store import PushRecord
from nbddp.ui.report.render import render_html, render_text
from nbddp.wire.function_sources import dumps
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.options.option_values import swept


def cell(line: str) -> SweepOptions:
    options: SweepOptions = parse_line(CELL, line).extensions[SweepOptions]
    return options


def rows_of(*states: SweepState) -> list[SweepEntry]:
    trials = sweep_points([("lr", tuple(range(len(states))))])
    return [SweepEntry(trial, state) for trial, state in zip(trials, states, strict=True)]


READ: dict[str, tuple[str, tuple[object, ...]]] = {
    "lr=0.1,0.01": ("lr", (0.1, 0.01)),
    "lr=1e-3": ("lr", (0.001,)),
    "batch=16,64,16": ("batch", (16, 64)),
    "model=cnn,mlp": ("model", ("cnn", "mlp")),
    "model=cnn, 3": ("model", ("cnn", 3)),
    "amp=true,None": ("amp", ("true", None)),
    "flag=True,1": ("flag", (True, 1)),
    "size=(1,2),(3,4)": ("size", ((1, 2), (3, 4))),
    "name='a b',None": ("name", ("a b", None)),
    "path=a=b": ("path", ("a=b",)),
    "opt=a),b(,c": ("opt", ("a)", "b(", "c")),
    "opt=(1,a": ("opt", ("(1", "a")),
    "flag='true','false'": ("flag", ("true", "false")),
    "seed=0,4294967295": ("seed", (0, 4294967295)),
}
QUOTED: dict[str, tuple[object, ...]] = {
    "\"opt='adam, fused','sgd'\"": ("adam, fused", "sgd"),
    "\"opt={'a':1},{'a':'b c'}\"": ({"a": 1}, {"a": "b c"}),
    "opt='a','b' --nproc 2": ("a", "b"),
    'opt="0.1, 0.2"': (0.1, 0.2),
    "opt='a b'": ("a b",),
    "opt=in/'my data',other": ("in/my data", "other"),
    "opt=a,b # 'c'": ("a", "b"),
}


def test_sweep_values_are_parsed_as_python_literals_or_as_text() -> None:
    for text, swept_values in READ.items():
        assert repr(cell(f'--sweep "{text}"').sweep) == repr([swept_values]), text


@pytest.mark.parametrize("begin", ["--sweep ", "--sweep=", "--fresh --sweep  "])
def test_sweep_values_are_quoted_as_in_a_shell(begin: str) -> None:
    for line, values in QUOTED.items():
        assert cell(begin + line).sweep == [("opt", values)], line


REFUSED = ("lr", "lr=", "lr=,", "=1", "'lr= '", "opt=adam, sgd", "opt=[1, 2]")
UNFIT = (
    *("--sweep lr=1 --no-wait", "--repeat 2 --out x", "--sweep lr=1 --timeline"),
    *("--sweep lr=1 --trace 1:2", "--start-over", "--weak", "--rounds 3"),
    *("--sweep lr=1 --scale 1,2", "--scale 1,2 --nproc 2", "--scale 1,2 --ranks 0"),
    *("--scale 1,2 --repeat 3", "--scale 1,2 --timeline", "--scale 1,2 --start-over"),
    *("--scale 1", "--scale 1, 2", "--scale 0,1", "--scale x", "--scale 1,2 --rounds 2"),
)
NO_GRID = (
    *("--sweep 0lr=1", "--sweep a.b=1", "--sweep class=1", "--sweep rank=0,1"),
    *(f"--sweep seed=0,{odd}" for odd in ("-1", "4294967296", "1.5", "a", "True", "None")),
    *("--sweep a=1 --sweep a=2", "--sweep seed=1 --repeat 2", f"--repeat {MAX_COMBINATIONS + 1}"),
)


def test_invalid_sweeps_are_refused_before_any_run_starts(snapshot: SnapshotAssertion) -> None:
    reasons = {text: refusal(UsageError, cell, f"--sweep {text}") for text in REFUSED}
    for line in UNFIT:
        reasons[line] = refusal(UsageError, cell, line)
    for line in NO_GRID:
        args = cell(line)
        reasons[line] = refusal(ArgumentError, sweep_points, args.sweep, args.repeat)
    assert reasons == snapshot


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import os\ntorch.manual_seed(0)\nprint(1)\nbatch, lr = 4, 0.1", 4),
        ("lr: float = 0.1", 1),
        ("lr *= 2", 0),
        ("lr: float", 0),
        ("if rank == 0:\n    lr = 1", 0),
        ("lr.x = 1", 0),
        ("def use():\n    return lr\nlr = 1", 0),
        ("lr_was = 1", 0),
        ("%time lr = 1\nlr = 1", 2),
        ("lr = (", 0),
        ("await sleep(1)\nfor batch in data:\n    lr = 1", 0),
    ],
)
def test_assigned_before_use_finds_the_line_that_overwrites_a_swept_name(
    source: str, line: int
) -> None:
    assert assigned_before_use(source, "lr") == line


def test_a_swept_value_that_is_not_a_plain_value_is_recorded_as_text() -> None:
    [trial] = sweep_points([("size", ((1, 2),)), ("lr", (0.1,)), ("mode", (None,))])
    assert trial.config == {"size": "(1, 2)", "lr": 0.1, "mode": None}


def key_after_push(value: Any) -> str:
    stored = Mock()
    stored.read.return_value = dumps({"x": value})
    return sweep_key("", [PushRecord(("x",), None, stored)])


def test_the_sweep_key_depends_on_pushed_values() -> None:
    plain: list[Any] = [1, 1.5, "1", [1, (2, None)], {"a": b"1"}]
    assert len({key_after_push(each) for each in plain}) == len(plain)
    assert [key_after_push(each) for each in plain] == [
        key_after_push(copy.deepcopy(entry)) for entry in plain
    ]
    assert sweep_key("", [PushRecord(("x",), None, None, "gone")])  # it is unreadable now


@pytest.mark.parametrize(
    "value",
    [torch.ones(3), lambda x: x, Path("data"), 10**5000],
    ids=["tensor", "function", "path", "long"],
)
def test_values_without_an_exact_repr_keep_their_sweep_key_only_within_one_kernel(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_after_push(value)
    assert key == key_after_push(value)
    assert key_after_push(torch.zeros(3)) != key
    monkeypatch.setattr(sweep_grid, "_PROCESS", "another kernel's")
    assert key_after_push(value) != key


class Model:
    """An object whose text says nothing of its size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __repr__(self) -> str:
        return "Model()"


TWO = GroupSpec(nproc=2)
BEFORE, TRAIN = CellRequest(source="x = 1"), CellRequest(source="train()")


def key_of(*swept: Any, **changed: Any) -> str:
    """Return the key of a sweep over ``lr`` on two ranks, after an earlier cell."""
    arguments = {"request": TRAIN, "spec": TWO, "replay_entries": [BEFORE], "values": {"scale": 1}}
    runner: Any = SimpleNamespace(display=None, **arguments | changed)
    key: str = Sweep(runner, sweep_points([("lr", swept or (0.1,))]), start_over=False)._key
    return key


def test_a_sweep_with_another_cell_group_environment_or_objects_is_another_sweep() -> None:
    key = key_of()
    assert key_of(0.1, 0.2) == key, "it continues with more values"
    assert key_of(replay_entries=[replace(BEFORE, execution_count=9)]) == key
    others = [
        key_of(request=replace(TRAIN, source="train(1)")),
        key_of(request=replace(TRAIN, ranks=(0,))),
        key_of(replay_entries=[]),
        key_of(replay_entries=[replace(BEFORE, source="x = 2")]),
        key_of(replay_entries=[replace(BEFORE, ranks=(0,))]),
        key_of(spec=replace(TWO, nproc=3)),
        key_of(spec=replace(TWO, backend="gloo")),
        key_of(spec=replace(TWO, env={"SHIFT": "1"})),
        key_of(values={"scale": 2}),
        *(key_of(Model(size)) for size in (1, 2)),
    ]
    assert len({key, *others}) == 12


def test_only_completed_runs_of_the_same_sweep_count_as_done(folder: Path) -> None:
    trials = sweep_points([("lr", (0.1, 0.2, 0.3, 0.4))])
    for number, (trial, key, is_done) in enumerate(
        [(trials[0], "k", True), (trials[1], "k", False), (trials[2], "other", True)]
    ):
        make_run(
            folder, f"2027011{number}-080000", **run_json_entry(key, trial, 4, is_done=is_done)
        )
    make_run(folder, "20270115-080000")
    newest = make_run(folder, "20270116-080000", **run_json_entry("k", trials[0], 4, is_done=True))
    torn = make_run(folder, "20270117-080000", **run_json_entry("k", trials[3], 4, is_done=True))
    (torn / "run.json").write_text('{"sweep": {"ke')
    odd = make_run(folder, "20270118-080000")
    (odd / "run.json").write_text(json.dumps({"sweep": {"key": "k", "is_done": 1, "settings": 3}}))
    assert completed_runs(folder, "k", trials) == {1: newest}


def one_in_each_state() -> list[SweepEntry]:
    rows = rows_of(
        SweepState.OK,
        SweepState.ALREADY_DONE,
        SweepState.RUNNING,
        SweepState.FAILED,
        SweepState.ENDED,
        SweepState.WAITING,
    )
    rows[0].seconds = 3.0
    rows[3].why, rows[3].path, rows[3].seconds = "rank 1: '\"<b>", Path("/x/20270115-run"), 2.0
    return rows


def test_the_progress_of_a_sweep_is_described(snapshot: SnapshotAssertion) -> None:
    rows = one_in_each_state()
    lines = [
        describe_current(rows, rows[2]),
        describe_current(rows[:3], rows[2]),
        describe_done(rows),
        describe_outcome(rows),
    ]
    assert [*lines, *describe_failures(rows), *map(describe_row, rows)] == snapshot
    assert describe_done(rows[2:]) == ""
    assert describe_done(rows_of(*[SweepState.ALREADY_DONE] * 9)).count("lr=") == 6
    assert count_in(rows, SweepState.OK, SweepState.WAITING) == 2


def test_the_sweep_report_has_a_row_for_each_run_until_the_sweep_ends() -> None:
    rows = one_in_each_state()
    page = Page(render_html(sweep_report(rows, rows[2])))
    assert describe_current(rows, rows[2]) in page.text
    assert all(describe_row(row) in page.text for row in rows)
    assert render_text(sweep_report(rows)) == describe_outcome(rows)


def test_the_page_of_a_long_sweep_shows_the_rows_around_the_running_row() -> None:
    many = rows_of(*[SweepState.OK] * 90, SweepState.RUNNING, *[SweepState.WAITING] * 9)
    page = Page(render_html(sweep_report(many, many[90])))
    assert sum(tag == "tr" for tag, _ in page.tags) == MAX_ROWS + 1
    assert "lr=90" in page.text
    assert "60 more" in page.text


@given(st.text())
def test_any_sweep_text_is_accepted_or_refused_with_an_argument_error(text: str) -> None:
    with suppress(ArgumentTypeError, ArgumentError):
        assert sweep_points([swept(text)])[0].name
