"""What is published of a run, to whom, and what becomes of a tracker that fails or blocks."""

from __future__ import annotations

import json
import math
import os
import platform
import posixpath
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from drivers.inside import imported
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from published import fake_wandb
from runs_on_disk import BEGAN, events_of, lines, make_run, rows_of

from nbddp.errors import ArgumentError, RequestError
from nbddp.magics import publish as publish_module
from nbddp.magics.cell import CellMagics
from nbddp.magics.line import LineMagics
from nbddp.magics.options import parse
from nbddp.magics.publish import Publishing
from nbddp.publish.kinds import KINDS, Target, require, target
from nbddp.publish.noted import name_there, note, read_note
from nbddp.publish.points import KEPT, PATIENCE, Point, Points
from nbddp.publish.publication import Publication
from nbddp.publish.publisher import Publisher
from nbddp.publish.tail import Tail
from nbddp.publish.tracker import Identity, Outcome, PublishError
from nbddp.publish.words import plain_name

Row = dict[str, Any]


def row(step: int | None, rank: int = 0, at: float = 1.0, **values: float) -> Row:
    of_step = {} if step is None else {"step": step}
    return {"time": at, "rank": rank, "attempt": 1, **of_step, **values}


def points_of(rows: Iterable[Mapping[str, Any]], *begins: float) -> list[Point]:
    points = Points()
    for at in begins:
        points.begin_part(at, is_again=False)
    for each in rows:
        points.add(each)
    return points.rest()


# ---- steps of all ranks


def test_a_metric_of_several_ranks_is_their_mean_rank_0_and_how_they_spread() -> None:
    [point] = points_of([row(3, rank, loss=value) for rank, value in enumerate((4.0, 1.0, 1.0))])
    assert point.step == 3
    assert point.values == {"loss": 2.0, "loss/rank0": 4.0, "loss/min": 1.0, "loss/max": 4.0}


def test_a_metric_of_one_rank_is_there_once() -> None:
    assert [each.values for each in points_of([row(0, loss=0.1), row(1, loss=0.2)])] == [
        {"loss": 0.1},
        {"loss": 0.2},
    ]


def test_without_rank_0_there_is_no_curve_of_rank_0() -> None:
    [point] = points_of([row(0, 1, loss=1.0), row(0, 2, loss=3.0)])
    assert point.values == {"loss": 2.0, "loss/min": 1.0, "loss/max": 3.0}


def test_what_the_user_has_named_like_a_spread_is_his() -> None:
    rows = [row(0, rank, **{"loss": float(rank), "loss/min": 7.0}) for rank in range(2)]
    [point] = points_of(rows)
    assert point.values["loss/min"] == 7.0
    assert point.values["loss"] == 0.5


def test_values_that_are_not_finite_stay_so() -> None:
    [nan] = points_of([row(0, 0, loss=math.nan), row(0, 1, loss=2.0)])
    assert math.isnan(nan.values["loss"])
    assert math.isnan(nan.values["loss/rank0"])
    assert (nan.values["loss/min"], nan.values["loss/max"]) == (2.0, 2.0)
    [infinite] = points_of([row(0, 0, loss=math.inf), row(0, 1, loss=-math.inf)])
    assert math.isnan(infinite.values["loss"])
    [alone] = points_of([row(0, 0, loss=math.inf)])
    assert alone.values == {"loss": math.inf}


def test_several_names_of_a_step_are_one_point_in_whatever_rows_they_came() -> None:
    [point] = points_of([row(5, loss=1.0), row(5, accuracy=0.5)])
    assert point.values == {"loss": 1.0, "accuracy": 0.5}


def test_a_step_that_falls_back_is_a_point_of_its_own() -> None:
    rows = [
        row(step, rank, loss=10.0 * lap + step)
        for lap in (0, 1)
        for step in (0, 1)
        for rank in (0, 1)
    ]
    found = points_of(rows)
    assert [(each.step, each.values["loss"]) for each in found] == [
        (0, 0),
        (1, 1),
        (0, 10),
        (1, 11),
    ]


def test_a_step_that_a_rank_says_twice_is_there_twice() -> None:
    assert [each.values for each in points_of([row(2, loss=1.0), row(2, loss=3.0)])] == [
        {"loss": 1.0},
        {"loss": 3.0},
    ]


def test_metrics_without_steps_count_and_count_on_in_the_next_cell() -> None:
    rows = [row(None, rank, at, loss=at) for at in (1.0, 2.0, 11.0, 12.0) for rank in (0, 1)]
    found = points_of(rows, 0.5, 10.0)
    assert [each.step for each in found] == [0, 1, 2, 3]
    assert [each.part for each in found] == [0, 0, 1, 1]


def test_ranks_of_different_cells_are_not_put_together() -> None:
    """A rank that died before its first step has reported none that the next cell repeats."""
    found = points_of(
        [row(0, 1, at=1.0, loss=8.0), row(0, 0, at=11.0, loss=1.0), row(0, 1, at=11.1, loss=3.0)],
        0.5,
        10.0,
    )
    assert [each.values["loss"] for each in found] == [8.0, 2.0]


# ---- while the run goes on


def test_a_step_waits_for_the_ranks_that_are_behind() -> None:
    points = Points()
    points.world = frozenset({0, 1})
    points.add(row(0, 0, loss=1.0))
    points.add(row(1, 0, loss=1.0))
    assert points.ready() == []
    points.add(row(0, 1, at=1.5, loss=3.0))
    assert [each.values["loss"] for each in points.ready()] == [2.0]
    points.add(row(1, 1, at=1.6, loss=5.0))
    assert [each.values["loss"] for each in points.ready()] == [3.0]


def test_what_rank_0_alone_reports_waits_for_nobody_after_a_moment() -> None:
    points = Points()
    points.world = frozenset({0, 1})
    found = []
    for step in range(100):
        points.add(row(step, 0, at=float(step), loss=1.0))
        found += points.ready()
    assert len(found) > 90
    assert len(found + points.rest()) == 100


def test_a_rank_that_never_comes_holds_nothing_up_for_ever_and_what_it_brings_late_is_counted() -> (
    None
):
    points = Points()
    points.add(row(0, 0, at=0.0, loss=1.0))
    points.add(row(0, 1, at=0.0, loss=3.0))
    assert len(points.ready()) == 1
    points.add(row(1, 0, at=1.0, loss=1.0))
    assert points.ready() == []
    points.add(row(2, 0, at=2.0 + PATIENCE, loss=1.0))
    assert [each.step for each in points.ready()] == [1]
    points.add(row(1, 1, at=2.5 + PATIENCE, loss=9.0))
    assert points.late == 1
    assert [each.values for each in points.rest()] == [{"loss": 1.0}]


@pytest.mark.parametrize("seed", range(20))
def test_live_or_later_the_points_are_the_same(seed: int) -> None:
    """Ranks are at most a few steps apart, as those that meet in collectives are."""
    chance, rows = random.Random(seed), []
    at = [0, 0, 0]
    while min(at) < 40:
        rank = chance.choice(
            [each for each in range(3) if at[each] <= min(at) + 2 and at[each] < 40]
        )
        if rank == 0 or at[rank] % 2:
            rows.append(row(at[rank] % 25, rank, 1 + len(rows) / 50, loss=chance.random()))
        at[rank] += 1
    points, live = Points(), []
    points.world = frozenset(range(3))
    for each in rows:
        points.add(each)
        if chance.random() < 0.3:
            live += points.ready()
    assert points.late == 0
    assert live + points.rest() == points_of(rows)


def test_what_is_remembered_of_a_long_run_is_bounded() -> None:
    points = Points()
    for step in range(KEPT + 500):
        points.add(row(step, loss=1.0))
        points.ready()
    assert len(points._done) <= KEPT
    assert not points._open


# ---- files that grow


def test_lines_are_read_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path, "rank")
    assert tail.read() == []
    with path.open("a") as file:
        file.write('{"time": 1.0, "rank": 0, "lo')
        file.flush()
        assert tail.read() == []
        file.write(
            'ss": 2.0}\n{"time": 2.0}\n[1]\nodd\n{"time": "x", "rank": 0}\n{"time": 3, "rank": 1}'
        )
    assert tail.read() == [{"time": 1.0, "rank": 0, "loss": 2.0}]
    assert tail.read() == []
    assert tail.read(is_over=True) == [{"time": 3, "rank": 1}]
    assert tail.read(is_over=True) == []


# ---- a whole run, to a tracker that notes what it is told


class Noted:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.runs: list[Identity] = []
        self.settled: list[Mapping[str, Any]] = []
        self.points: list[Point] = []
        self.told: list[str] = []
        self.outcomes: list[Outcome] = []

    def begin(self, run: Identity) -> str:
        self.runs.append(run)
        return "here"

    def settle(self, settings: Mapping[str, Any]) -> None:
        self.settled.append(settings)

    def log(self, points: Sequence[Point]) -> None:
        self.points += points

    def happened(self, at: float, text: str) -> None:  # noqa: ARG002 - a tracker's
        self.told.append(text)

    def finish(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def published(path: Path, tracker: Noted, *, is_live: bool = False) -> Publisher:
    return Publisher(
        path, tracker, name=path.name, place="", begins=lambda _what: None, is_live=is_live
    )


def test_a_run_is_one_run_there_with_its_config_its_outcome_and_its_record(tmp_path: Path) -> None:
    config = {
        "kind": "config",
        "time": BEGAN + 2,
        "rank": 0,
        "values": {"lr": 0.1, "sizes": [1, 2]},
    }
    failure = {"kind": "failure", "time": BEGAN + 5, "rank": 1, "what": "ValueError: odd"}
    path = make_run(
        tmp_path,
        cells=(("train()", "rank 1: ValueError: odd"),),
        extra=(config, failure),
        config={"lr": 0.1},
        git={"commit": "abc", "dirty": True},
        failures=1,
    )
    tracker = Noted()
    outcome = published(path, tracker).finish()
    [run] = tracker.runs
    assert run.name == path.name
    assert run.settings["lr"] == 0.1
    assert run.settings["sizes"] == "[1, 2]"
    assert run.settings["nbddp.world_size"] == 2
    assert run.settings["nbddp.git.commit"] == "abc"
    assert tracker.outcomes == [outcome]
    assert (outcome.outcome, outcome.why) == ("failed", "rank 1: ValueError: odd")
    assert outcome.sums["failures"] == 1
    said = [text for _, text in outcome.record]
    assert said == [
        *("start: attempt 1", "cell 1 begins", "rank 1: ValueError: odd"),
        *("cell 1: rank 1: ValueError: odd", "stopped"),
    ]
    assert tracker.told == said


def test_the_values_are_those_of_the_file(tmp_path: Path) -> None:
    path, tracker = make_run(tmp_path, rows=rows_of(60, ranks=4)), Noted()
    published(path, tracker).finish()
    assert [each.step for each in tracker.points] == list(range(60))
    for each in tracker.points:
        of_step = [found["loss"] for found in rows_of(60, ranks=4) if found["step"] == each.step]
        assert each.values["loss"] == pytest.approx(sum(of_step) / 4, abs=1e-15)
        assert each.values["loss/rank0"] == of_step[0]
        assert (each.values["loss/min"], each.values["loss/max"]) == (min(of_step), max(of_step))
        assert each.at == BEGAN + 1 + each.step / 10


def test_a_tracker_is_given_only_so_much_at_once(tmp_path: Path) -> None:
    many = {f"m{number}": 1.0 for number in range(4000)}
    rows = [found | many for found in rows_of(5, ranks=1)] + rows_of(2500, ranks=1)[5:]
    tracker = Mock(wraps=Noted())
    published(make_run(tmp_path, rows=rows), tracker).finish()
    given = [call.args[0] for call in tracker.log.call_args_list]
    assert [len(points) for points in given] == [2, 2, 1000, 1000, 496]
    assert [point.step for points in given for point in points] == list(range(2500))


@given(st.text() | st.text("./a"))
def test_a_plain_name_is_one_that_mlflow_takes_whatever_it_was(name: str) -> None:
    plain = plain_name(name)
    assert re.fullmatch(r"[/\w.\- :]{1,250}", plain)
    assert posixpath.normpath(plain) == plain
    assert plain != "."
    assert not plain.startswith(("/", ".."))


def test_a_long_name_keeps_its_end() -> None:
    assert len({plain_name("d" * 300 + end) for end in ("", "/min", "/max")}) == 3


def test_the_first_step_of_each_attempt_says_so(tmp_path: Path) -> None:
    rows = [
        *rows_of(3, ranks=1),
        *(found | {"time": BEGAN + 15, "attempt": 2} for found in rows_of(3, ranks=2)),
    ]
    again = {"kind": "start", "attempt": 2, "world_size": 2, "time": BEGAN + 14}
    tracker = Noted()
    published(make_run(tmp_path, rows=rows, extra=(again,)), tracker).finish()
    marks = [
        (each.values.get("nbddp/attempt"), each.values.get("nbddp/world_size"))
        for each in tracker.points
    ]
    assert marks == [(1, 2), (None, None), (None, None), (2, 2), (None, None), (None, None)]


def test_a_run_that_goes_on_is_published_as_it_comes(tmp_path: Path) -> None:
    path, rows = (
        make_run(tmp_path, rows=[], is_stopped=False, cells=(("train()", ""),)),
        rows_of(60),
    )
    (path / "run.json").write_text(json.dumps({"nproc": 2}))
    tracker = Noted()
    publisher = published(path, tracker, is_live=True)
    with (path / "metrics.jsonl").open("a") as file:
        for number, found in enumerate(rows):
            file.write(json.dumps(found) + "\n")
            if number % 7 == 0:
                file.flush()
                publisher.turn()
    publisher.turn()
    assert 50 < len(tracker.points) <= 60
    assert tracker.outcomes == []
    with (path / "events.jsonl").open("a") as file:
        file.write(lines(events_of(("train()", "ok"))[-2:-1]))
    publisher.turn()
    publisher.turn()
    assert len(tracker.points) == 60  # the last step waits for nobody once the cell is over
    publisher.finish()
    later = Noted()
    published(path, later).finish()
    assert tracker.points == later.points
    assert len(tracker.runs) == len(tracker.outcomes) == 1


def test_settings_that_come_later_are_told_once(tmp_path: Path) -> None:
    path, tracker = make_run(tmp_path, is_stopped=False, cells=(("train()", ""),)), Noted()
    publisher = published(path, tracker, is_live=True)
    publisher.turn()
    with (path / "events.jsonl").open("a") as file:
        config = {"kind": "config", "time": BEGAN + 9, "rank": 1, "values": {"lr": 0.5}}
        file.write(lines([config, config | {"rank": 0, "values": {"lr": 0.7}}]))
    publisher.turn()
    publisher.finish()
    assert tracker.settled == [{"lr": 0.7}]


def test_what_a_tracker_raises_is_said_in_a_line(tmp_path: Path) -> None:
    class Refuses(Noted):
        def begin(self, run: Identity) -> str:  # noqa: ARG002 - a tracker's
            raise OSError(28, "No space left on device\nand more")

    with pytest.raises(PublishError, match=r"^OSError: \[Errno 28\] No space left on device$"):
        published(make_run(tmp_path), Refuses()).finish()


def test_a_damaged_folder_is_published_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    path, tracker = (
        make_run(tmp_path, torn='{"time": 3, "ra', extra=({"kind": "start", "time": 1.0},)),
        Noted(),
    )
    published(path, tracker).finish()
    assert len(tracker.points) == 60


# ---- where to


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("trackio", Target("trackio")),
        ("wandb:my project", Target("wandb", "my project")),
        ("tensorboard:logs/tb", Target("tensorboard", "logs/tb")),
        ("mlflow:a:b", Target("mlflow", "a:b")),
    ],
)
def test_a_target_is_a_tracker_and_a_place(text: str, found: Target) -> None:
    assert target(text) == found
    assert str(found) == text


@pytest.mark.parametrize("text", ["", "comet", "wandb:", "wandb: ", ":x", "Wandb"])
def test_another_target_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        target(text)
    assert str(caught.value) == (
        "expected one of trackio, wandb, tensorboard, mlflow, or with a project or folder as in "
        f"wandb:digits, got {text!r}"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / kind).mkdir()  # W&B makes a folder of that name: it is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, kind, raising=False)
    with pytest.raises(RequestError) as caught:
        require(kind)
    assert str(caught.value) == (
        f"publishing to {kind} needs the package {kind}: `pip install 'nbddp[{kind}]'`"
    )


@pytest.mark.process
def test_no_tracker_is_imported_before_it_is_asked_for() -> None:
    code = (
        f"import sys, nbddp.magics\n{imported(Publication, require)}"
        "from nbddp.publish.kinds import KINDS\n"
        "for kind in KINDS:\n"
        "    try: require(kind)\n"
        "    except Exception: pass\n"
        f"print(sorted(set(sys.modules) & {set(KINDS)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_run_is_published_once_unless_asked(tmp_path: Path) -> None:
    folder = tmp_path / "20270115-080000-a-again7"
    folder.mkdir()
    assert name_there(folder, "wandb", is_again=False) == folder.name
    note(folder, "wandb", name=folder.name, where="there", is_whole=True)
    assert name_there(folder, "trackio", is_again=False) == folder.name
    with pytest.raises(RequestError) as caught:
        name_there(folder, "wandb", is_again=False)
    assert str(caught.value) == (
        f"run {folder.name} is published to wandb already (there); "
        "--again makes another run of it there"
    )
    for number in (2, 3):
        name = name_there(folder, "wandb", is_again=True)
        assert name == f"{folder.name}-again{number}"
        note(folder, "wandb", name=name, where="there")
    with pytest.raises(RequestError, match="began to be published to wandb already"):
        name_there(folder, "wandb", is_again=False)


# ---- the process, with a tracker that we made


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A package ``wandb`` that behaves as it is told."""
    monkeypatch.syspath_prepend(str(fake_wandb(tmp_path)))
    return lambda how: monkeypatch.setenv("FAKE_WANDB", how)


def test_a_run_is_published_by_a_process_and_noted(
    tmp_path: Path, fake: Callable[[str], None]
) -> None:
    fake("well")
    path = make_run(tmp_path)
    done = Publication(Target("wandb"), path, path.name, is_live=False).wait()
    assert (done["steps"], done["late"]) == (60, 0)
    assert done["where"] == f"project nbddp, run {path.name}, in there"
    assert read_note(path, "wandb")["is_whole"]
    log = (path / "publish-wandb.log").read_text().splitlines()
    assert log[0] == "noise"
    assert log[-1] == "finished 0"
    assert json.loads(log[1])["step"] == 0


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("nobody", "RuntimeError: no API key"),
        ("fails", "RuntimeError: the disk is full"),
        ("blocks", "wandb did not answer for 1 s (steps)"),
        ("dies", "its process exited with code 7"),
        ("broken", "the package wandb cannot be loaded: no such library"),
    ],
)
def test_a_tracker_that_does_not_take_it_is_said_in_a_line(
    tmp_path: Path, fake: Callable[[str], None], how: str, why: str
) -> None:
    fake(how)
    path = make_run(tmp_path)
    publication = Publication(Target("wandb"), path, path.name, is_live=False, patience=1)
    with pytest.raises(RequestError) as caught:
        publication.wait()
    log = path / "publish-wandb.log"
    assert str(caught.value) == f"publishing to wandb failed: {why} (more in {log})"
    assert publication.is_over
    assert not read_note(path, "wandb")


@pytest.mark.parametrize(("how", "told"), [("well", 1), ("blocks", 2), ("dies", 2), ("nobody", 1)])
def test_while_a_run_goes_on_its_process_follows_it_and_what_goes_wrong_is_said_once(
    tmp_path: Path, fake: Callable[[str], None], how: str, told: int
) -> None:
    fake(how)
    path = make_run(tmp_path, is_stopped=False, cells=(("train()", ""),))
    said: list[str] = []
    goes_on = threading.Event()
    goes_on.set()
    publication = Publication(Target("wandb"), path, path.name, is_live=True, patience=1)
    publication.follow(said.append, goes_on.is_set)
    deadline = time.monotonic() + 90
    while not said and time.monotonic() < deadline:
        time.sleep(0.02)
    goes_on.clear()
    assert publication.follower is not None
    publication.follower.join(30)
    assert publication.is_over
    assert len(said) <= told
    if how == "well":
        assert said == [f"published to wandb: project nbddp, run {path.name}, in there"]
        assert "finished" in (path / "publish-wandb.log").read_text()
    else:
        assert "failed" in said[-1]
        assert f"`%ddp publish wandb {path.name} --again` tries it later" in said[-1]


@pytest.mark.process
def test_it_ends_by_itself_when_its_notebook_is_killed(
    tmp_path: Path, fake: Callable[[str], None]
) -> None:
    """A child that the notebook has forked keeps our standard input open: it is not waited for."""
    fake("well")
    path = make_run(tmp_path, is_stopped=False, cells=(("train()", ""),))
    code = (
        "import os, sys, time\nfrom pathlib import Path\n"
        f"{imported(Target, Publication)}"
        f"made = Publication(Target('wandb'), Path({str(path)!r}), 'a', is_live=True)\n"
        "print(made._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == -9
    deadline = time.monotonic() + 90
    while not read_note(path, "wandb").get("is_whole") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert read_note(path, "wandb")["steps"] == 60
    assert "finished" in (path / "publish-wandb.log").read_text()


# ---- what is written in a notebook


def test_a_cell_and_a_line_take_a_tracker_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_module, "require", lambda _kind: None)
    args = parse(CellMagics.ddp, "--publish wandb --publish tensorboard:logs")
    assert args.publish == [Target("wandb"), Target("tensorboard", "logs")]
    for line in ("mlflow:a digits --again", "mlflow:a --again digits", "--again mlflow:a digits"):
        args = parse(LineMagics.publish, line)
        assert (args.tracker, args.run, args.again) == (Target("mlflow", "a"), "digits", True)
    assert parse(LineMagics.run, "--publish trackio a.py --publish x").publish == [
        Target("trackio")
    ]


@pytest.mark.parametrize(
    ("function", "line", "what"),
    [
        (CellMagics.ddp, "--publish comet", "argument --publish: expected one of trackio, wandb,"),
        (LineMagics.publish, "comet", "argument TRACKER: expected one of trackio, wandb,"),
        (LineMagics.publish, "", "the following arguments are required: TRACKER"),
    ],
)
def test_another_tracker_is_refused_before_anything_starts(
    function: Any, line: str, what: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(function, line)
    assert what in str(caught.value)


def test_a_tracker_whose_package_is_missing_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError) as caught:
        parse(CellMagics.ddp, "--publish wandb")
    assert str(caught.value) == (
        "argument --publish: publishing to wandb needs the package wandb: "
        "`pip install 'nbddp[wandb]'`"
    )


def line_magics(current: Path | None = None) -> tuple[LineMagics, Mock]:
    desk = Mock(shell=None, current_run=current)
    return LineMagics(desk), desk


def test_a_run_that_is_over_is_published_and_told(
    tmp_path: Path, fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("well")
    monkeypatch.chdir(tmp_path)
    path = make_run(tmp_path)
    line, desk = line_magics()
    line.ddp("publish wandb:my-digits digits")
    desk.views.say.assert_called_once_with(
        f"nbddp: 60 steps published to wandb: project my-digits, run {path.name}, in there"
    )
    with pytest.raises(UsageError, match="is published to wandb already"):
        line.ddp("publish wandb digits")


def test_the_run_that_goes_on_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_module, "require", lambda _kind: None)
    monkeypatch.chdir(tmp_path)
    path = make_run(tmp_path, is_stopped=False)
    line, desk = line_magics(path)
    line.ddp("publish wandb")
    desk.publishing.begin.assert_called_once_with(Target("wandb"), is_again=False)


def test_a_run_of_another_kernel_that_goes_on_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_module, "require", lambda _kind: None)
    monkeypatch.chdir(tmp_path)
    path = make_run(tmp_path, is_stopped=False)
    facts = json.loads((path / "run.json").read_text())
    del facts["ended"]
    mine = facts | {"host": platform.node(), "pid": os.getpid()}
    (path / "run.json").write_text(json.dumps(mine))
    line, _ = line_magics()
    with pytest.raises(UsageError) as caught:
        line.ddp("publish wandb")
    assert str(caught.value) == (
        f"run {path.name} goes on in another kernel: publish it from there, or when it is over"
    )


def test_what_several_cells_ask_for_is_published_once(
    tmp_path: Path, fake: Callable[[str], None]
) -> None:
    fake("well")
    path = make_run(tmp_path, is_stopped=False, cells=(("train()", ""),))
    line = Mock(folder=Mock(path=path))
    said: list[str] = []
    session = Mock(time_line=line, call=lambda act, *words: act(*words))
    line.tell = said.append
    publishing = Publishing(lambda: session, said.append)
    for _ in range(3):
        publishing.follow([Target("wandb")])
    with pytest.raises(RequestError, match="is being published to wandb"):
        publishing.begin(Target("wandb"), is_again=True)
    line.folder = None  # it was stopped
    [publication] = publishing._begun.values()
    assert publication.follower is not None
    publication.follower.join(30)
    assert said == [f"published to wandb: project nbddp, run {path.name}, in there"]
    line.folder = Mock(path=path)
    publishing.follow([Target("wandb")])
    assert len(said) == 1
    with pytest.raises(RequestError, match="--again makes another run of it there"):
        publishing.begin(Target("wandb"), is_again=False)
