"""``%ddp runs``: one line for each matching run, in the requested order."""

import errno
import json
import math
import os
import platform
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from console import ddp, refused
from hypothesis import example, given
from hypothesis import strategies as st
from pages import Page, readable
from runs_on_disk import BEGAN, lines, make_run, rows_of

from nbddp.errors import ArgumentError, RequestError
from nbddp.extensions.runs import SHOWN_RUNS
from nbddp.extensions.runs.comparison import compare
from nbddp.extensions.runs.run_list import Listing, list_runs, write_note
from nbddp.extensions.runs.run_list_view import describe_outcome, run_list_report
from nbddp.extensions.runs.summary import Summary, summarize
from nbddp.ui.report.render import render_html, render_text


def three(base: Path) -> None:
    for number, rate in enumerate((0.1, 0.01, 1.0), start=1):
        cells = [("train()", "ok" if number < 3 else "rank 1: ValueError: <no>")]
        rows = rows_of(60, pace=10.0 * number, begin=rate * 10)
        name = f"20270115-08000{number}-digits{number}"
        make_run(base, name, cells=cells, rows=rows, config={"lr": rate, "model": "cnn"})


def text_of(listing: Listing) -> str:
    return render_text(run_list_report(listing))


def page_of(listing: Listing) -> str:
    return render_html(run_list_report(listing))


def names(listing: Listing) -> str:
    return "".join(run.name[-1] for run in listing.runs)


# ---- a run in a line


def test_all_runs_are_listed_in_the_current_time_zone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(folder, "20270115-080000-ended")
    live = make_run(folder, "20270115-080000-live", is_stopped=False)
    monkeypatch.setenv("TZ", "Asia/Tokyo")  # as %env does
    shown = text_of(list_runs(folder, current=live))
    monkeypatch.undo()
    time.tzset()
    assert shown.count("  01-15 17:00  ") == 2


def test_a_run_is_listed_with_its_samples_per_second_and_the_time_lost(folder: Path) -> None:
    make_run(folder, samples_per_step=64, seconds_lost=1.5)
    text = ddp("runs")
    assert "  10.0/s, 640 samples/s  " in text
    assert "  ok · 1.5 s lost to failures  " in text


STOPPED = "ranks 0-1 interrupted, line 3"


def test_a_run_that_was_stopped_is_listed_as_interrupted(folder: Path) -> None:
    path = make_run(folder, cells=[("train()", STOPPED)], interrupted=True)
    events = [json.loads(each) for each in (path / "events.jsonl").read_text().splitlines()]
    stopped = [each | {"interrupted": True} if "outcome" in each else each for each in events]
    (path / "events.jsonl").write_text(lines(stopped))
    for _ in range(2):  # the second time from the events only
        run = summarize(path)
        assert (run.outcome, run.why, describe_outcome(run)) == ("interrupted", STOPPED, STOPPED)
        assert describe_outcome(replace(run, why="long " * 50)).endswith("long…")
        assert len(list_runs(folder, ["outcome=interrupted"]).runs) == 1
        (path / "run.json").write_text('{"nproc": 2}')


def change_facts(path: Path, *without: str, **facts: Any) -> None:
    facts_of_run = json.loads((path / "run.json").read_text()) | facts
    kept = {name: value for name, value in facts_of_run.items() if name not in without}
    (path / "run.json").write_text(json.dumps(kept))


def killed(base: Path, name: str = "20270115-080000-digits", **facts: Any) -> Path:
    cells = [("a()", "ok"), ("b()", "")]
    path = make_run(base, name, cells=cells, is_stopped=False, torn='{"t', **facts)
    change_facts(path, "ended")
    return path


def test_the_summary_of_a_run_without_an_end_says_whether_its_kernel_is_alive(folder: Path) -> None:
    began = psutil.Process().create_time() + 1
    path = killed(folder, host=platform.node(), pid=os.getpid())
    events = [{"time": began, "kind": "start", "attempt": 1, "world_size": 3}]
    assert summarize(path).outcome == "running"
    change_facts(path, "outcome")
    (path / "events.jsonl").write_text(lines(events))
    run = summarize(path)
    assert (run.outcome, run.ranks, run.is_live) == ("empty", 3, True)
    (path / "events.jsonl").write_text(lines([{**events[0], "time": began - 1000}]))
    assert (summarize(path).outcome, summarize(path).is_live) == ("killed", False)
    assert summarize(path, current=path).is_live
    assert summarize(killed(folder, "20270115-09", host="elsewhere")).outcome == "not recorded"


def test_a_running_run_shows_the_outcome_of_its_last_cell(folder: Path) -> None:
    death = "rank 1 was killed by SIGSEGV"
    expected = {("ok",): "ok · ranks still running"}
    expected |= {(death,): f"failed: {death} · ranks still running"}
    other = make_run(folder, "20270115-090000-other")
    for number, (outcomes, text) in enumerate((expected | {(death, ""): "running"}).items()):
        cells = [("train()", outcome) for outcome in outcomes]
        name = f"run{number}"
        path = make_run(folder, name, cells=cells, is_stopped=False, outcome=outcomes[0])
        change_facts(path, "ended")
        assert describe_outcome(summarize(path, current=path)) == text
        compared = compare([path, other], current=path).runs[0]
        assert describe_outcome(compared.summary) == text


def test_a_killed_run_is_summarized_from_run_json_and_its_events(folder: Path) -> None:
    told = {"time": BEGAN + 0.5, "kind": "config", "values": {"lr": 0.3}, "rank": 0}
    path = killed(folder, extra=[told])
    change_facts(path, outcome="rank 0: ValueError")  # of the cell before
    run = summarize(path)
    assert (run.config, run.outcome, run.steps) == ({"lr": 0.3}, "not recorded", 60)
    assert run.why == "cell [2] was running"
    assert run.last["loss"] > 0
    (path / "run.json").write_text("{")
    run = summarize(path)
    assert (run.config, run.outcome, run.steps) == ({"lr": 0.3}, "not recorded", None)
    assert run.began == BEGAN


# ---- the list


def test_runs_can_be_filtered_and_are_listed_newest_first(folder: Path) -> None:
    three(folder)
    for asked, found in (
        *(([], "321"), (["lr=0.1"], "1"), (["lr=1e-1"], "1"), (["lr>=0.1"], "31")),
        *((["lr!=0.1"], "32"), (["lr<x"], ""), (["lr < 1"], "21"), (["model=c*"], "321")),
        *((["outcome=failed"], "3"), (["digits2"], "2"), (["ranks>2"], "")),
        *((["steps/s>15"], "32"), (["digits", "lr<1", "loss<1"], "21")),
    ):
        listing = list_runs(folder, asked)
        assert (names(listing), listing.total) == (found, 3), asked


def test_sorted_runs_without_a_number_come_last(folder: Path) -> None:
    three(folder)
    lost = [{"time": BEGAN, "rank": 0, "attempt": 1, "step": 0, "loss": math.nan}]
    make_run(folder, "20270115-080009-other4", rows=lost, config={"lr": "auto"})
    make_run(folder, "20270115-080009-other5", rows=[], config={})
    for sort, is_down, order in (
        ("lr", False, "21345"),
        ("lr", True, "43125"),
        ("loss", False, "213"),
        ("loss", True, "312"),
    ):
        assert names(list_runs(folder, sort=sort, is_down=is_down)).startswith(order), sort
    by_time = [names(list_runs(folder, sort="when", is_down=each)) for each in (False, True)]
    assert by_time[0] == by_time[1]


def test_unreadable_folders_are_named_and_left_out_of_the_list(folder: Path) -> None:
    three(folder)
    runs = folder / ".nbddp" / "runs"
    for name in ("empty", "torn", "odd", ".x.gone"):
        (runs / name).mkdir()
    (runs / "a-file").touch()
    (runs / "torn" / "events.jsonl").write_text('{"time": 1.0, "kind": "start", "attempt": 1}\n')
    (runs / "odd" / "events.jsonl").write_text("")
    (runs / "odd" / "run.json").write_text('{"format": 2, "ended": 1, "last": [1], "config": 7}')
    gone = runs / "20270115-090000-gone"  # by hand, while it goes on
    listing = list_runs(folder, current=gone)
    assert names(listing) == "321"
    empty, away, odd, torn = listing.left_out
    assert (empty, away) == (f"{gone.name} has no events.jsonl", "empty has no events.jsonl")
    assert odd.startswith("odd is damaged, or not a run of nbddp (")
    assert torn == "torn is damaged, or not a run of nbddp (KeyError: 'world_size')"
    assert all(why in text_of(listing) for why in listing.left_out)


def test_the_error_for_an_unknown_sort_column_names_some_metrics(folder: Path) -> None:
    row = {f"layer{number}/grad": 1.0 for number in range(3000)}
    make_run(folder, rows=[{"time": BEGAN, "rank": 0, "attempt": 1, "step": 0, **row}])
    with pytest.raises(ArgumentError, match=r"began, name, .*layer11/grad, 52 more"):
        list_runs(folder, sort="lose")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
SUMS = ["steps", "steps_per_second", "samples_per_step", "seconds_lost", "world_size"]
OTHERS = ["format", "ended", "config", "last", "curves", "started", "outcome", "host", "pid"]
FIELDS = st.sampled_from([*SUMS, *OTHERS])


@example(facts={"world_size": math.inf}, event=False)
@given(facts=st.dictionaries(FIELDS, JSON, max_size=15) | JSON, event=JSON)
def test_any_files_are_listed_or_left_out(facts: Any, event: Any, tmp_path_factory: Any) -> None:
    base: Path = tmp_path_factory.mktemp("any")
    path = base / ".nbddp" / "runs" / "x"
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(facts))
    kinds = ("start", "cell", "config", "cell ended")
    rows = [
        {"time": 1.0, "kind": kind, **(event if isinstance(event, dict) else {})} for kind in kinds
    ]
    (path / "events.jsonl").write_text(lines(rows[: len(str(event)) % 5]))
    (path / "metrics.jsonl").write_text(json.dumps(event) + "\n")
    listing = list_runs(base)
    assert len(listing.runs) + len(listing.left_out) == 1
    assert text_of(listing)
    Page(page_of(listing))


# ---- columns


def listed(*runs: dict[str, Any]) -> Listing:
    return Listing(tuple(Summary(path=Path(str(i)), **run) for i, run in enumerate(runs)))


def test_columns_show_results_before_learning_rates_and_speeds() -> None:
    trained = dict.fromkeys(["loss", "grad_norm", "learning_rate", "samples_per_second"], 1.0)
    runs = [Summary(path=Path("a"), last=trained), Summary(path=Path("b"), last=trained)]
    assert Listing(tuple(runs)).metrics == ["loss", "grad_norm", "learning_rate"]
    runs.append(Summary(path=Path("c"), last={**trained, "eval_loss": 1.0, "eval_lr_mae": 1.0}))
    assert Listing(tuple(runs)).metrics == ["loss", "eval_loss", "eval_lr_mae"]


def test_a_setting_and_a_metric_of_the_same_name_have_different_column_titles() -> None:
    first = {"config": {"lr": 0.1, "seed": 1}, "last": {"lr": 0.05, "loss": 1.0}}
    listing = listed(first, {"config": {"lr": 0.3, "seed": 2}})
    assert (listing.settings, listing.metrics) == (["lr", "seed"], ["loss", "lr"])
    assert listing.titles == ["lr (config)", "seed", "loss", "lr (last)"]


def test_each_run_shows_the_curve_of_its_first_metric_with_several_points() -> None:
    point, line = [[1.0, 1.0]], [[1.0, 1.0], [2.0, 2.0]]
    plain = {"last": {"size": 1, "loss": 1}, "curves": {"size": point, "loss": line}}
    other = {"last": {"train/loss": 1}, "curves": {"train/loss": line}}
    listing = listed(plain, plain, other, {"curves": {"size": point}}, {})
    assert listing.curve_name == "loss"
    assert [listing.curve_of(run)[0] for run in listing.runs] == [
        *("loss", "loss", "train/loss", "size", "")
    ]
    assert listing.curve_of(listing.runs[2])[1] == line
    assert listed({}).curve_name == ""
    for text in (text_of(listing), Page(page_of(listing)).text):
        assert "curve of loss" in text
        assert "train/loss" in text


def test_runs_of_several_programs_say_which_started_them(folder: Path) -> None:
    for number, name in enumerate(("digits.ipynb", "digits.ipynb", "<b>.py")):
        make_run(folder, f"2027011{number}-080000-a", started_by=name)
    all_runs, few = list_runs(folder), list_runs(folder, ["started_by=digits.ipynb"])
    assert [run.started_by for run in few.runs] == ["digits.ipynb"] * 2
    for listing, is_told in ((all_runs, True), (few, False)):
        assert listing.has_several_programs == is_told
        assert ("started by" in text_of(listing)) == is_told
        assert ("<b>.py" in Page(page_of(listing)).text) == is_told


# ---- on the page, as text, and refusals


def without_times(text: str) -> str:
    """The start time of a run is shown in local time."""
    return re.sub(r"\d\d-\d\d \d\d:\d\d", "MM-DD hh:mm", text)


def test_the_list_of_runs_as_text_and_as_html(folder: Path, snapshot: Any) -> None:
    assert "%%ddp" in ddp("runs")
    three(folder)
    assert without_times(ddp("runs")) == snapshot(name="text")
    assert without_times(readable(page_of(list_runs(folder)))) == snapshot(name="page")


def test_the_runs_command_filters_sorts_limits_and_names_the_command_for_more(folder: Path) -> None:
    three(folder)
    title, _, first, note = ddp("runs lr<1 --sort loss --down -n 1").splitlines()
    assert title.startswith("2 of 3 runs, ")
    assert "digits1" in first
    assert "`%ddp runs -n 2`" in note
    runs = tuple(Summary(path=Path(f"run{number}")) for number in range(SHOWN_RUNS + 5))
    text = text_of(Listing(runs, total=len(runs)))
    assert len(text.splitlines()) == 2 + SHOWN_RUNS + 1
    assert "5 more: `%ddp runs -n 55`" in text


def test_refused_arguments_get_an_error_with_the_reason(folder: Path, snapshot: Any) -> None:
    three(folder)
    asked = ["seed=1", "--sort lose", "lr<", "rm", "note", "rm digits", "rm none", "rm ''"]
    asked += ["note digits2 ''", "note digits2 better --off"]
    assert {line: refused(f"runs {line}") for line in asked} == snapshot
    for odd in ("lr < 5", "lr<", "<5", "lr<<5", "lr=<5", "lr<>5", "=", "lr==", "'lr< '"):
        assert "=, ==, !=, <, >, <=, >=" in refused(f"runs {odd}"), odd


# ---- what goes, and what stays


def test_runs_rm_removes_runs_by_name_even_damaged_ones(folder: Path) -> None:
    three(folder)
    path = Path(".nbddp/runs/20270115-080001-digits1")
    (path.parent / "odd").mkdir()
    reply = ddp(f"runs rm digits1 {path} {folder / path} digits2 odd")
    assert reply.endswith(": 20270115-080001-digits1, 20270115-080002-digits2, odd")
    assert "3 runs" in reply
    assert [each.name for each in path.parent.iterdir()] == ["20270115-080003-digits3"]


def test_runs_rm_removes_no_active_run_and_nothing_outside_the_runs_folder(folder: Path) -> None:
    three(folder)
    for name in ("..", "../..", ".", "/", "runs/../../..", "x" * 5000):
        assert len(refused(f"runs rm {name}")) < 300
    assert names(list_runs(folder)) == "321"
    path = killed(folder, host=platform.node(), pid=os.getpid())
    for current in (path, None):
        assert "`%ddp stop`" in refused(f"runs rm {path.name}", current_run=current)
    assert path.is_dir()


def test_a_run_that_cannot_be_deleted_stays_in_the_list(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(folder)
    path = folder / ".nbddp/runs/20270115-080001-digits1"
    linked = path.rename(folder / "elsewhere")
    path.symlink_to(linked)
    assert refused("runs rm digits1").endswith(f"its folder {linked} and the link yourself")

    def fail(_path: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", fail)
    assert refused("runs rm digits2").endswith("cannot be deleted: Permission denied")
    assert names(list_runs(folder)) == "321"


def test_a_note_of_a_run_is_shown_and_searchable(folder: Path) -> None:
    three(folder)
    note = "20270115-080002-digits2: the best so far"
    assert ddp("runs note digits2 the best so far") == ddp("runs note digits2") == f"nbddp: {note}"
    assert "ok · the best so far" in ddp("runs best")
    assert names(list_runs(folder, ["best"])) == "2"
    refused("runs note digits2 better --off")
    assert summarize(folder / ".nbddp/runs/20270115-080002-digits2").note == "the best so far"
    ddp("runs note digits2 --off")
    assert "best" not in ddp("runs note digits2")


@pytest.mark.parametrize("act", ["runs rm", "runs rm digits1", "runs note", "compare", "show"])
def test_an_empty_name_is_not_the_newest_run(act: str, folder: Path) -> None:
    three(folder)
    before = {path: path.stat().st_mtime_ns for path in (folder / ".nbddp").rglob("*")}
    after = {"runs note": " x", "compare": " digits2"}.get(act, "")
    for empty in ('""', "' '"):
        assert "`%ddp runs`" in refused(f"{act} {empty}{after}")
    assert {path: path.stat().st_mtime_ns for path in (folder / ".nbddp").rglob("*")} == before


def test_an_unwritable_note_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(folder)
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(RequestError, match=r"marks\.json .*No space left"):
        write_note(path, "x")
    assert summarize(path).note == ""
