"""``%ddp runs``: every run in a line, those that were asked for, in the order asked for."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from pages import Page
from runs_on_disk import BEGAN, lines, make_run, rows_of

from nbddp.archive.keeping import limit_of, make_room, make_room_aside, mark, set_limit
from nbddp.archive.listing import Listing, list_runs
from nbddp.archive.summary import Summary, summarize
from nbddp.controller.spec import GroupSpec
from nbddp.errors import ArgumentError, RequestError
from nbddp.magics.desk import Desk
from nbddp.magics.line import LineMagics
from nbddp.magics.views import Views
from nbddp.ui.panel.runs import runs_html, small_curve
from nbddp.ui.text.runs import SHOWN, bars, runs_text, say_outcome

Say = Callable[[str], str]


@pytest.fixture(autouse=True)
def here(folder: Path) -> Path:
    """The runs of a test lie in its own folder."""
    return folder


@pytest.fixture
def ddp() -> Say:
    """``%ddp`` in a console without ranks: what it says."""
    said: list[str] = []
    views = Views(Mock(spec=[]), Mock())
    views.say = said.append  # type: ignore[method-assign]
    desk = Mock(views=views, current_run=None, shell=None)

    def run(line: str) -> str:
        said.clear()
        LineMagics(desk).ddp(line)
        return "\n".join(said)

    return run


def three(base: Path) -> None:
    """Three runs that differ in rate and loss; the third has failed."""
    for number, rate in enumerate((0.1, 0.01, 1.0), start=1):
        cells = [("train()", "ok" if number < 3 else "rank 1: ValueError: <no>")]
        rows = rows_of(60, pace=10.0 * number, begin=rate * 10)
        name = f"20270115-08000{number}-digits{number}"
        make_run(base, name, cells=cells, rows=rows, config={"lr": rate, "model": "cnn"})


def names(listing: Listing) -> str:
    return "".join(run.name[-1] for run in listing.runs)


# ---- a run in a line


def test_a_run_is_its_facts(here: Path) -> None:
    path = make_run(here, config={"lr": 0.1}, samples_per_step=64, seconds_lost=1.5)
    run = summarize(path)
    assert (run.name, run.ranks, run.outcome, run.steps) == (path.name, 2, "ok", 60)
    assert run.config == {"lr": 0.1}
    assert run.last["loss"] == pytest.approx(2 * math.exp(-59 / 50) + 0.005)
    assert run.steps_per_second == pytest.approx(10.0, rel=0.01)
    assert run.samples_per_second == pytest.approx(640.0, rel=0.01)
    assert run.seconds_lost == 1.5
    assert run.curves["loss"][0] == pytest.approx((2 * math.exp(-1 / 50), 2.0))
    assert run.size > 5000


STOPPED = "ranks 0-1 interrupted, line 3"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_run_that_was_stopped_is_listed_as_interrupted(here: Path, is_told: bool) -> None:
    path = make_run(here, cells=[("train()", STOPPED)], interrupted=True)
    events = (path / "events.jsonl").read_text().splitlines()
    ended = [json.loads(each) for each in events]
    stopped = [each | {"interrupted": True} if "outcome" in each else each for each in ended]
    (path / "events.jsonl").write_text(lines(stopped))
    if not is_told:
        (path / "run.json").write_text('{"nproc": 2}')
    run = summarize(path)
    assert (run.outcome, run.why, say_outcome(run)) == ("interrupted", STOPPED, STOPPED)
    assert names(list_runs(here, ["outcome=interrupted"])) == names(list_runs(here))
    assert names(list_runs(here, ["outcome=failed"])) == ""


def test_an_old_run_without_its_facts_is_looked_up(here: Path) -> None:
    path = make_run(here)
    known = summarize(path)
    (path / "run.json").write_text('{"nproc": 2, "started": "2027-01-15T08:00:00+0000"}')
    old = summarize(path)
    assert (old.ranks, old.outcome, old.steps) == (known.ranks, known.outcome, known.steps)
    assert (old.last, old.steps_per_second) == (known.last, known.steps_per_second)
    assert old.began == BEGAN


def test_a_long_run_without_its_facts_is_judged_by_samples(here: Path) -> None:
    rows = rows_of(5000, pace=25.0)
    run = summarize(make_run(here, rows=rows, is_stopped=False, ended=None, format=1))
    assert run.steps == 5000
    assert run.steps_per_second == pytest.approx(25.0, rel=0.01)
    assert run.last["accuracy"] == rows[-1]["accuracy"]
    highs = [high for _, high in run.curves["loss"]]
    assert highs[0] == pytest.approx(2.0, rel=0.1)
    assert min(highs) < 0.05


def killed(base: Path, name: str = "20270115-080000-digits", **facts: Any) -> Path:
    """A run whose record has no end."""
    path = make_run(
        base, name, cells=[("a()", "ok"), ("b()", "")], is_stopped=False, torn='{"t', **facts
    )
    known = json.loads((path / "run.json").read_text())
    del known["ended"]
    (path / "run.json").write_text(json.dumps(known))
    return path


def test_a_run_without_an_end_says_whether_its_kernel_lives(here: Path) -> None:
    began = psutil.Process().create_time() + 1
    host = platform.node()
    path = killed(here, host=host, pid=os.getpid())
    events = [{"time": began, "kind": "start", "attempt": 1, "world_size": 3}]
    assert summarize(path).outcome == "running"
    (path / "events.jsonl").write_text(lines(events))
    assert (summarize(path).outcome, summarize(path).ranks) == ("running", 3)
    (path / "events.jsonl").write_text(lines([{**events[0], "time": began - 1000}]))
    assert summarize(path).outcome == "killed"
    assert summarize(path, current=path).outcome == "running"
    assert summarize(killed(here, "20270115-09", host="elsewhere")).outcome == "not recorded"


def test_a_killed_run_has_the_numbers_at_the_end_of_its_file_and_the_curve_that_was_written(
    here: Path,
) -> None:
    path = killed(here, rows=rows_of(3000))
    known = json.loads((path / "run.json").read_text())
    curves = {"loss": [[1.0, 2.0], [0.5, 1.0]]}
    (path / "run.json").write_text(json.dumps({**known, "curves": curves, "steps": 100}))
    run = summarize(path)
    assert run.curves == {"loss": [(1.0, 2.0), (0.5, 1.0)]}
    assert (run.steps, run.last["accuracy"]) == (3000, rows_of(3000)[-1]["accuracy"])


@pytest.mark.parametrize("first", [0, 1, 1000])
@pytest.mark.parametrize("count", [60, 3000], ids=["short", "long"])
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
def test_steps_of_a_run_that_goes_on_are_those_it_made_wherever_they_begin(
    here: Path, first: int, count: int, is_told: bool
) -> None:
    rows = [{**row, "step": row["step"] + first} for row in rows_of(count)]
    path = killed(here, rows=rows)
    known = json.loads((path / "run.json").read_text())
    known.pop("steps", None)
    if is_told:
        known["curves"] = {"loss": [(1.0, 2.0), (0.5, 1.0)]}
    (path / "run.json").write_text(json.dumps(known))
    assert summarize(path).steps == count


def test_a_killed_run_has_its_settings_and_its_last_numbers(here: Path) -> None:
    told = {"time": BEGAN + 0.5, "kind": "config", "values": {"lr": 0.3}, "rank": 0}
    path = killed(here, extra=[told])
    (path / "run.json").write_text("{")
    run = summarize(path)
    assert (run.config, run.outcome, run.steps) == ({"lr": 0.3}, "not recorded", 60)
    assert run.last["loss"] > 0


# ---- the list


def test_the_newest_run_stands_first(here: Path) -> None:
    three(here)
    listing = list_runs(here)
    assert names(listing) == "321"
    assert (listing.total, listing.left_out) == (3, {})
    assert listing.settings == ["lr"]
    assert listing.metrics == ["loss", "accuracy"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (["lr=0.1"], "1"),
        (["lr=1e-1"], "1"),
        (["lr>=0.1"], "31"),
        (["lr!=0.1"], "32"),
        (["model=c*"], "321"),
        (["seed=1"], None),
        (["outcome=failed"], "3"),
        (["digits2"], "2"),
        (["digits", "lr<1", "loss<1"], "21"),
        (["ranks>2"], ""),
        (["steps/s>15"], "32"),
        (["lr<x"], ""),
        (["lr", "<", "1"], "21"),
        (["lr<", "1"], "21"),
        (["lr", "<1", "digits2"], "2"),
        (["lr < 1"], "21"),
        (["lr", "==", "0.1"], "1"),
        (["digits", "lr", ">=", "0.1", "loss", "<", "1"], "1"),
    ],
)
def test_runs_are_found_by_what_they_are(asked: list[str], found: str | None, here: Path) -> None:
    three(here)
    if found is None:
        with pytest.raises(ArgumentError, match="no run has 'seed'; there is: lr, model, loss"):
            list_runs(here, asked)
    else:
        assert names(list_runs(here, asked)) == found


def test_runs_are_sorted_and_those_without_come_last(here: Path) -> None:
    three(here)
    make_run(here, "20270115-080009-other4", rows=[], config={"lr": "auto"})
    make_run(here, "20270115-080009-other5", rows=[], config={})
    assert names(list_runs(here, sort="lr")) == "21345"
    assert names(list_runs(here, sort="lr", is_down=True)) == "31245"
    assert names(list_runs(here, sort="when")) == names(list_runs(here, sort="when", is_down=True))
    assert names(list_runs(here, sort="loss"))[:3] == "213"
    with pytest.raises(ArgumentError, match="no run has 'lose'"):
        list_runs(here, sort="lose")


def test_a_number_that_is_none_is_not_sorted_among_numbers(here: Path) -> None:
    three(here)
    rows = [{"time": BEGAN, "rank": 0, "attempt": 1, "step": 0, "loss": math.nan}]
    make_run(here, "20270115-080009-other4", rows=rows)
    for is_down in (False, True):
        assert names(list_runs(here, sort="loss", is_down=is_down))[-1] == "4"


def test_what_is_no_run_is_named_and_left_out(here: Path) -> None:
    three(here)
    runs = here / ".nbddp" / "runs"
    for name in ("empty", "torn", "odd", ".x.gone"):
        (runs / name).mkdir()
    (runs / "a-file").touch()
    (runs / "torn" / "events.jsonl").write_text('{"time": 1.0, "kind": "start"}\n')
    (runs / "odd" / "events.jsonl").write_text("")
    (runs / "odd" / "run.json").write_text('{"format": 2, "ended": 1, "last": [1], "config": 7}')
    listing = list_runs(here)
    assert names(listing) == "321"
    assert listing.left_out.keys() == {"empty", "torn", "odd"}
    assert listing.left_out["empty"] == "it has no events.jsonl"
    assert listing.left_out["torn"] == "KeyError: 'world_size'"
    assert "left out: empty (it has no events.jsonl), odd (" in runs_text(listing)


def test_the_run_that_goes_on_may_be_taken_away_by_hand(here: Path) -> None:
    three(here)
    gone = here / ".nbddp" / "runs" / "20270115-090000-gone"
    listing = list_runs(here, current=gone)
    assert names(listing) == "321"
    assert listing.left_out == {gone.name: "it has no events.jsonl"}


def test_what_can_be_asked_for_is_said_also_where_there_are_thousands_of_metrics(
    here: Path,
) -> None:
    row = {f"layer{number}/grad": 1.0 for number in range(3000)}
    make_run(here, rows=[{"time": BEGAN, "rank": 0, "attempt": 1, "step": 0, **row}])
    with pytest.raises(ArgumentError) as caught:
        list_runs(here, sort="lose")
    said = str(caught.value)
    assert "layer0/grad, layer1/grad" in said
    assert "layer11/grad, ..., began, is_kept, name, note, outcome" in said


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
SUMS = ["steps", "steps_per_second", "samples_per_step", "seconds_lost", "world_size", "pid"]
OTHERS = ["format", "ended", "config", "last", "curves", "started", "outcome", "host", "cells"]
FIELDS = st.sampled_from([*SUMS, *OTHERS])


@given(facts=st.dictionaries(FIELDS, JSON, max_size=15) | JSON, event=JSON)
def test_whatever_stands_in_the_files_is_a_run_or_is_left_out(
    facts: Any, event: Any, tmp_path_factory: Any
) -> None:
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
    assert runs_text(listing)
    Page(runs_html(listing))


# ---- on the page, and as text


def test_the_text_has_a_line_for_each_run(here: Path, ddp: Say) -> None:
    three(here)
    text = ddp("runs")
    head, first, *_ = text.splitlines()
    assert head.split() == (
        ["run", "when", "ranks", "lr", "loss", "accuracy", "steps", "pace", "outcome", "curve"]
    )
    assert first.startswith("20270115-080003-digits3  ")
    assert "failed: rank 1: ValueError: <no>" in first
    assert "3 runs, " in text
    assert "the curve is of loss" in text


def test_filters_and_sorting_come_from_the_line(here: Path, ddp: Say) -> None:
    three(here)
    text = ddp("runs lr<1 --sort loss --down -n 1")
    assert "digits1" in text
    assert "2 of 3 runs" in text
    assert "1 more: `%ddp runs -n 2` shows them" in text
    with pytest.raises(UsageError, match="no run has 'batch'"):
        ddp("runs batch=3")


def test_conditions_may_be_written_with_spaces(here: Path, ddp: Say) -> None:
    three(here)
    assert "2 of 3 runs" in ddp("runs lr < 1 --sort loss")


@pytest.mark.parametrize("odd", ["lr <", "< 5", "lr << 5", "lr =< 5", "lr <>5", "=", "lr=="])
def test_a_condition_that_is_none_is_refused_in_one_line(odd: str, here: Path, ddp: Say) -> None:
    three(here)
    expected = "expected a condition like loss<5 (with =, ==, !=, <, >, <=, >=), got '"
    with pytest.raises(UsageError, match=re.escape(expected)):
        ddp(f"runs {odd}")


def test_where_there_is_none_it_says_how_to_make_one(ddp: Say) -> None:
    assert ddp("runs") == "there is no run here yet: a `%%ddp` cell makes one"


def test_the_page_has_the_same_and_nothing_that_a_run_wrote_is_markup(here: Path) -> None:
    three(here)
    listing = list_runs(here)
    page = Page(runs_html(listing))
    assert page.by_tag["th"][:4] == ["run", "when", "ranks", "lr"]
    assert "failed: rank 1: ValueError: <no>" in page.text
    assert len([1 for tag, _ in page.tags if tag == "svg"]) == 3
    assert len(page.by_tag["tr"]) == 4


def test_many_runs_are_shown_in_part(here: Path) -> None:
    runs = tuple(Summary(path=Path(f"run{number}")) for number in range(SHOWN + 5))
    text = runs_text(Listing(runs, {}, len(runs)))
    assert len(text.splitlines()) == 1 + SHOWN + 2
    assert "5 more: `%ddp runs -n 55` shows them" in text
    del here


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=48))
def test_any_curve_can_be_drawn(pairs: list[tuple[float, float]]) -> None:
    assert len(bars(pairs)) <= 16
    html = small_curve(pairs, "loss")
    assert "nan" not in html
    assert "inf" not in html.replace("info", "")


# ---- what goes, and what stays


def test_a_run_is_taken_away_by_name(here: Path, ddp: Say) -> None:
    three(here)
    assert ddp("runs rm digits1 digits2") == (
        "nbddp: 2 runs taken away: 20270115-080001-digits1, 20270115-080002-digits2"
    )
    assert names(list_runs(here)) == "3"
    assert [each.name for each in (here / ".nbddp" / "runs").iterdir()] == [
        "20270115-080003-digits3"
    ]


def test_a_damaged_one_goes_like_any_other(here: Path, ddp: Say) -> None:
    (here / ".nbddp" / "runs" / "odd").mkdir(parents=True)
    assert ddp("runs rm odd") == "nbddp: 1 run taken away: odd"


@pytest.mark.parametrize("name", ["..", "../..", ".", "/", "runs/../../.."])
def test_nothing_else_is_taken_away(name: str, here: Path, ddp: Say) -> None:
    three(here)
    with pytest.raises(UsageError):
        ddp(f"runs rm {name}")
    assert names(list_runs(here)) == "321"


@pytest.mark.until_cut
def test_a_run_that_is_kept_stays_until_it_is_forced(here: Path, ddp: Say) -> None:
    three(here)
    assert ddp("runs keep digits1") == "nbddp: 20270115-080001-digits1: kept"
    assert "ok · kept" in ddp("runs digits1")
    with pytest.raises(UsageError, match="is to be kept; --force takes it away all the same"):
        ddp("runs rm digits1")
    assert ddp("runs keep digits1 --off").endswith("may go again")
    ddp("runs keep digits2")
    ddp("runs rm digits1")
    ddp("runs rm digits2 --force")
    assert names(list_runs(here)) == "3"


def test_a_run_that_goes_on_cannot_be_taken_away(here: Path) -> None:
    path = killed(here, host=platform.node(), pid=os.getpid())
    desk = Mock(views=Mock(), current_run=path, shell=None)
    with pytest.raises(UsageError, match="goes on: `%ddp stop` ends it"):
        LineMagics(desk).ddp(f"runs rm {path.name}")
    assert path.is_dir()


def test_a_note_is_shown_and_found(here: Path, ddp: Say) -> None:
    three(here)
    assert ddp("runs note digits2 the best so far").endswith("digits2: the best so far")
    assert "ok · the best so far" in ddp("runs best")
    assert names(list_runs(here, ["best"])) == "2"
    assert ddp("runs note digits2").endswith("digits2: the best so far")  # shown, and stays
    with pytest.raises(UsageError, match="needs a text, or --off alone"):
        ddp('runs note digits2 ""')
    with pytest.raises(UsageError, match="needs a text, or --off alone"):
        ddp("runs note digits2 better --off")
    assert summarize(here / ".nbddp/runs/20270115-080002-digits2").note == "the best so far"
    assert ddp("runs note digits2 --off").endswith("digits2: no note")
    assert ddp("runs note digits2").endswith("digits2: no note")


@pytest.mark.parametrize("empty", ['""', "' '"])
@pytest.mark.parametrize(
    "act",
    [
        "runs rm",
        "runs rm digits1",
        pytest.param("runs keep", marks=pytest.mark.until_cut),
        "runs note",
        "compare",
        "show",
    ],
)
def test_an_empty_name_is_not_the_newest_run(act: str, empty: str, here: Path, ddp: Say) -> None:
    three(here)
    before = {path: path.stat().st_mtime_ns for path in (here / ".nbddp").rglob("*")}
    after = " x" if act == "runs note" else " digits2" if act == "compare" else ""
    with pytest.raises(UsageError, match=r"^an empty name names no run; `%ddp runs` lists them$"):
        ddp(f"{act} {empty}{after}")
    assert {path: path.stat().st_mtime_ns for path in (here / ".nbddp").rglob("*")} == before


def test_a_name_that_no_folder_can_have_is_no_run(here: Path, ddp: Say) -> None:
    three(here)
    with pytest.raises(UsageError, match=r"^there is no run 'xxx"):
        ddp(f"runs rm {'x' * 5000}")
    assert names(list_runs(here)) == "321"


def test_a_run_that_is_named_twice_goes_once(here: Path, ddp: Say) -> None:
    three(here)
    path = ".nbddp/runs/20270115-080001-digits1"
    said = ddp(f"runs rm digits1 {path} {here / path}")
    assert said == "nbddp: 1 run taken away: 20270115-080001-digits1"


@pytest.mark.parametrize("act", ["rm", pytest.param("keep", marks=pytest.mark.until_cut), "note"])
def test_what_is_done_to_a_run_needs_one(act: str, here: Path, ddp: Say) -> None:
    three(here)
    with pytest.raises(UsageError, match=f"which run\\? `%ddp runs {act} NAME`"):
        ddp(f"runs {act}")
    with pytest.raises(UsageError, match="'digits' fits 3 runs"):
        ddp(f"runs {act} digits")


@pytest.mark.until_cut
def test_without_a_limit_nothing_goes(here: Path, ddp: Say) -> None:
    three(here)
    assert limit_of(here) is None
    assert make_room(here) == []
    make_room_aside(here, current=None)
    assert ddp("runs limit") == "nbddp: runs may take what they like"


def test_a_group_starts_where_the_folder_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "cwd", gone)
    desk = Mock()
    desk.group.is_live = False
    Desk.make_ready(desk, GroupSpec(), fresh=False)
    desk.group.start.assert_called_once_with()


@pytest.mark.until_cut
def test_beyond_the_limit_the_oldest_go_but_not_what_is_kept_or_goes_on(
    here: Path, ddp: Say
) -> None:
    three(here)
    killed(here, "20270114-080000-goes-on4", host=platform.node(), pid=os.getpid())
    ddp("runs keep digits1")
    size = list_runs(here).size
    said = ddp(f"runs limit {(size - 1) / 1e6:.6f}MB")
    assert "the oldest runs go when another starts, but for those that are kept" in said
    assert "1 run taken away: 20270115-080002-digits2" in said
    assert names(list_runs(here)) == "314"
    set_limit(here, 1)
    assert make_room(here) == []  # the newest, the kept one and the one that goes on
    assert ddp("runs limit --off") == "nbddp: runs may take what they like"


@pytest.mark.until_cut
def test_a_limit_that_is_no_amount_is_refused(here: Path, ddp: Say) -> None:
    with pytest.raises(UsageError, match="expected an amount like 500MB, 20GB or 1TiB, got 'much'"):
        ddp("runs limit much")
    assert limit_of(here) is None


def test_a_run_that_cannot_be_marked_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(here)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RequestError, match=r"marks.json cannot be written: No space left"):
        mark(path, note="x")
    assert summarize(path).note == ""
    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(RequestError, match=r"limit.json cannot be taken away: No space left"):
        set_limit(here, None)
