"""A run is opened in a notebook or a script that has neither ranks nor torch."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter
from runs_on_disk import BEGAN, events_of, lines, make_run, rows_of

import nbddp
from nbddp.errors import RequestError
from nbddp.record import table
from nbddp.record.table import Table


@pytest.fixture(autouse=True)
def here(folder: Path) -> Path:
    """The runs of a test lie in its own folder."""
    return folder


def test_a_run_is_found_by_its_name_a_part_of_it_or_its_folder(here: Path) -> None:
    path = make_run(here)
    for asked in (path, str(path), path.name, "digits", ""):
        assert nbddp.Run(asked).path.resolve() == path.resolve()
    assert nbddp.Run("digits").name == path.name


@pytest.mark.parametrize("asked", ["x" * 5000, Path("x" * 5000), "a\0b"])
def test_a_name_that_no_folder_can_have_is_no_run(asked: str | Path, here: Path) -> None:
    make_run(here)
    with pytest.raises(RequestError, match=r"^there is no run '"):
        nbddp.Run(asked)


def test_it_says_what_was_run_and_what_happened(here: Path) -> None:
    cells = [("train()", "ok"), ("1/0", "rank 1: ZeroDivisionError")]
    run = nbddp.Run(make_run(here, cells=cells, config={"lr": 0.1}))
    assert run.config == {"lr": 0.1}
    assert [(each.source, each.outcome) for each in run.cells] == cells
    assert run.outcome == "rank 1: ZeroDivisionError"
    assert run.events[0] == {"time": BEGAN, "kind": "start", "attempt": 1, "world_size": 2}
    assert run.ending == "stopped"
    assert run.facts["versions"]["torch"] == "2.13.0"
    assert repr(run).startswith("nbddp.Run('20270115-080000-digits': 2 cells, rank 1: Zero")
    assert repr(nbddp.Run(make_run(here, "one"))) == "nbddp.Run('one': 1 cell, ok)"


def test_its_numbers_are_a_table(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda _name: None)
    rows = [*rows_of(3), {"time": BEGAN + 9, "rank": 0, "attempt": 1, "f1": math.nan}]
    found = nbddp.Run(make_run(here, rows=rows)).metrics()
    assert isinstance(found, Table)
    assert found.columns == ("time", "rank", "attempt", "step", "loss", "accuracy", "f1")
    assert len(found) == 7
    assert found["loss"][:6] == [row["loss"] for row in rows[:6]]
    assert math.isnan(found["loss"][6])
    assert math.isnan(found["f1"][6])
    assert found.rows()[1]["rank"] == 1
    assert "accuracy" in repr(found).splitlines()[0]
    assert repr(Table({"x": [*range(30)]})).endswith("... and 20 rows more")


def test_where_there_is_pandas_they_are_a_frame(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas: Any = ModuleType("pandas")
    pandas.__spec__ = SimpleNamespace()
    pandas.DataFrame = lambda columns: ("frame", columns)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    kind, columns = nbddp.Run(make_run(here, rows=rows_of(3))).metrics()
    assert kind == "frame"
    assert columns["step"] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_its_figure_can_be_saved(kind: str, here: Path) -> None:
    figure = nbddp.Run(make_run(here)).figure()
    figure.savefig(here / f"figure.{kind}")
    assert (here / f"figure.{kind}").stat().st_size > 3000
    one, named = nbddp.Run().figure(["loss"]), nbddp.Run().figure("loss")
    assert one.get_figwidth() == named.get_figwidth() == figure.get_figwidth() / 2


def test_a_notebook_shows_its_figure(here: Path) -> None:
    shown = DisplayFormatter().format(nbddp.Run(make_run(here)).figure())
    assert shown[0]["image/png"]


def test_a_figure_of_what_is_not_there_is_refused(here: Path) -> None:
    run = nbddp.Run(make_run(here))
    with pytest.raises(RequestError, match="has no metric 'lose'; its metrics are: loss, accuracy"):
        run.figure(["lose"])
    with pytest.raises(RequestError, match="has no metrics to draw"):
        nbddp.Run(make_run(here, "20270115-090000", rows=[])).figure()


def test_a_run_whose_kernel_was_killed_opens_up_to_its_last_line(here: Path) -> None:
    path = make_run(
        here, cells=[("train()", "")], is_stopped=False, torn='{"time": 1.0, "ra', rows=rows_of(5)
    )
    (path / "run.json").write_text('{"nproc"')
    run = nbddp.Run(path)
    assert (run.outcome, run.config, run.facts) == ("", {}, {})
    assert len(run.metrics()) == 10
    assert "its end is not recorded" in repr(run)


def test_numbers_of_somebody_else_are_left_out(here: Path) -> None:
    odd = '{"time": 1.0, "rank": "a", "attempt": 1, "x": 1}\n[]\n'
    odd += '{"time": 2.0, "rank": 0, "attempt": 1, "x": 1, "y": "text", "z": null}\n'
    run = nbddp.Run(make_run(here, rows=[], torn=odd))
    assert run.metrics().rows() == [
        {"time": 2.0, "rank": 0, "attempt": 1, "step": pytest.approx(math.nan, nan_ok=True), "x": 1}
    ]


def damage(base: Path) -> dict[str, str]:
    """Folders that are no runs, by what is wrong."""
    bad = {
        "no-facts": lines([{"time": 1.0, "kind": "start"}]),
        "odd-cell": lines([{"time": 1.0, "kind": "cell", "number": 1, "ranks": 3, "source": "x"}]),
        "odd-logs": lines([{**events_of(("x", ""))[2], "logs": [1]}]),
    }
    for name, text in bad.items():
        path = base / ".nbddp" / "runs" / name
        path.mkdir(parents=True)
        (path / "events.jsonl").write_text(text)
    (base / ".nbddp" / "runs" / "a-folder" / "events.jsonl").mkdir(parents=True)
    (base / ".nbddp" / "runs" / "a-file").write_text("")
    return bad


def test_a_damaged_folder_is_named_and_the_others_are_there(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        make_run(here, f"20270115-08000{number}")
    bad = damage(here)
    with caplog.at_level(logging.WARNING, logger="nbddp"):
        found = nbddp.runs()
    assert [each.name[-1] for each in found] == ["2", "1", "0"]
    for name in bad:
        assert any(f"left out: {name} is damaged" in each for each in caplog.messages), name
    assert any("left out: there is no run in .nbddp/runs/a-folder" in it for it in caplog.messages)
    with pytest.raises(RequestError, match="no-facts is damaged, or no run of nbddp's"):
        nbddp.Run("no-facts")


def test_where_there_is_no_run_there_is_an_empty_list(here: Path) -> None:
    assert nbddp.runs(here) == []
    with pytest.raises(RequestError, match="there is no run below"):
        nbddp.Run()


@pytest.mark.process
def test_neither_torch_nor_a_kernel_is_needed(here: Path) -> None:
    path = make_run(here)
    program = (
        "import sys, json, nbddp\n"
        "run = nbddp.runs()[0]\n"
        "table = run.metrics()\n"
        "run.cells, run.events, run.config\n"
        "print(json.dumps([run.name, sorted({each.split('.')[0] for each in sys.modules})]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=here
    )
    name, loaded = json.loads(done.stdout)
    assert name == path.name
    assert not {"torch", "IPython", "ipykernel", "ipywidgets", "matplotlib", "numpy"} & {*loaded}
