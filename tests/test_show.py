"""Any run is drawn again from its folder: found by its name, whole or in part, in text or HTML."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from console import refused
from pages import readable
from runs_on_disk import lines

from nbddp.archive.ending import KILLED, RUNNING, STOPPED, UNKNOWN, say_ending, say_unended
from nbddp.errors import RequestError
from nbddp.magics.auto import AutoMode
from nbddp.magics.complete import Completer
from nbddp.magics.line import LineMagics
from nbddp.record.finished import RecordedRun
from nbddp.record.folder import read_facts
from nbddp.record.runs import find_run, runs_below
from nbddp.ui.panel.run import run_html
from nbddp.ui.text.run import run_text

STAMP = "20260102-030405"
REPORT = "rank 1: ZeroDivisionError: <b>, line 3\n\n----> 1/0"
LOG = "first of cell 1\nsecond of cell 1\nfirst of cell 2\n"


def events(*, is_stopped: bool = True) -> list[dict[str, Any]]:
    end = LOG.index("first of cell 2")
    at = {"ranks": [0, 1], "kind": "cell"}
    found: list[dict[str, Any]] = [
        {"attempt": 1, "world_size": 2, "time": 100.0, "kind": "start"},
        {"number": 1, "source": "# why\ntrain()", "time": 101.0, "logs": {"0": 0, "1": 0}, **at},
        {"number": 1, "outcome": "ok", "time": 103.0, "kind": "cell ended", "logs": {"0": end}},
        {"number": 7, "source": "1/0", "time": 104.0, "logs": {"0": end, "1": 0}, **at},
        {"rank": 1, "what": "ZeroDivisionError: <b>", "time": 104.1, "kind": "failure"},
    ]
    if is_stopped:
        ended = {"number": 7, "outcome": "rank 1: ZeroDivisionError: <b>", "report": REPORT}
        found.append({**ended, "time": 104.2, "kind": "cell ended", "logs": {"0": len(LOG)}})
        found.append({"attempt": 1, "time": 106.0, "kind": "stopped"})
    return found


def make(base: Path, name: str = STAMP, *, is_stopped: bool = True, **facts: Any) -> Path:
    """Make the folder of a run."""
    path = base / ".nbddp" / "runs" / name
    path.mkdir(parents=True)
    rows = [
        {"time": 101.5, "rank": rank, "attempt": 1, "step": step, "loss": 1.0 + step}
        for step in (0, 1, 0)
        for rank in (0, 1)
    ]
    (path / "events.jsonl").write_text(lines(events(is_stopped=is_stopped)))
    (path / "run.json").write_text(json.dumps({"nproc": 2, "backend": "gloo", **facts}))
    (path / "metrics.jsonl").write_text(lines(rows))
    (path / "rank0.log").write_text(LOG)
    return path


# ---- which run


def test_the_newest_run_is_meant_where_none_is_named(tmp_path: Path) -> None:
    for name in (STAMP, "20260301-000000-new", "20260201-000000"):
        make(tmp_path, name)
    assert runs_below(tmp_path)[0].name == "20260301-000000-new"
    assert find_run("", tmp_path).name == "20260301-000000-new"
    current = tmp_path / "elsewhere"
    assert find_run("", tmp_path, current=current) == current, "that of this kernel is the newest"


def test_a_run_is_found_by_its_name_a_unique_part_of_it_or_its_path(tmp_path: Path) -> None:
    others = ["20270101-000000-aaa2", "20270101-000000-aaa-1"]  # the name of its own is aaa-1
    paths = {name: make(tmp_path, name) for name in (STAMP, f"{STAMP}-aaa", *others)}
    for asked, name in (
        (STAMP, STAMP),  # the whole name of one, a part of another
        ("aaa", f"{STAMP}-aaa"),
        (f"{STAMP}-aaa", f"{STAMP}-aaa"),
        ("aa2", "20270101-000000-aaa2"),
        ("aaa-1", "20270101-000000-aaa-1"),
    ):
        assert find_run(asked, tmp_path) == paths[name], asked
    assert find_run(str(paths[STAMP]), tmp_path / "nowhere") == paths[STAMP]


def test_of_several_of_one_name_the_newest_is_meant_unless_it_is_to_go(tmp_path: Path) -> None:
    for name in (f"{STAMP}-aaa", f"{STAMP}-aaa-1"):  # of the same second
        make(tmp_path, name)
    with pytest.raises(RequestError, match=rf"'aaa' fits 2 runs: {STAMP}-aaa.*, {STAMP}-aaa"):
        find_run("aaa", tmp_path, takes_newest=False)
    assert find_run("aaa", tmp_path).name in (f"{STAMP}-aaa", f"{STAMP}-aaa-1")
    newest = make(tmp_path, "20270101-000000-aaa")
    make(tmp_path, "20270101-000001-aaab")
    assert find_run("aaa", tmp_path) == newest
    with pytest.raises(RequestError, match=r"'aaa' fits 3 runs: 20270101-000000-aaa"):
        find_run("aaa", tmp_path, takes_newest=False)


def test_what_is_no_run_fits_several_or_has_no_such_cell_is_refused(
    folder: Path, snapshot: Any
) -> None:
    with pytest.raises(RequestError, match="%%ddp"):
        find_run("", folder)
    for number in range(10):
        make(folder, f"20260102-03040{number}")
    said = {asked: refused(f"show {asked}") for asked in ("030", "x", "--cell 3")}
    said |= {"a long name": refused(f"show {'x' * 5000}")}
    assert said == snapshot


# ---- how it ended


def test_a_run_that_was_stopped_says_so(tmp_path: Path) -> None:
    assert say_ending(RecordedRun(make(tmp_path)), current=None) == STOPPED


def test_the_run_of_this_kernel_is_still_running(tmp_path: Path) -> None:
    path = make(tmp_path, is_stopped=False)
    assert say_ending(RecordedRun(path), current=path) == RUNNING


@pytest.mark.process
def test_a_run_whose_kernel_is_gone_was_ended_before_its_record(tmp_path: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    run = RecordedRun(make(tmp_path, is_stopped=False, host=platform.node(), pid=done.pid))
    assert say_ending(run, current=None) == KILLED


@pytest.mark.process
def test_a_kernel_that_was_killed_is_gone_though_nobody_has_asked_how_it_ended(
    tmp_path: Path,
) -> None:
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(killed.pid)
    path = make(tmp_path, is_stopped=False, host=platform.node(), pid=killed.pid)
    facts = read_facts(path)
    assert say_unended(facts, began=process.create_time()) == RUNNING
    os.kill(killed.pid, signal.SIGKILL)
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert say_unended(facts, began=process.create_time()) == KILLED
    killed.communicate()


def test_a_process_that_has_the_number_of_the_kernel_by_now_is_not_taken_for_it(
    tmp_path: Path,
) -> None:
    run = RecordedRun(make(tmp_path, is_stopped=False, host=platform.node(), pid=os.getpid()))
    assert run.events[0].at < psutil.Process().create_time()
    assert say_ending(run, current=None) == KILLED


@pytest.mark.parametrize("facts", [{}, {"host": "another", "pid": 1}])
def test_of_another_machine_s_kernel_nothing_is_claimed(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    assert (
        say_ending(RecordedRun(make(tmp_path, is_stopped=False, **facts)), current=None) == UNKNOWN
    )


# ---- as text, and as a record


def test_a_run_and_a_cell_of_it_as_text_and_as_a_record(folder: Path, snapshot: Any) -> None:
    run = RecordedRun(make(folder).relative_to(folder))
    assert run_text(run, ending=STOPPED) == snapshot(name="run: text")
    assert readable(run_html(run, ending=KILLED)) == snapshot(name="run: page")
    for number in (1, 7):
        cell = run.cell(number)
        text, html = run_text(run, cell), run_html(run, cell)
        assert text == snapshot(name=f"cell {number}: text")
        assert readable(html) == snapshot(name=f"cell {number}: page")
        own, other = ("of cell 1", "of cell 2") if number == 1 else ("of cell 2", "of cell 1")
        assert own in text
        assert other not in text + html
    assert "<b>" not in run_html(run) + run_html(run, run.cell(7))


def test_a_cell_without_an_end_says_so(tmp_path: Path) -> None:
    run = RecordedRun(make(tmp_path, is_stopped=False))
    text = run_text(run, run.cell(7))
    assert "not recorded" in text
    assert "ranks 0-1" in text


# ---- Tab


def test_tab_completes_the_names_of_runs(folder: Path) -> None:
    make(folder, STAMP)
    make(folder, "20250102-030405")
    parsers = {"show": LineMagics.__dict__["show"].parser}
    completer = Completer(object(), AutoMode(), parsers)  # type: ignore[arg-type]

    def fitting(line: str) -> list[str]:
        token = line.rpartition(" ")[2]
        return [each.text for each in completer.fits(line, 0, len(line), token)[0]]

    assert fitting("%ddp show ") == [STAMP, "20250102-030405"]
    assert fitting("%ddp show 2026") == [STAMP]
