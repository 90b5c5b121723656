"""A run is opened from its folder, whole or torn, and says what its ranks did."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbddp.errors import RequestError
from nbddp.lifecycle.states import GroupState
from nbddp.record.finished import RecordedRun
from nbddp.ui.panel.record import Record, record_html
from nbddp.ui.words import say_event

EVENTS: list[dict[str, Any]] = [
    {"attempt": 1, "world_size": 2, "time": 100.0, "kind": "start"},
    {"attempt": 1, "time": 100.1, "kind": "ready"},
    {"number": 1, "ranks": [0, 1], "source": "train()", "time": 101.0, "kind": "cell"},
    {"number": 1, "outcome": "ok", "time": 103.0, "kind": "cell ended"},
    {"number": 2, "ranks": [1], "source": "1/0", "time": 104.0, "kind": "cell"},
    {"rank": 1, "what": "ZeroDivisionError: division by zero", "time": 104.1, "kind": "failure"},
    {
        "number": 2,
        "outcome": "oh",
        "report": "in full",
        "time": 104.2,
        "kind": "cell ended",
    },
    {"attempt": 1, "time": 106.0, "kind": "stopped"},
]
ROWS = [
    {"time": 102.0 + step / 10, "rank": rank, "attempt": 1, "step": step, "loss": 1.0 / (step + 1)}
    for step in range(5)
    for rank in range(2)
]

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a run's folder, as far as it got."""

    def begin(events: list[dict[str, Any]] = EVENTS, *, torn: str = "") -> Path:
        lines = "".join(f"{json.dumps(each)}\n" for each in events)
        (tmp_path / "events.jsonl").write_text(lines + torn)
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
        (tmp_path / "run.json").write_text('{"nproc": 2, "backend": "gloo"}')
        (tmp_path / "rank0.log").write_text("one\ntwo\nthree\n")
        return tmp_path

    return begin


def test_a_run_says_what_was_started_and_what_happened(write: Write) -> None:
    run = RecordedRun(write())
    assert run.facts["backend"] == "gloo"
    assert [each.kind for each in run.events] == [each["kind"] for each in EVENTS]
    assert run.events[0].facts == {"attempt": 1, "world_size": 2}
    assert run.ranks == (0, 1)
    assert run.was_stopped
    assert run.unreadable == 0


def test_its_cells_have_their_source_and_what_came_of_them(write: Write) -> None:
    first, second = RecordedRun(write()).cells
    assert (first.number, first.source, first.ranks, first.outcome) == (1, "train()", (0, 1), "ok")
    assert (first.began_at, first.ended_at) == (101.0, 103.0)
    assert (second.outcome, second.report) == ("oh", "in full")


def test_its_numbers_are_curves_of_the_run_or_of_a_cell(write: Write) -> None:
    run = RecordedRun(write())
    first, second = run.cells
    assert run.metrics(first).names() == ["loss"]
    assert run.metrics().curves("loss")[1].values == tuple(1.0 / (step + 1) for step in range(5))
    assert run.metrics(second).names() == []


def test_a_number_that_is_none_is_kept_as_it_was_written(write: Write) -> None:
    path = write()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"time": 102.9, "rank": 0, "attempt": 1, "step": 5, "loss": NaN}\n')
    assert math.isnan(RecordedRun(path).metrics().curves("loss")[0].last)


def test_the_numbers_of_a_recovery_go_on_where_those_before_it_failed(write: Write) -> None:
    path = write([*EVENTS, {"attempt": 2, "time": 102.95, "kind": "recovery"}])
    with (path / "metrics.jsonl").open("a") as file:
        for step in (3, 4, 5):
            row = {"time": 102.96, "rank": 0, "attempt": 2, "step": step, "loss": 9.0}
            file.write(f"{json.dumps(row)}\n")
    curve = RecordedRun(path).metrics().curves("loss")[0]
    assert curve.steps == tuple(map(float, range(6)))
    assert curve.values[2:] == (1 / 3, 9.0, 9.0, 9.0)
    assert curve.restarts == (3.0,)


def test_numbers_without_a_step_are_counted(write: Write) -> None:
    path = write()
    row = {"time": 102.9, "rank": 0, "attempt": 1, "grad": 0.5}
    (path / "metrics.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    run = RecordedRun(path)
    assert run.metrics().curves("grad")[0].steps == (0.0, 1.0, 2.0)
    assert run.unreadable == 0


def test_its_logs_are_there_to_be_read(write: Write) -> None:
    run = RecordedRun(write())
    assert run.tail(0, 2).splitlines()[-2:] == ["two", "three"]
    assert run.tail(1, 2) == ""


def test_a_snapshot_of_it_can_be_drawn_as_any_other(write: Write) -> None:
    run = RecordedRun(write())
    snapshot = run.snapshot()
    assert snapshot.state is GroupState.OFF
    assert (snapshot.began, snapshot.seconds, snapshot.attempt) == (100.0, 6.0, 1)
    assert [each.state for each in snapshot.ranks] == ["done", EVENTS[5]["what"]]
    assert [each.is_cause for each in snapshot.ranks] == [False, True]
    assert snapshot.ranks[0].step == 4
    assert [say_event(each) for each in snapshot.events]
    html = record_html(Record(snapshot=snapshot))
    assert "ZeroDivisionError" in html
    assert snapshot.run in html


def test_a_snapshot_of_a_cell_has_only_what_was_in_it(write: Write) -> None:
    run = RecordedRun(write())
    snapshot = run.snapshot(run.cells[1])
    assert [each.rank for each in snapshot.ranks] == [1]
    assert {each.kind for each in snapshot.events} == {"cell", "failure", "cell ended"}


def test_a_run_whose_kernel_was_killed_opens_up_to_its_last_line(write: Write) -> None:
    run = RecordedRun(write(EVENTS[:5], torn='{"rank": 1, "wh'))
    assert run.unreadable == 1
    assert not run.was_stopped
    assert (run.cells[-1].ended_at, run.cells[-1].outcome) == (None, "")


def test_lines_that_are_no_facts_are_counted_and_left_out(write: Write) -> None:
    path = write(torn="[1]\n7\nnull\n{}\n\n" + '{"time": 1.0}\n{"time": "x", "kind": "y"}\n')
    assert RecordedRun(path).unreadable == 6


def test_what_could_not_be_written_is_missing_and_nothing_else(write: Write) -> None:
    path = write()
    (path / "run.json").unlink()
    (path / "metrics.jsonl").unlink()
    run = RecordedRun(path)
    assert run.facts == {}
    assert run.metrics().names() == []
    assert len(run.cells) == 2


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        RecordedRun(tmp_path)
    assert str(caught.value) == f"there is no run in {tmp_path}: No such file or directory"


def test_a_torn_line_of_numbers_is_counted_once_however_often_they_are_drawn(write: Write) -> None:
    path = write()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"time": 102.9, "ra')
    run = RecordedRun(path)
    for _ in range(2):
        assert run.metrics().names() == ["loss"]
        assert run.snapshot().ranks[0].step == 4
    assert run.unreadable == 1
