"""Runs with more metrics than are kept by themselves, and runs that are damaged: what is said."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from console import ddp, refused
from runs_on_disk import BEGAN, make_run

import nbddp
from nbddp.archive.comparing import MOST_CHARTS, Over, compare
from nbddp.errors import RequestError
from nbddp.record.curves import MAX_DROPPED, MAX_NAMES, Curves
from nbddp.record.finished import RecordedRun
from nbddp.ui.panel.charts import Charts
from nbddp.ui.text.run import SHOWN_METRICS, run_text

MANY = 3000


def rows(count: int, *, steps: tuple[int, ...] = (0, 1, 2)) -> Iterator[dict[str, Any]]:
    for index, step in enumerate(steps):
        values = {f"m/{number}": float(number + step) for number in range(count)}
        at = BEGAN + 2 + index / 10
        yield {"time": at, "rank": 0, "attempt": 1, "step": step, **values}


def numbers(text: str) -> list[str]:
    """The metrics whose numbers a text has."""
    return re.findall(r"^(\S+): .* at last ", text, re.MULTILINE)


# ---- show


def test_every_metric_that_is_on_disk_can_be_asked_for(folder: Path) -> None:
    make_run(folder, rows=[*rows(MANY)])
    for name in ("m/7", "m/63", "m/64", "m/1063", "m/1064", "m/2999"):
        assert numbers(ddp(f"show --metrics {name}")) == [name]
        assert numbers(ddp(f"show --metrics {name} --cell 1")) == [name]
    assert "m/2999: 3001 at last" in ddp("show --metrics m/2999")
    assert numbers(ddp("show --metrics 'm/299?,m/5'")) == ["m/5", *(f"m/299{n}" for n in range(10))]


def test_a_pattern_that_fits_very_many_gives_a_bounded_number(folder: Path) -> None:
    make_run(folder, rows=[*rows(MANY)])
    text = ddp("show --metrics 'm/2*'")
    assert numbers(text) == ["m/2", *(f"m/2{n}" for n in range(10)), *of_hundreds()]
    assert f"{MANY - MAX_NAMES:,} more metrics (m/0, m/1, m/3, " in text


def of_hundreds() -> list[str]:
    return [f"m/{number}" for number in range(200, 200 + MAX_NAMES - 11)]


def test_what_there_is_not_is_refused_with_some_of_what_there_is(folder: Path) -> None:
    run = nbddp.Run(make_run(folder, rows=[*rows(MANY)]))
    assert re.search(r"zzz; .*: m/0, m/1, .*, m/39, 2,960 more$", refused("show --metrics zzz"))
    assert run.figure("m/2999")
    with pytest.raises(RequestError, match=r"'zzz'; .* m/63, 2,936 more$"):
        run.figure("zzz")


def test_a_name_that_looks_like_a_pattern_is_found(folder: Path) -> None:
    row = {"time": BEGAN + 2, "rank": 0, "attempt": 1, "lr[0]": 1.0, "a,b": 2.0, "lr0": 3.0}
    make_run(folder, rows=[row])
    assert numbers(ddp("show --metrics lr[0]")) == ["lr[0]", "lr0"]
    assert numbers(ddp("show --metrics a,b")) == ["a,b"]


def test_as_text_those_are_shown_that_were_asked_for(folder: Path) -> None:
    make_run(folder)
    assert numbers(ddp("show")) == ["loss", "accuracy"]
    for line in ("show --metrics loss", "show --metrics 'lo*' --cell 1"):
        text = ddp(line)
        assert numbers(text) == ["loss"]
        assert "1 more metric (accuracy): `%ddp show --metrics NAME`" in text


def test_as_text_so_many_have_a_line_and_the_rest_is_said(folder: Path) -> None:
    path = make_run(folder, rows=[*rows(MANY)])
    text = run_text(RecordedRun(path))
    assert numbers(text) == [f"m/{number}" for number in range(SHOWN_METRICS)]
    more = MANY - SHOWN_METRICS
    assert f"{more:,} more metrics (m/20, m/21, " in text
    assert f", m/39, {more - 20:,} more): `%ddp show --metrics NAME`" in text


def test_more_than_are_counted_are_said_to_be_more() -> None:
    curves = Curves()
    curves.add(0, 0.0, 0, {f"m{number}": 1.0 for number in range(MAX_DROPPED + MAX_NAMES)})
    charts = Charts(curves.snapshot, lambda _chart: None, chosen=[])
    assert charts._look({}).is_at_least
    known = f"{MAX_DROPPED + MAX_NAMES:,}"
    assert charts.note().startswith(f"at least {known} more metrics (m0, m1, ")
    assert f", at least {MAX_DROPPED + MAX_NAMES - 20:,} more): " in charts.note()


# ---- compare, and figures


def test_a_comparison_has_any_metric_over_any_steps(folder: Path) -> None:
    steps = (0, 1, 0)  # counted on, where they fall back
    for name in ("one", "other"):
        make_run(folder, name, rows=[*rows(MANY, steps=steps)])
    text = ddp("compare one other --metrics m/2999")
    assert text.splitlines()[0].split()[:3] == ["line", "run", "m/2999"]
    assert re.search(r"^m/2999\nA +\S+\nB +\S+$", text, re.MULTILINE)
    comparison = compare([*folder.glob(".nbddp/runs/*")], "m/2999")
    assert comparison.runs[0].curves("m/2999", Over.STEP)[0].values == (2999.0, 3000.0, 2999.0)


def test_a_comparison_of_very_many_has_a_bounded_number(folder: Path) -> None:
    paths = [make_run(folder, name, rows=[*rows(MANY)]) for name in ("one", "other")]
    comparison = compare(paths, "m/*")
    assert len(comparison.metrics) == MOST_CHARTS
    assert comparison.left_out == MANY - MOST_CHARTS


# ---- damage


def test_what_cannot_be_read_is_told_in_its_place(folder: Path) -> None:
    path = make_run(folder)
    (path / "rank0.log").unlink()
    (path / "rank0.log").mkdir()
    text = ddp("show")
    assert "[rank 0] " in text
    assert "rank0.log cannot be read: Is a directory" in text
    (path / "metrics.jsonl").unlink()
    (path / "metrics.jsonl").mkdir()
    assert refused("show").endswith("metrics.jsonl cannot be read: Is a directory")
    make_run(folder, "whole")
    assert "Is a directory" in refused(f"compare whole {path.name}")
    assert "whole" in ddp("runs")


def test_a_log_whose_run_was_removed_is_told_in_a_line(folder: Path) -> None:
    path, group = make_run(folder), Mock()
    group.session.time_line.folder.log = lambda rank: path / f"rank{rank}.log"
    group.life.ranks = [0, 1]
    assert ddp("logs 0", group=group) == "hello"
    shutil.rmtree(path)
    assert "rank0.log cannot be read: No such file" in refused("logs 0", group=group)
