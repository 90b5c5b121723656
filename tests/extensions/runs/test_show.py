"""Any run is drawn again from its folder: found by its name, whole or in part, in text or HTML."""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from console import ddp, refused
from pages import readable
from runs_on_disk import BEGAN, STAMP, UNENDED, failed_run, make_run, rows_of

import nbddp
from nbddp.errors import RequestError
from nbddp.extensions.runs import XAxis, summary
from nbddp.extensions.runs.comparison import MAX_CHARTS, compare
from nbddp.extensions.runs.find import find_run, runs_below
from nbddp.extensions.runs.run_list import list_runs
from nbddp.extensions.runs.stored_run import StoredRun
from nbddp.extensions.runs.stored_run_view import SHOWN_METRICS, run_report
from nbddp.magics import presenter
from nbddp.record.metrics import MAX_NAMES
from nbddp.record.run_events import event_of
from nbddp.record.run_folder import folder_name, read_facts
from nbddp.ui.report.render import render_html, render_text

# ---- which run


def test_a_run_is_found_by_its_path_its_whole_name_or_else_a_part_of_it(tmp_path: Path) -> None:
    names = [STAMP, f"{STAMP}-aaa", "20270101-000000-aaa2b", "20270101-000000-aaa2"]
    paths = {name: failed_run(tmp_path, name) for name in names}
    newest = "20270101-000000-aaa2"
    for asked, name in (
        (STAMP, STAMP),  # the whole name of one, a part of another
        ("aaa", f"{STAMP}-aaa"),
        (f"{STAMP}-aaa", f"{STAMP}-aaa"),
        ("aaa2", newest),
        ("aa2", newest),  # of two
        (None, newest),
    ):
        assert find_run(asked, tmp_path) == paths[name], asked
    assert runs_below(tmp_path)[0] == paths[newest]
    assert find_run(str(paths[STAMP]), tmp_path / "nowhere") == paths[STAMP]
    current = tmp_path / "elsewhere"
    assert find_run(None, tmp_path, current=current) == current, "that of this kernel is the newest"


def test_a_run_is_found_by_the_name_that_was_typed(tmp_path: Path) -> None:
    typed = ["lr 0.1", "a" * 70, "a/b: c", "эксперимент", "e\u0301te\u0301"]
    paths = {name: failed_run(tmp_path, f"{STAMP}-{folder_name(name)}") for name in typed}
    failed_run(tmp_path, "20270101-000000-other")
    for name, path in paths.items():
        assert find_run(name, tmp_path) == path
        assert [run.path for run in list_runs(tmp_path, [name]).runs] == [path]
    assert find_run("r 0", tmp_path) == paths["lr 0.1"]
    with pytest.raises(RequestError, match="there is no run"):
        find_run("?", tmp_path)


def test_an_ambiguous_name_finds_the_newest_run_except_for_removal(tmp_path: Path) -> None:
    failed_run(tmp_path, f"{STAMP}-aaa")
    failed_run(tmp_path, "20270101-000000-aaa")
    newest = failed_run(tmp_path, "20270101-000000-aaa-1")  # of the same second
    failed_run(tmp_path, "20270101-000001-aaab")
    assert find_run("aaa", tmp_path) == newest
    assert find_run("20270101-000000-aaa", tmp_path, is_unique=True).name.endswith("aaa")
    assert find_run("aaab", tmp_path, is_unique=True).name.endswith("aaab")
    for asked, count in (("aaa", 3), ("aa", 4)):
        with pytest.raises(RequestError, match=f"'{asked}' matches {count} runs: 2027"):
            find_run(asked, tmp_path, is_unique=True)


def test_show_refuses_a_missing_run_or_cell(folder: Path, snapshot: Any) -> None:
    texts = {"there is none": refused("show").replace(str(folder), "FOLDER")}
    for number in range(10):
        failed_run(folder, f"20260102-03040{number}")
    texts |= {asked: refused(f"show {asked}") for asked in ("x", "--cell 3")}
    texts |= {"a long name": refused(f"show {'x' * 5000}")}
    assert texts == snapshot


# ---- how it ended


def test_how_a_run_ended_depends_on_its_kernel(tmp_path: Path) -> None:
    stopped = StoredRun(failed_run(tmp_path))
    assert summary.describe_run_end(stopped, current=None) == summary.STOPPED
    current = failed_run(tmp_path, "own", events=UNENDED)
    assert summary.describe_run_end(StoredRun(current), current=current) == summary.RUNNING
    assert summary.describe_run_end(StoredRun(current), current=None) == summary.UNKNOWN
    here = {"host": platform.node(), "pid": os.getpid()}  # of another process by now
    run = StoredRun(failed_run(tmp_path, "earlier", events=UNENDED, **here))
    assert summary.describe_run_end(run, current=None) == summary.KILLED


@pytest.mark.process
def test_a_run_of_a_zombie_kernel_is_described_as_killed(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(killed.pid)
    path = failed_run(tmp_path, events=UNENDED, host=platform.node(), pid=killed.pid)
    facts = read_facts(path)
    assert summary.describe_unended(facts, began=process.create_time()) == summary.RUNNING
    os.kill(killed.pid, signal.SIGKILL)
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert summary.describe_unended(facts, began=process.create_time()) == summary.KILLED
    killed.communicate()
    assert summary.describe_unended(facts, began=100.0) == summary.KILLED


def test_a_run_with_ranks_that_were_taken_back_runs_while_the_new_kernel_is_alive() -> None:
    facts = {"pid": 1, "host": platform.node(), "ended": "2027-01-15T08:00:00+0000"}
    rejoined = {"attempt": 1, "ranks": [0], "world_size": 1, "pid": os.getpid(), "at": time.time()}
    event_of("taken back", rejoined, 1.0).apply(facts)
    assert "ended" not in facts
    assert summary.describe_unended(facts, began=100.0) == summary.RUNNING


# ---- as text, and as a record


def test_the_reports_of_a_run_and_of_a_cell_as_text_and_html(folder: Path, snapshot: Any) -> None:
    run = StoredRun(failed_run(folder).relative_to(folder))
    whole = run_report(run, ending=summary.STOPPED)
    assert render_text(whole) == snapshot(name="run: text")
    assert readable(render_html(whole)) == snapshot(name="run: page")
    for number in (1, 7):
        report = run_report(run, run.cell(number))
        assert render_text(report) == snapshot(name=f"cell {number}: text")
        assert readable(render_html(report)) == snapshot(name=f"cell {number}: page")


def test_the_charts_of_a_run_have_the_requested_scale(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(folder, rows=rows_of(9))
    show = Mock()
    monkeypatch.setattr(presenter.Presenter, "show", show)
    for line, is_log in (("", False), ("--scale log", True)):
        ddp(f"show --metrics loss {line}")
        assert ("log scale" in render_html(show.call_args.args[-1])) is is_log


def test_the_report_of_a_cell_without_an_end_says_not_recorded(tmp_path: Path) -> None:
    run = StoredRun(failed_run(tmp_path, events=UNENDED))
    text = render_text(run_report(run, run.cell(7)))
    assert text.count("not recorded") == 2, "in the title, and for the rank without a failure"
    assert "ranks 0-1" in text
    assert "done" not in text


# ---- metrics beyond the default number, and damaged files

MANY = 3000


def rows_of_many(count: int, *, steps: tuple[int, ...] = (0, 1, 2)) -> Iterator[dict[str, Any]]:
    for index, step in enumerate(steps):
        values = {f"m/{number}": float(number + step) for number in range(count)}
        at = BEGAN + 2 + index / 10
        yield {"time": at, "rank": 0, "attempt": 1, "step": step, **values}


def numbers(text: str) -> list[str]:
    return re.findall(r"^(\S+): .* at last ", text, re.MULTILINE)


def test_show_finds_every_recorded_metric_and_lists_a_bounded_number(folder: Path) -> None:
    run = nbddp.Run(make_run(folder, rows=[*rows_of_many(MANY)]))
    for name in ("m/7", "m/63", "m/64", "m/1063", "m/1064", "m/2999"):
        assert numbers(ddp(f"show --metrics {name}")) == [name]
        assert numbers(ddp(f"show --metrics {name} --cell 1")) == [name]
    assert "m/2999: 3001 at last" in ddp("show --metrics m/2999")
    ten = [f"m/299{number}" for number in range(10)]
    assert numbers(ddp("show --metrics 'm/299?,m/5'")) == ["m/5", *ten]
    text = ddp("show --metrics 'm/2*'")
    hundreds = [f"m/{number}" for number in range(200, 200 + MAX_NAMES - 11)]
    assert numbers(text) == ["m/2", *(f"m/2{number}" for number in range(10)), *hundreds]
    assert f"{1111 - MAX_NAMES:,} more metrics (" in text
    text, more = ddp("show"), MANY - SHOWN_METRICS
    assert numbers(text) == [f"m/{number}" for number in range(SHOWN_METRICS)]
    assert f"{more:,} more metrics (m/20, m/21, " in text
    assert f", m/39, {more - 20:,} more): `%ddp show " in text
    assert re.search(r"zzz; .*: m/0, m/1, .*, m/39, 2,960 more$", refused("show --metrics zzz"))
    assert run.figure("m/2999")
    with pytest.raises(RequestError, match=r"zzz; .* m/39, 2,960 more$"):
        run.figure("zzz")


def test_show_as_text_prints_only_the_requested_metrics(folder: Path) -> None:
    make_run(folder)
    assert numbers(ddp("show")) == ["loss", "accuracy"]
    for line in ("show --metrics loss", "show --metrics 'lo*' --cell 1"):
        assert numbers(ddp(line)) == ["loss"]
    row = {"time": BEGAN + 2, "rank": 0, "attempt": 1, "lr[0]": 1.0, "a,b": 2.0, "lr0": 3.0}
    make_run(folder, "patterns", rows=[row])
    assert numbers(ddp("show patterns --metrics lr[0]")) == ["lr[0]", "lr0"]
    assert numbers(ddp("show patterns --metrics a,b")) == ["a,b"]


def test_a_comparison_finds_every_recorded_metric_and_draws_a_bounded_number(folder: Path) -> None:
    steps = (0, 1, 0)  # counted on, where they fall back
    rows = [*rows_of_many(MANY, steps=steps)]
    paths = [make_run(folder, name, rows=rows) for name in ("one", "other")]
    text = ddp("compare one other --metrics m/2999")
    assert text.splitlines()[1].split()[:3] == ["line", "run", "m/2999"]
    assert re.search(r"^m/2999\nA +\S+\nB +\S+$", text, re.MULTILINE)
    run = compare(paths, "m/2999").runs[0]
    assert run.curves("m/2999", XAxis.STEP)[0].mean == (2999.0, 3000.0, 2999.0)
    comparison = compare(paths, "m/*")
    assert (len(comparison.metrics), comparison.left_out) == (MAX_CHARTS, MANY - MAX_CHARTS)


def test_show_reports_each_file_that_cannot_be_read(folder: Path) -> None:
    path = make_run(folder)
    (path / "rank0.log").unlink()
    (path / "rank0.log").mkdir()
    text = ddp("show")
    assert "\nrank 0\n" in text
    assert "rank0.log cannot be read: Is a directory" in text
    (path / "metrics.jsonl").unlink()
    (path / "metrics.jsonl").mkdir()
    assert refused("show").endswith("metrics.jsonl cannot be read: Is a directory")
    make_run(folder, "whole")
    assert "Is a directory" in refused(f"compare whole {path.name}")
    assert "whole" in ddp("runs")


def test_logs_of_a_removed_run_are_refused_in_one_line(folder: Path) -> None:
    path = make_run(folder)
    assert ddp("logs 0", last_run=path) == "hello"
    assert refused("logs 7", last_run=path).endswith(f"no log of rank 7 in .nbddp/runs/{path.name}")
    shutil.rmtree(path)
    assert "rank0.log cannot be read: No such file" in refused("logs 0", last_run=path)
    group = Mock(**{"scripts.last_session.event_log.path": None})  # of a restarted kernel
    assert "`%ddp show NAME`" in refused("logs 0", group=group)
