"""Where a run is published to, and what becomes of a tracker that fails or blocks."""

import json
import os
import platform
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from console import ddp, refused
from drivers.inside import imported
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from processes import wait_until
from published import fake_wandb
from refusals import refusal
from runs_on_disk import BEGAN, events_of, lines, make_run, rows_of
from syrupy.assertion import SnapshotAssertion
from typed import RUNS, Run, Typed

from nbddp.errors import RequestError
from nbddp.extensions.publish import TRACKER_CLASSES, PublishOptions
from nbddp.extensions.publish.notebook import Publishing
from nbddp.extensions.publish.publication import Publication
from nbddp.extensions.publish.publisher import (
    STEPS_PER_CALL,
    Publisher,
    name_in_tracker,
    read_published,
    write_published,
)
from nbddp.extensions.publish.step_aggregator import AggregatedStep
from nbddp.extensions.publish.tracker import Target, Tracker, plain_name
from nbddp.extensions.runs.stored_run import StoredRun
from nbddp.group.notebook_half import CellToRun
from nbddp.magics.parser import CELL, COMMANDS, parse_line
from nbddp.sigint import wait_for_all

# ---- a whole run, to a tracker that records its calls


def noting() -> Mock:
    return Mock(spec=Tracker, **{"start.return_value": "here"})


def points_of(tracker: Mock) -> list[AggregatedStep]:
    return [point for call in tracker.log_steps.call_args_list for point in call.args[0]]


def publisher_of(path: Path, tracker: Mock, *, is_live: bool = False) -> Publisher:
    given = {"name": path.name, "project": "", "limit": nullcontext, "report_start": Mock()}
    return Publisher(path, tracker, is_live=is_live, **given)


def published(path: Path) -> Mock:
    """A tracker to which a finished run was published."""
    tracker = noting()
    publisher_of(path, tracker).finish()
    return tracker


def running(base: Path, **more: Any) -> Path:
    """A run whose only cell is still running."""
    return make_run(base, is_stopped=False, cells=(("train()", ""),), **more)


def append(path: Path, *events: Mapping[str, Any]) -> None:
    with (path / "events.jsonl").open("a") as file:
        file.write(lines(events))


def test_a_run_becomes_one_tracker_run_with_its_config_outcome_and_events(tmp_path: Path) -> None:
    values = {"lr": 0.1, "sizes": [1, 2]}
    config = {"kind": "config", "time": BEGAN + 2, "rank": 0, "values": values}
    failure = {"kind": "failure", "time": BEGAN + 5, "rank": 1, "what": "ValueError: odd"}
    path = make_run(
        tmp_path,
        cells=(("train()", "rank 1: ValueError: odd"),),
        extra=(config, failure),
        config={"lr": 0.1},
        git={"commit": "abc", "dirty": True},
        failures=1,
    )
    tracker = published(path)
    [run], [outcome] = tracker.start.call_args.args, tracker.finish.call_args.args
    assert run.name == path.name
    settings = {"lr": 0.1, "sizes": "[1, 2]", "nbddp.world_size": 2, "nbddp.git.commit": "abc"}
    assert run.settings.items() >= settings.items()
    assert (outcome.outcome, outcome.why) == ("failed", "rank 1: ValueError: odd")
    assert outcome.totals["failures"] == 1
    texts = [text for _, text in outcome.events]
    assert texts == [
        *("start: attempt 1", "cell 1 begins", "rank 1: ValueError: odd"),
        *("cell 1: rank 1: ValueError: odd", "stopped"),
    ]
    assert [call.args[1] for call in tracker.log_event.call_args_list] == texts


def test_a_tracker_gets_points_in_bounded_batches(tmp_path: Path) -> None:
    count = 2 * STEPS_PER_CALL + 1
    tracker = published(make_run(tmp_path, rows=rows_of(count, ranks=1)))
    given = [len(call.args[0]) for call in tracker.log_steps.call_args_list]
    assert given == [STEPS_PER_CALL, STEPS_PER_CALL, 1]
    found = [(point.step, point.time) for point in points_of(tracker)]
    assert found == [(step, BEGAN + 1 + step / 10) for step in range(count)]


@given(st.text() | st.text("./a"))
def test_plain_name_makes_a_valid_mlflow_name_from_any_text(name: str) -> None:
    plain = plain_name(name)
    assert re.fullmatch(r"[/\w.\- :]{1,250}", plain)
    assert posixpath.normpath(plain) == plain
    assert plain != "."
    assert not plain.startswith(("/", ".."))
    assert len({plain_name("d" * 300 + end) for end in ("", "/min", "/max")}) == 3


def test_the_first_published_step_of_each_attempt_names_the_attempt(tmp_path: Path) -> None:
    rows = [
        *rows_of(3, ranks=1),
        *(found | {"time": BEGAN + 15, "attempt": 2} for found in rows_of(3, ranks=2)),
    ]
    again = {"kind": "start", "attempt": 2, "world_size": 2, "time": BEGAN + 14}
    points = points_of(published(make_run(tmp_path, rows=rows, extra=(again,))))
    assert [each.values.get("nbddp/attempt") for each in points] == [1, None, None, 2, None, None]
    assert [each.values.get("nbddp/world_size") for each in points[::3]] == [2, 2]


def cell_rows(cell: int, steps: range) -> list[dict[str, Any]]:
    """The rows of a cell that ``make_run`` starts at this place."""
    at = BEGAN + 2 + 10 * cell
    return [
        {"time": at + step / 100, "rank": rank, "attempt": 1, "step": step, "loss": 0.5}
        for step in steps
        for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("cells", "last"),
    [
        ([range(20)] * 3, 59),
        ([range(20), range(20, 40), range(20)], 59),
        ([range(0, 20, 5), range(0, 20, 5)], 35),
        ([range(20), range(3), range(9)], 31),
        ([range(4), range(4, 2, -1)], 5),
    ],
)
def test_published_steps_are_those_of_the_run_s_charts(
    tmp_path: Path, cells: list[range], last: int
) -> None:
    rows = [row for cell, steps in enumerate(cells) for row in cell_rows(cell, steps)]
    path = make_run(tmp_path, rows=rows, cells=[("train()", "ok")] * len(cells))
    published_steps = [each.step for each in points_of(published(path))]
    assert published_steps[-1] == last
    assert published_steps == [*StoredRun(path).metrics().curves("loss")[0].steps]


def test_a_retry_after_a_failure_publishes_the_repeated_steps_again(tmp_path: Path) -> None:
    retry = {"number": 2, "ranks": [0, 1], "source": "train()", "again": True, "kind": "cell"}
    rows = [*cell_rows(0, range(5)), *cell_rows(1, range(3, 7)), *cell_rows(2, range(2))]
    path = make_run(tmp_path, rows=rows, extra=[{**retry, "time": BEGAN + 11.5}])
    append(path, {**retry, "again": False, "time": BEGAN + 21.5})
    assert [each.step for each in points_of(published(path))] == [*range(5), *range(3, 9)]


def test_a_running_run_is_published_while_it_grows(tmp_path: Path) -> None:
    path = running(tmp_path, rows=[])
    (path / "run.json").write_text(json.dumps({"nproc": 2}))
    tracker = noting()
    publisher = publisher_of(path, tracker, is_live=True)
    with (path / "metrics.jsonl").open("a") as file:
        for number, found in enumerate(rows_of(60)):
            file.write(json.dumps(found) + "\n")
            if number % 7 == 0:
                file.flush()
                publisher.publish_new()
    publisher.publish_new()
    assert 50 < len(points_of(tracker)) <= 60
    tracker.finish.assert_not_called()
    append(path, *events_of(("train()", "ok"))[-2:-1])
    publisher.publish_new()
    publisher.publish_new()
    assert len(points_of(tracker)) == 60  # the last step waits for no rank once the cell is over
    restart = {"kind": "start", "attempt": 2, "world_size": 2, "time": BEGAN + 20}
    for event, has_stopped in ((events_of()[-1], True), (restart, False)):
        append(path, event)
        publisher.publish_new()
        assert publisher.has_stopped == has_stopped
    publisher.finish()
    assert points_of(tracker) == points_of(published(path))
    assert tracker.start.call_count == tracker.finish.call_count == 1


def test_settings_reported_later_update_the_tracker_config_once(tmp_path: Path) -> None:
    path, tracker = running(tmp_path), noting()
    publisher = publisher_of(path, tracker, is_live=True)
    publisher.publish_new()
    config = {"kind": "config", "time": BEGAN + 9, "rank": 1, "values": {"lr": 0.5}}
    append(path, config, config | {"rank": 0, "values": {"lr": 0.7}})
    publisher.publish_new()
    publisher.finish()
    tracker.update_config.assert_called_once_with({"lr": 0.7})


def test_a_damaged_folder_is_published_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    path = make_run(tmp_path, torn='{"time": 3, "ra', extra=({"kind": "start", "time": 1.0},))
    assert len(points_of(published(path))) == 60


# ---- where to


def test_an_unknown_tracker_and_a_missing_package_are_refused_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    for text in ("", "comet", "wandb:", "wandb: ", ":x", "Wandb"):
        reason = refusal(UsageError, parse_line, CELL, f"--publish '{text}'")
        assert repr(text) in reason
        assert all(kind in reason for kind in TRACKER_CLASSES)
    assert reason == snapshot
    assert "TRACKER" in refusal(UsageError, parse_line, COMMANDS["publish"], "")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for kind in TRACKER_CLASSES:
        (tmp_path / kind).mkdir()  # W&B makes a folder of that name: it is no package
        monkeypatch.delitem(sys.modules, kind, raising=False)
        reason = refusal(UsageError, parse_line, COMMANDS["publish"], kind)
        assert f"`pip install 'nbddp[{kind}]'`" in reason
    assert reason == snapshot


def test_publishing_a_run_twice_needs_again(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    folder = tmp_path / "20270115-080000-a-again7"
    folder.mkdir()
    assert name_in_tracker(folder, "wandb", is_again=False) == folder.name
    write_published(folder, "wandb", name=folder.name, where="there", is_whole=True)
    assert name_in_tracker(folder, "trackio", is_again=False) == folder.name
    whole = refusal(RequestError, name_in_tracker, folder, "wandb", is_again=False)
    for number in (2, 3):
        name = name_in_tracker(folder, "wandb", is_again=True)
        assert name == f"{folder.name}-again{number}"
        write_published(folder, "wandb", name=name, where="there")
    begun = refusal(RequestError, name_in_tracker, folder, "wandb", is_again=False)
    assert [whole, begun] == snapshot


# ---- the process, with a tracker that we made


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.syspath_prepend(str(fake_wandb(tmp_path)))
    return lambda how: monkeypatch.setenv("FAKE_WANDB", how)


def test_publish_records_and_prints_its_result(folder: Path, fake: Callable[[str], None]) -> None:
    fake("well")
    path = make_run(folder)
    reply = ddp("publish wandb:my-digits digits")
    assert "60 steps" in reply
    noted = read_published(path, "wandb")
    assert (noted["steps"], noted["late"], noted["is_whole"]) == (60, 0, True)
    assert noted["where"] == f"project my-digits, run {path.name}, in there"
    assert noted["where"] in reply
    log = (path / "publish-wandb.log").read_text().splitlines()
    assert (log[0], log[-1]) == ("noise", "finished 0")
    assert json.loads(log[1])["step"] == 0
    assert "--again" in refused("publish wandb digits")


def test_a_tracker_error_is_reported_in_one_line(
    tmp_path: Path, fake: Callable[[str], None], snapshot: SnapshotAssertion
) -> None:
    publications, reasons = {}, {}
    for how in ("fails", "blocks", "dies", "broken"):
        fake(how)
        path = make_run(tmp_path, how)
        publications[how] = Publication(Target("wandb"), path, path.name, timeout=1)
    for how, publication in publications.items():
        reasons[how] = refusal(RequestError, publication.wait).replace(str(tmp_path), "BASE")
        assert not read_published(publication.folder, "wandb")
    assert reasons == snapshot


@pytest.mark.parametrize(("how", "told"), [("dies", 2), ("no key", 1)])
def test_publishing_errors_of_a_running_run_are_reported_once(
    tmp_path: Path, fake: Callable[[str], None], how: str, told: int, snapshot: SnapshotAssertion
) -> None:
    fake(how)
    path, remarks = running(tmp_path), list[str]()
    publication = Publication(Target("wandb"), path, path.name, remarks.append)
    wait_for_all([publication.result], 90)
    assert isinstance(publication.result.exception(), RequestError)
    assert len(remarks) <= told
    assert remarks[-1].replace(str(tmp_path), "BASE") == snapshot


@pytest.mark.process
def test_the_publisher_ends_with_its_notebook(tmp_path: Path, fake: Callable[[str], None]) -> None:
    """A child that the notebook has forked keeps our standard input open: it is not waited for."""
    fake("well")
    path, end = running(tmp_path), tmp_path / "end"
    code = (
        "import os, time\nfrom pathlib import Path\n"
        f"{imported(Target, Publication)}"
        f"Publication(Target('wandb'), Path({str(path)!r}), 'a', print)\n"
        f"if os.fork():\n    os.kill(os.getpid(), 9)\n"
        f"while not os.path.exists({str(end)!r}):\n    time.sleep(0.05)\n"
        "os._exit(0)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -9
        assert wait_until(lambda: bool(read_published(path, "wandb").get("is_whole")), timeout=90.0)
    finally:
        end.touch()
    assert read_published(path, "wandb")["steps"] == 60
    assert "finished" in (path / "publish-wandb.log").read_text()


# ---- options in a notebook


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbddp.extensions.publish.notebook.require_package", lambda _kind: None)


@pytest.mark.usefixtures("installed")
def test_the_publish_option_and_command_accept_installed_trackers() -> None:
    args = parse_line(CELL, "--publish wandb --publish tensorboard:logs --publish mlflow:a:b")
    targets = args.extensions[PublishOptions].publish
    assert [*map(str, targets)] == ["wandb", "tensorboard:logs", "mlflow:a:b"]
    for line in ("mlflow:a digits --again", "mlflow:a --again digits", "--again mlflow:a digits"):
        args = parse_line(COMMANDS["publish"], line)
        assert (args.tracker, args.run, args.again) == (Target("mlflow", "a"), "digits", True)
    args = parse_line(COMMANDS["run"], "--publish trackio a.py --publish x")
    assert args.extensions == {PublishOptions: PublishOptions(publish=[Target("trackio")])}


@pytest.mark.usefixtures("installed")
def test_publishing_an_active_run_tells_its_place_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    run, late = make_run(folder, "digits", is_stopped=False), Mock()
    monkeypatch.setattr("nbddp.extensions.publish.notebook.Publication", started := Mock())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    told = []
    for tracker in ("tensorboard:logs", "trackio", "wandb", "mlflow"):
        told.append(ddp(f"publish {tracker}", current_run=run, notifier=lambda: late))
        *_, notify = started.call_args.args
        notify(f"published to {tracker.partition(':')[0]}: there")
    assert told == snapshot
    late.assert_called_once_with("published to wandb: there")
    notify("mlflow did not answer")
    assert late.call_count == 2


@pytest.mark.usefixtures("installed")
def test_another_kernels_active_run_is_refused(folder: Path, snapshot: SnapshotAssertion) -> None:
    path = make_run(folder, is_stopped=False)
    facts = {"host": platform.node(), "pid": os.getpid(), "nproc": 2}
    (path / "run.json").write_text(json.dumps(facts))
    assert refused("publish wandb") == snapshot


def test_a_running_run_is_published_once_for_several_cells(
    tmp_path: Path, fake: Callable[[str], None], snapshot: SnapshotAssertion
) -> None:
    fake("well")
    path, remarks = running(tmp_path), list[str]()
    notebook = Mock(current_run=path, notifier=lambda: remarks.append, print_line=remarks.append)
    publishing = Publishing(notebook)
    cell = CellToRun(given={PublishOptions: PublishOptions(publish=[Target("wandb")])})
    for _ in range(3):
        publishing.before_cell(cell)
    start = partial(publishing._start, path, Target("wandb"))
    under_way = refusal(RequestError, start, is_again=True)
    append(path, events_of()[-1])
    [publication] = publishing._publications.values()
    wait_for_all([publication.result], 90)
    assert publication.result.result()["steps"] == 60
    assert [under_way, *remarks] == snapshot
    assert "finished" in (path / "publish-wandb.log").read_text()
    publishing.before_cell(cell)
    assert len(remarks) == 1
    assert "--again" in refusal(RequestError, start, is_again=False)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_cell_or_a_script_has_the_given_trackers(
    typed: Typed, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbddp.extensions.publish.notebook.require_package", lambda _kind: None)
    extensions = Mock(run_cell=lambda _cell: False)
    extensions.before_cell.side_effect = lambda cell: cell.given
    typed.notebook.extensions = extensions
    run(typed, "--publish wandb:digits")
    [cell] = extensions.before_cell.call_args.args
    assert cell.options(PublishOptions).publish == [Target("wandb", "digits")]
