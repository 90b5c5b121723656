"""Any run is drawn again from its folder: found by its name, whole or in part, in text or HTML."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

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

Make = Callable[..., Path]

STAMP = "20260102-030405"
REPORT = "rank 1: ZeroDivisionError: <b>, line 3\n\n----> 1/0"
LOG = "first of cell 1\nsecond of cell 1\nfirst of cell 2\n"


def events(*, is_stopped: bool = True) -> list[dict[str, Any]]:
    end = LOG.index("first of cell 2")
    found: list[dict[str, Any]] = [
        {"attempt": 1, "world_size": 2, "time": 100.0, "kind": "start"},
        {"number": 1, "ranks": [0, 1], "source": "# why\ntrain()", "time": 101.0, "kind": "cell"},
        {"number": 1, "outcome": "ok", "time": 103.0, "kind": "cell ended", "logs": {"0": end}},
        {"number": 7, "ranks": [0, 1], "source": "1/0", "time": 104.0, "kind": "cell"},
        {"rank": 1, "what": "ZeroDivisionError: <b>", "time": 104.1, "kind": "failure"},
    ]
    found[1]["logs"], found[3]["logs"] = {"0": 0, "1": 0}, {"0": end, "1": 0}
    if is_stopped:
        ended = {"number": 7, "outcome": "rank 1: ZeroDivisionError: <b>", "report": REPORT}
        found.append({**ended, "time": 104.2, "kind": "cell ended", "logs": {"0": len(LOG)}})
        found.append({"attempt": 1, "time": 106.0, "kind": "stopped"})
    return found


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes the folder of a run."""

    def build(name: str = STAMP, *, is_stopped: bool = True, **facts: Any) -> Path:
        path = tmp_path / ".nbddp" / "runs" / name
        path.mkdir(parents=True)
        lines = [json.dumps(each) for each in events(is_stopped=is_stopped)]
        (path / "events.jsonl").write_text("\n".join(lines) + "\n")
        (path / "run.json").write_text(json.dumps({"nproc": 2, "backend": "gloo", **facts}))
        rows = [
            {"time": 101.5, "rank": rank, "attempt": 1, "step": step, "loss": 1.0 + step}
            for step in (0, 1, 0)
            for rank in (0, 1)
        ]
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (path / "rank0.log").write_text(LOG)
        return path

    return build


# ---- which run


def test_the_newest_run_is_meant_where_none_is_named(make: Make, tmp_path: Path) -> None:
    for name in (STAMP, "20260301-000000-new", "20260201-000000"):
        make(name)
    assert runs_below(tmp_path)[0].name == "20260301-000000-new"
    assert find_run("", tmp_path).name == "20260301-000000-new"


def test_the_run_of_this_kernel_is_the_newest_wherever_it_lies(make: Make, tmp_path: Path) -> None:
    make()
    assert find_run("", tmp_path, current=tmp_path / "elsewhere") == tmp_path / "elsewhere"


def test_a_name_a_unique_part_of_one_or_a_path_will_do(make: Make, tmp_path: Path) -> None:
    path = make(f"{STAMP}-long")
    make(STAMP)
    assert find_run("ong", tmp_path) == path
    assert find_run(STAMP, tmp_path).name == STAMP  # the whole name of one, a part of another
    assert find_run(str(path), tmp_path / "nowhere") == path


def test_a_whole_name_goes_before_a_part_of_another(make: Make, tmp_path: Path) -> None:
    path = make(f"{STAMP}-aaa")
    make("20270101-000000-aaa2")
    make("20270101-000000-aaa-1")  # its own name, not the second of one second
    assert find_run("aaa", tmp_path) == path
    assert find_run("aaa-1", tmp_path).name == "20270101-000000-aaa-1"
    assert find_run(f"{STAMP}-aaa", tmp_path) == path


def test_of_several_of_one_name_the_newest_is_meant_unless_it_is_to_go(
    make: Make, tmp_path: Path
) -> None:
    for name in (f"{STAMP}-aaa", f"{STAMP}-aaa-1"):
        make(name)
    with pytest.raises(RequestError, match=rf"^'aaa' fits 2 runs: {STAMP}-aaa.*, {STAMP}-aaa"):
        find_run("aaa", tmp_path, takes_newest=False)
    assert find_run("aaa", tmp_path).name in (f"{STAMP}-aaa", f"{STAMP}-aaa-1")
    newest = make("20270101-000000-aaa")
    make("20270101-000001-aaab")
    assert find_run("aaa", tmp_path) == newest
    with pytest.raises(RequestError, match=r"^'aaa' fits 3 runs: 20270101-000000-aaa"):
        find_run("aaa", tmp_path, takes_newest=False)


def test_a_name_that_no_folder_can_have_is_refused_in_a_line(make: Make, tmp_path: Path) -> None:
    make()
    with pytest.raises(
        RequestError, match=r"^there is no run 'x{80}\.\.\.'; the newest are: "
    ) as it:
        find_run("x" * 5000, tmp_path)
    assert len(str(it.value)) < 200


def test_what_fits_several_runs_or_none_is_refused_with_their_names(
    make: Make, tmp_path: Path
) -> None:
    for number in range(10):
        make(f"20260102-03040{number}")
    with pytest.raises(RequestError) as caught:
        find_run("030", tmp_path)
    names = ", ".join(f"20260102-03040{number}" for number in range(9, 1, -1))
    assert str(caught.value) == f"'030' fits 10 runs: {names}, ..."
    with pytest.raises(RequestError, match=f"^there is no run 'x'; the newest are: {names}, ...$"):
        find_run("x", tmp_path)


def test_where_there_is_no_run_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        find_run("", tmp_path)
    assert str(caught.value) == f"there is no run below {tmp_path}: a `%%ddp` cell makes one"


def test_a_cell_that_there_is_not_is_refused_with_those_that_there_are(make: Make) -> None:
    with pytest.raises(RequestError) as caught:
        RecordedRun(make()).cell(3)
    assert str(caught.value) == f"run {STAMP} has no cell 3; its cells are: 1, 7"


# ---- how it ended


def test_a_run_that_was_stopped_says_so(make: Make) -> None:
    assert say_ending(RecordedRun(make()), current=None) == STOPPED


def test_the_run_of_this_kernel_is_still_running(make: Make) -> None:
    path = make(is_stopped=False)
    assert say_ending(RecordedRun(path), current=path) == RUNNING


@pytest.mark.process
def test_a_run_whose_kernel_is_gone_was_ended_before_its_record(make: Make) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    run = RecordedRun(make(is_stopped=False, host=platform.node(), pid=done.pid))
    assert say_ending(run, current=None) == KILLED


@pytest.mark.process
def test_a_kernel_that_was_killed_is_gone_though_nobody_has_asked_how_it_ended(make: Make) -> None:
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(killed.pid)
    path = make(is_stopped=False, host=platform.node(), pid=killed.pid)
    facts = read_facts(path)
    assert say_unended(facts, began=process.create_time()) == RUNNING
    os.kill(killed.pid, signal.SIGKILL)
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert say_unended(facts, began=process.create_time()) == KILLED
    killed.communicate()


def test_a_process_that_has_the_number_of_the_kernel_by_now_is_not_taken_for_it(make: Make) -> None:
    run = RecordedRun(make(is_stopped=False, host=platform.node(), pid=os.getpid()))
    assert run.events[0].at < psutil.Process().create_time()
    assert say_ending(run, current=None) == KILLED


@pytest.mark.parametrize("facts", [{}, {"host": "another", "pid": 1}])
def test_of_another_machine_s_kernel_nothing_is_claimed(make: Make, facts: dict[str, Any]) -> None:
    assert say_ending(RecordedRun(make(is_stopped=False, **facts)), current=None) == UNKNOWN


# ---- as text


def test_a_run_in_text_has_its_cells_failures_numbers_and_last_lines(make: Make) -> None:
    run = RecordedRun(make())
    text = run_text(run, ending=STOPPED)
    assert text.splitlines()[:3] == [
        f"run {STAMP} · 2 cells · 2 ranks · gloo · attempt 1 · 6.0 s · stopped",
        "  cell 1 · done · ranks 0-1 · 2.0 s · train()",
        "  cell 7 · rank 1: ZeroDivisionError: <b> · ranks 0-1 · 0.2 s · 1/0",
    ]
    assert f"cell 7:\n{REPORT}\n" in text
    assert "loss: 1, 1 at last (ranks 0-1)" in text
    assert "[rank 0] first of cell 2" in text
    assert text.endswith(f"all of it is in {run.path}")


def test_a_cell_in_text_has_what_it_wrote_and_no_more(make: Make) -> None:
    run = RecordedRun(make())
    text = run_text(run, run.cell(1))
    assert text.startswith(f"cell 1 of run {STAMP} · done · ranks 0-1 · 2.0 s\n")
    assert "[rank 0] second of cell 1\n" in text
    assert "of cell 2" not in text
    assert "ZeroDivisionError" not in text
    assert "first of cell 2" in run_text(run, run.cell(7))
    assert "of cell 1" not in run_text(run, run.cell(7))


def test_a_cell_without_an_end_says_so(make: Make) -> None:
    run = RecordedRun(make(is_stopped=False))
    assert "· its end is not recorded · ranks 0-1" in run_text(run, run.cell(7))


# ---- as a record


def test_a_run_as_a_record_has_charts_failures_cells_and_last_lines(make: Make) -> None:
    html = run_html(RecordedRun(make()), ending=KILLED)
    assert f"run {STAMP}</span>" in html
    assert KILLED in html
    assert html.count('alt="loss"') == html.count('class="nbddp-image"') == 1
    assert "cell 7: rank 1: ZeroDivisionError: &lt;b&gt;, line 3" in html
    assert "first of cell 2" in html
    assert "the step of loss fell back once: its chart counts on from there" in html
    assert "<b>" not in html


def test_a_cell_as_a_record_has_its_own_and_its_source(make: Make) -> None:
    run = RecordedRun(make())
    html = run_html(run, run.cell(7))
    assert "<img" not in html
    assert "first of cell 2" in html
    assert "of cell 1" not in html
    assert "its source</summary>" in html
    assert "<b>" not in html


# ---- Tab


def test_tab_completes_the_names_of_runs(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(STAMP)
    make("20250102-030405")
    parsers = {"show": LineMagics.__dict__["show"].parser}
    completer = Completer(object(), AutoMode(), parsers)  # type: ignore[arg-type]

    def fitting(line: str) -> list[str]:
        token = line.rpartition(" ")[2]
        return [each.text for each in completer.fits(line, 0, len(line), token)[0]]

    assert fitting("%ddp show ") == [STAMP, "20250102-030405"]
    assert fitting("%ddp show 2026") == [STAMP]
