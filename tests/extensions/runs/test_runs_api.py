"""A run is opened in a notebook or a script that has neither ranks nor torch."""

import importlib.util
import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter
from refusals import refusal
from runs_on_disk import BEGAN, lines, make_run, rows_of

import nbddp
from nbddp.errors import RequestError


def test_a_run_is_found_by_its_name_a_part_of_it_or_its_folder(folder: Path) -> None:
    path = make_run(folder)
    for asked in (path, str(path), path.name, "digits", ""):
        assert nbddp.Run(asked).path.resolve() == path.resolve()
    assert nbddp.Run("digits").name == path.name
    for asked in ("x" * 5000, Path("x" * 5000), "a\0b"):
        with pytest.raises(RequestError, match="; the newest are: "):
            nbddp.Run(asked)


def test_a_run_has_its_settings_cells_events_and_outcome(folder: Path) -> None:
    cells = [("train()", "ok"), ("1/0", "rank 1: ZeroDivisionError")]
    run = nbddp.Run(make_run(folder, cells=cells, config={"lr": 0.1}))
    assert run.config == {"lr": 0.1}
    assert [(each.source, each.outcome) for each in run.cells] == cells
    assert run.outcome == "rank 1: ZeroDivisionError"
    assert run.events[0] == {"time": BEGAN, "kind": "start", "attempt": 1, "world_size": 2}
    assert run.ending == "stopped"
    assert run.facts["versions"]["torch"] == "2.13.0"
    assert repr(run).startswith("nbddp.Run('20270115-080000-digits': 2 cells, rank 1: Zero")
    assert repr(nbddp.Run(make_run(folder, "one"))) == "nbddp.Run('one': 1 cell, ok)"
    path = make_run(folder, "torn", cells=[("train()", "")], is_stopped=False)
    (path / "run.json").write_text('{"nproc"')
    torn = nbddp.Run(path)
    assert (torn.outcome, torn.config, torn.facts) == ("", {}, {})
    assert "not recorded" in repr(torn)


def test_the_metrics_of_a_run_are_a_table_or_a_data_frame(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    rows = [*rows_of(3), {"time": BEGAN + 9, "rank": 0, "attempt": 1, "f1": math.nan}]
    run = nbddp.Run(make_run(folder, rows=rows))
    found = run.metrics()
    columns = ["time", "rank", "attempt", "step", "loss", "accuracy", "f1"]
    assert [*found] == columns
    assert {len(values) for values in found.values()} == {7}
    assert found["loss"][:6] == [row["loss"] for row in rows[:6]]
    assert math.isnan(found["loss"][6])
    assert math.isnan(found["f1"][6])
    assert found["rank"][1] == 1
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: "found")
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda each: (each,)))
    [columns] = run.metrics()
    assert columns["step"][:6] == [0, 0, 1, 1, 2, 2]


def test_the_figure_of_a_run_can_be_saved_and_shown(folder: Path) -> None:
    figure = nbddp.Run(make_run(folder)).figure()
    figure.savefig(folder / "figure.svg")
    assert (folder / "figure.svg").stat().st_size > 3000
    one, named = nbddp.Run().figure(["loss"]), nbddp.Run().figure("loss")
    assert one.get_figwidth() == named.get_figwidth() == figure.get_figwidth() / 2
    assert DisplayFormatter().format(figure)[0]["image/png"]


def test_a_figure_without_metrics_is_refused(folder: Path, snapshot: Any) -> None:
    for rows, names in ((None, ["lose"]), ([], None)):
        run = nbddp.Run(make_run(folder, f"20270115-0{len(names or [])}0000", rows=rows))
        assert refusal(RequestError, run.figure, names) == snapshot


def test_invalid_rows_are_left_out_of_the_metrics(folder: Path) -> None:
    odd = '{"time": 1.0, "rank": "a", "attempt": 1, "x": 1}\n[]\n'
    odd += '{"time": 2.0, "rank": 0, "attempt": 1, "x": 1, "y": "text", "z": null}\n'
    metrics = nbddp.Run(make_run(folder, rows=[], torn=odd)).metrics()
    columns = {name: list(values) for name, values in metrics.items()}
    nan = pytest.approx(math.nan, nan_ok=True)
    assert columns == {"time": [2.0], "rank": [0], "attempt": [1], "step": [nan], "x": [1]}


def test_runs_logs_damaged_folders_and_lists_the_other_runs(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert nbddp.runs(folder) == []
    with pytest.raises(RequestError, match="%%ddp"):
        nbddp.Run()
    for number in range(3):
        make_run(folder, f"20270115-08000{number}")
    runs = folder / ".nbddp" / "runs"
    cell = {"time": 1.0, "kind": "cell", "number": 1, "source": "x"}
    for name, event in (
        ("no-facts", {"time": 1.0, "kind": "start"}),
        ("odd-cell", {**cell, "ranks": 3}),
        ("odd-logs", {**cell, "ranks": [0, 1], "logs": [1]}),
    ):
        (runs / name).mkdir()
        (runs / name / "events.jsonl").write_text(lines([event]))
    (runs / "a-folder" / "events.jsonl").mkdir(parents=True)
    (runs / "a-file").touch()
    with caplog.at_level(logging.WARNING, logger="nbddp"):
        found = nbddp.runs()
    assert [each.name[-1] for each in found] == ["2", "1", "0"]
    for name in ("no-facts", "odd-cell", "odd-logs", "a-folder"):
        assert [each for each in caplog.messages if name in each], name
    assert "a-file" not in caplog.text
    with pytest.raises(RequestError, match="no-facts is damaged"):
        nbddp.Run("no-facts")
