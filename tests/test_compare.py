"""``%ddp compare``: runs beside each other, with all that was not finite, stood out, or differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from pages import Page
from PIL import Image
from runs_on_disk import BEGAN, make_run, rows_of

from nbddp.archive.comparing import Comparison, Over, compare
from nbddp.archive.numbers import Numbers
from nbddp.errors import ArgumentError, RequestError
from nbddp.magics.line import LineMagics
from nbddp.magics.views import ViewChoice, Views
from nbddp.record.finished import RecordedRun
from nbddp.ui.charts.compared import ComparedChart, draw_compared
from nbddp.ui.charts.figures import compared_figure, compared_png
from nbddp.ui.charts.svg import SvgSheet
from nbddp.ui.panel.compare import compare_bundle, compare_html
from nbddp.ui.text.compare import SAME, compare_text

Say = Callable[[str], str]
Rows = list[dict[str, Any]]

RESTART = {"detected": 0.1, "restarted": 0.5, "replayed": 0.1, "cells": 1}


@pytest.fixture(autouse=True)
def here(folder: Path) -> Path:
    """The runs of a test lie in its own folder."""
    return folder


def two(base: Path, **facts: Any) -> list[Path]:
    """Two runs that differ in rate, version and code."""
    return [
        make_run(
            base,
            f"2027011{number}-080000-digits{number}",
            cells=[(f"import torch\ntrain(lr={rate})", "ok")],
            rows=rows_of(60, pace=10.0 * number, begin=rate * 10),
            config={"lr": rate, "seed": 1},
            versions={"torch": f"2.{number}", "nbddp": "0.1"},
            **facts,
        )
        for number, rate in enumerate((0.1, 0.3), start=1)
    ]


def row(step: int, loss: float, *, rank: int = 0, **more: Any) -> dict[str, Any]:
    at = BEGAN + 1 + step / 10
    return {"time": at, "rank": rank, "attempt": 1, "step": step, "loss": loss, **more}


# ---- in what they differ, and what they came to


def test_only_what_differs_is_told(here: Path) -> None:
    found = dict(compare(two(here, git={"commit": "abc", "dirty": False})).differences())
    assert found == {"lr": ["0.1", "0.3"], "torch": ["2.1", "2.2"]}


def test_changes_that_git_saw_differ_too(here: Path) -> None:
    one = make_run(here, "a", git={"commit": "0123456789abcdef", "dirty": True})
    other = make_run(here, "b", git={"commit": "0123456789abcdef", "dirty": False})
    found = dict(compare([one, other]).differences())
    assert found == {"git": ["0123456789 with changes", "0123456789"]}


def test_another_world_size_or_machine_is_told(here: Path) -> None:
    one = make_run(here, "a", devices=["cpu"] * 2, hosts=["x", "x"])
    other = make_run(here, "b", devices=["cuda:0"] * 4, world_size=4, hosts=["x", "y"])
    found = dict(compare([one, other]).differences())
    assert found["world size"] == ["2", "4"]
    assert found["devices"] == ["cpu", "cuda:0"]
    assert found["hosts"] == ["x", "x, y"]


def test_the_code_is_a_diff_of_the_cells(here: Path) -> None:
    comparison = compare(two(here))
    diff = comparison.code(1)
    assert "-train(lr=0.1)" in diff
    assert "+train(lr=0.3)" in diff
    assert comparison.code(0) == []


def test_cells_that_ran_again_by_themselves_are_no_other_code(here: Path) -> None:
    one = make_run(here, "a")
    again = {"number": 9, "ranks": [0, 1], "source": "train()", "again": True}
    other = make_run(here, "b", extra=[{**again, "time": BEGAN + 5, "kind": "cell"}])
    assert compare([one, other]).code(1) == []
    assert "the code of all cells is the same" in compare_text(compare([one, other]))


def test_final_values_have_their_spread_over_ranks(here: Path) -> None:
    rows = [row(1, 2.0), row(1, 3.0, rank=1)]
    one, other = make_run(here, "a", rows=rows), make_run(here, "b", rows=[row(1, math.inf)])
    comparison = compare([one, other])
    assert [comparison.finals(each) for each in comparison.runs] == [["2.5 (2 to 3)"], ["inf"]]


def test_metrics_are_chosen_by_name_and_pattern(here: Path) -> None:
    paths = two(here)
    assert compare(paths).metrics == ("loss", "accuracy")
    assert compare(paths, "acc*").metrics == ("accuracy",)
    with pytest.raises(ArgumentError, match="there is no metric lose; the metrics of the runs are"):
        compare(paths, "lose")


def test_too_few_runs_too_many_and_damaged_ones_are_refused(here: Path) -> None:
    paths = two(here)
    with pytest.raises(ArgumentError, match="compare takes 2 to 8 runs, got 1"):
        compare(paths[:1])
    with pytest.raises(ArgumentError, match="got 9"):
        compare([paths[0]] * 9)
    (paths[1] / "events.jsonl").write_text('{"time": 1.0, "kind": "cell"}\n')
    with pytest.raises(RequestError, match="digits2 is damaged, or no run of nbddp's"):
        compare(paths)


# ---- the curves


def points(comparison: Comparison, over: Over, index: int = 0) -> tuple[list[float], list[float]]:
    chart = ComparedChart.of(comparison, "loss", over)
    line = chart.runs[index].line
    return line.steps.tolist(), line.values.tolist()


def test_curves_are_over_steps_samples_and_time(here: Path) -> None:
    rows = [row(step, float(step)) for step in range(3)]
    paths = [make_run(here, name, rows=rows, samples_per_step=64) for name in ("a", "b")]
    comparison = compare(paths)
    assert comparison.axes == [Over.STEP, Over.SAMPLES, Over.TIME]
    assert points(comparison, Over.STEP) == ([0, 1, 2], [0, 1, 2])
    assert points(comparison, Over.SAMPLES) == ([64, 128, 192], [0, 1, 2])
    assert points(comparison, Over.TIME)[0] == pytest.approx([0, 0.1, 0.2], abs=1e-6)


def test_where_the_batch_is_not_known_there_are_no_samples(here: Path) -> None:
    comparison = compare(two(here))
    assert comparison.axes == [Over.STEP, Over.TIME]
    html = compare_html(comparison, over=Over.SAMPLES)
    assert "over samples" not in html


def test_the_line_is_the_mean_and_the_band_the_spread_over_ranks(here: Path) -> None:
    rows = [row(step, 2.0 + rank, rank=rank) for step in range(4) for rank in (0, 1, 4)]
    comparison = compare([make_run(here, name, rows=rows) for name in ("a", "b")])
    chart = ComparedChart.of(comparison, "loss", Over.STEP)
    assert chart.runs[0].line.values.tolist() == [pytest.approx(11 / 3)] * 4
    low, high = (
        min(line.low.min() for line in chart.runs[0].ranks),
        max(line.high.max() for line in chart.runs[0].ranks),
    )
    assert (low, high) == (2.0, 6.0)
    sheet = SvgSheet()
    draw_compared(sheet, chart)
    assert 'opacity="0.18"' in sheet.inline("x")


def test_steps_that_fall_back_count_on_as_in_the_runs_own_charts(here: Path) -> None:
    rows = [row(step, float(step)) for step in (0, 1, 2, 0, 1, 2)]
    for index, each in enumerate(rows):
        each["time"] = BEGAN + index
    comparison = compare([make_run(here, name, rows=rows) for name in ("a", "b")])
    assert points(comparison, Over.STEP)[0] == [0, 1, 2, 3, 4, 5]
    assert ComparedChart.of(comparison, "loss", Over.STEP).frame.unit == "count"


def test_what_a_restart_did_again_is_there_once(here: Path) -> None:
    first = [row(step, 1.0) for step in range(4)]
    again = [{**row(step, 9.0), "attempt": 2, "time": BEGAN + 5 + step} for step in (2, 3, 4)]
    recovery = {"time": BEGAN + 4.5, "kind": "recovery", "attempt": 2, **RESTART}
    path = make_run(here, "a", rows=[*first, *again], extra=[recovery])
    comparison = compare([path, make_run(here, "b", rows=first)])
    assert points(comparison, Over.STEP) == ([0, 1, 2, 3, 4], [1, 1, 9, 9, 9])
    assert len(points(comparison, Over.TIME)[0]) == 7


def test_restarts_and_heals_are_marks_on_every_axis(here: Path) -> None:
    resumed = [
        {"time": BEGAN + 3, "kind": "resumed", "step": 20, "seconds": 0.7, "lost": 1, **RESTART},
        {"time": BEGAN + 5, "kind": "resumed", "step": 40, "seconds": 0.3, "lost": 1}
        | {"detected": 0.1, "healed": 0.2},
    ]
    path = make_run(here, "a", extra=resumed, samples_per_step=10)
    comparison = compare([path, make_run(here, "b", samples_per_step=10)])
    marks = {
        over: ComparedChart.of(comparison, "loss", over).runs[0].marks for over in comparison.axes
    }
    assert marks[Over.STEP] == ((20.0, False), (40.0, True))
    assert marks[Over.SAMPLES] == ((210.0, False), (410.0, True))
    assert [at for at, _ in marks[Over.TIME]] == pytest.approx([2.0, 4.0])
    assert "orange is a restart, green a heal" in Page(compare_html(comparison)).text


def test_a_spike_survives_in_a_run_of_100_000_steps(here: Path) -> None:
    rows = [row(step, 1.0) for step in range(100_000)]
    rows[54_321]["loss"], rows[77_777]["loss"] = 50.0, -30.0
    comparison = compare([make_run(here, "a", rows=rows), make_run(here, "b", rows=rows_of(9))])
    for over in comparison.axes:
        chart = ComparedChart.of(comparison, "loss", over)
        [line] = chart.runs[0].ranks
        assert len(line.steps) <= 1001
        assert (line.low.min(), line.high.max()) == (-30.0, 50.0)
        low, high = chart.frame.up(np.array([-30.0, 50.0]))
        sheet = SvgSheet()
        draw_compared(sheet, chart)
        assert chart.frame.bottom < low < high < chart.frame.top
    assert len(compare_html(comparison)) < 500_000


def test_a_short_time_has_parts_of_seconds_beside_its_axis(here: Path) -> None:
    rows = [{**row(step, 1.0), "time": BEGAN + step / 1000} for step in range(50)]
    comparison = compare([make_run(here, name, rows=rows) for name in ("a", "b")])
    chart = ComparedChart.of(comparison, "loss", Over.TIME)
    sheet = SvgSheet()
    draw_compared(sheet, chart)
    below = [label for label in sheet.labels if label.y > chart.frame.top]
    assert [label.text for label in below] == ["0.00", "0.01", "0.02", "0.03", "0.04", "s"]
    assert below[-1].x < below[0].x - 6.4 * len("0.00") / 2  # the unit is not under a number


def test_what_is_not_finite_is_shown_and_said_of_whom(here: Path) -> None:
    rows = [row(step, math.nan if step > 5 else 1.0) for step in range(10)]
    comparison = compare([make_run(here, "a", rows=rows_of(20)), make_run(here, "b", rows=rows)])
    page = Page(compare_html(comparison))
    assert "4 values not finite (B)" in page.text
    assert "B nan" in page.text
    sheet = SvgSheet()
    draw_compared(sheet, ComparedChart.of(comparison, "loss", Over.STEP))
    assert "#dd4444" in sheet.inline("x")


def test_smooth_lines_stand_before_the_raw_ones(here: Path) -> None:
    comparison = compare(two(here))
    chart = ComparedChart.of(comparison, "loss", Over.STEP)
    both, raw = SvgSheet(), SvgSheet()
    draw_compared(both, chart, is_smooth=True)
    draw_compared(raw, chart, is_smooth=False)
    assert both.inline("").count("<path") == raw.inline("").count("<path") + 2
    assert 'stroke-width="20"' in both.inline("")
    assert 'class="nbddp-charts nbddp-is-smooth"' in compare_html(comparison, is_smooth=True)


def test_the_scale_is_logarithmic_where_that_helps_or_as_asked(here: Path) -> None:
    rows = [row(step, 10.0 ** (-step / 5)) for step in range(30)]
    comparison = compare([make_run(here, name, rows=rows) for name in ("a", "b")])
    assert "log scale" in compare_html(comparison)
    figures = [compared_figure(comparison, scale=each) for each in ("auto", "log", "linear")]
    said = [
        [part.get_text() for part in each.get_children() if hasattr(part, "get_text")]
        for each in figures
    ]
    assert ["log scale" in each for each in said] == [True, True, False]


NUMBERS = st.floats() | st.sampled_from([0.0, 1.0, 1e308, -1e308])
MANY = st.lists(
    st.fixed_dictionaries(
        {"rank": st.integers(0, 3), "step": st.integers(-5, 50), "loss": NUMBERS},
        optional={"accuracy": NUMBERS},
    ),
    max_size=40,
)


@given(first=MANY, second=MANY)
def test_any_numbers_can_be_drawn(first: Rows, second: Rows, tmp_path_factory: Any) -> None:
    base: Path = tmp_path_factory.mktemp("any")
    paths = []
    for name, rows in (("a", first), ("b", second)):
        timed = [{"time": BEGAN + at, "attempt": 1, **each} for at, each in enumerate(rows)]
        paths.append(make_run(base, name, rows=timed, samples_per_step=8))
    comparison = compare(paths)
    Page(compare_html(comparison))
    assert compare_text(comparison)


@given(steps=st.lists(st.integers(0, 40), unique=True, max_size=20).map(sorted), data=st.data())
def test_columns_are_what_the_runs_own_curves_are(
    steps: list[int], data: st.DataObject, tmp_path_factory: Any
) -> None:
    rows = []
    for step in steps:
        rows.append(row(step, data.draw(st.floats(-1e6, 1e6))))
        if data.draw(st.booleans()):
            rows.append(row(step, 1.0, rank=1, accuracy=2.0))
    path = make_run(tmp_path_factory.mktemp("same"), "a", rows=rows)
    known, curves = Numbers(rows), RecordedRun(path).metrics()
    assert known.names() == curves.names()
    for name in known.names():
        assert known.last(name) == curves.last(name)
        found: Mapping[int, Any] | None = known.by_step(name)
        assert found == curves.curves(name)


# ---- on the page, as text, and in files


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


def test_the_text_has_finals_differences_and_the_diff(here: Path, ddp: Say) -> None:
    two(here)
    text = ddp("compare digits1 digits2")
    lines = text.splitlines()
    assert lines[0].split() == [
        "line",
        "run",
        "loss",
        "accuracy",
        "steps",
        "pace",
        "time",
        "outcome",
    ]
    assert lines[1].startswith("A     digits1  0.3123 (0.3073 to 0.3173)  0.8601    60 ")
    assert "differs  A    B" in lines
    assert "lr       0.1  0.3" in lines
    assert "code from A to B: 1 line added, 1 removed" in lines
    assert "+train(lr=0.3)" in lines


def test_the_page_has_the_same_charts_keys_and_switches(here: Path) -> None:
    page = Page(compare_html(compare(two(here, samples_per_step=64))))
    switches = [each["aria-label"] for tag, each in page.tags if tag == "input"]
    assert switches == ["over samples", "over time", "smooth"]
    assert len([1 for tag, _ in page.tags if tag == "svg"]) == 2 * 3
    assert len([1 for tag, _ in page.tags if tag == "img"]) == 2
    assert {"A", "B"} <= {each.removeprefix("━ ")[:1] for each in page.by_tag["span"]}
    assert "+train(lr=0.3)" in page.text
    assert [each["aria-label"] for tag, each in page.tags if tag == "table"] == [
        "what the runs came to",
        "in what the runs differ",
    ]


def test_a_run_without_cells_has_no_other_code(here: Path) -> None:
    paths = [make_run(here, "a"), make_run(here, "b", cells=())]
    unknown = "no cell of b is on record: its code is not compared"
    for both in (paths, paths[::-1]):
        text = compare_text(compare(both))
        assert text.splitlines()[-1] == unknown
        assert "code from" not in text
        assert SAME not in text
    paths.append(make_run(here, "c"))
    *_, said, same = compare_text(compare(paths)).splitlines()
    assert (said, same) == (unknown, "the code of the others is the same")
    from_unknown = compare_text(compare([paths[1], paths[0], paths[2]]))
    assert from_unknown.splitlines()[-1] == unknown, "nor are the others compared with it"
    page = Page(compare_html(compare(paths)))
    assert unknown in page.text
    assert "code from" not in page.text


def test_nothing_that_a_run_wrote_is_markup(here: Path) -> None:
    evil = "</pre><script>alert(1)</script>"
    paths = [
        make_run(here, name, cells=[(f"{evil}{name}", f"rank 0: {evil}")], config={evil: name})
        for name in ("a", "b")
    ]
    html = compare_html(compare(paths))
    assert "<script>" not in html
    assert Page(html).text.count("<script>") >= 4


def test_runs_without_numbers_are_compared_all_the_same(here: Path, ddp: Say) -> None:
    for name in ("a", "b"):
        make_run(here, name, rows=[], config={"lr": name})
    assert "differs" in ddp("compare a b")
    with pytest.raises(UsageError, match="none of these runs has reported a number"):
        ddp("compare a b --save figure.png")


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_the_charts_are_saved(kind: str, here: Path, ddp: Say) -> None:
    two(here)
    said = ddp(f"compare digits1 digits2 --over time --smooth --save figure.{kind}")
    assert said == f"nbddp: 2 charts in figure.{kind}"
    begins = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    assert (here / f"figure.{kind}").read_bytes().startswith(begins[kind])


def test_a_file_that_cannot_be_written_or_is_no_picture_is_refused(here: Path, ddp: Say) -> None:
    two(here)
    with pytest.raises(UsageError, match=r"expected a file like figure\.pdf, \.png or \.svg"):
        ddp("compare digits1 digits2 --save figure.docx")
    with pytest.raises(UsageError, match=r"no/figure.png cannot be written: No such file"):
        ddp("compare digits1 digits2 --save no/figure.png")


def test_samples_that_are_not_known_are_refused(here: Path, ddp: Say) -> None:
    two(here)
    with pytest.raises(UsageError, match="how many samples a step has is not known of all"):
        ddp("compare digits1 digits2 --over samples")


def test_where_a_notebook_is_executed_without_a_page_there_is_a_picture(here: Path) -> None:
    comparison = compare(two(here))
    how: Any = {"over": Over.STEP, "scale": "auto", "is_smooth": False}
    data, metadata = compare_bundle(comparison, text="in words", has_page=False, **how)
    assert data.keys() == {"image/png", "text/plain"}
    png, width = compared_png(comparison, **how)
    assert metadata == {"image/png": {"width": width}}
    (here / "picture.png").write_bytes(png)
    with Image.open(here / "picture.png") as picture:
        assert picture.mode == "RGBA"
        assert picture.getpixel((2, 2))[3] == 0  # light and dark pages shine through
    page, _ = compare_bundle(comparison, text="in words", has_page=True, **how)
    assert page.keys() == {"text/html", "text/plain"}


def test_a_console_without_a_kernel_gets_letters(here: Path) -> None:
    shell = Mock(spec=[])
    views = Views(shell, Mock())
    views.say = Mock()  # type: ignore[method-assign]
    views.choice = ViewChoice.TEXT
    views.show_comparison(compare(two(here)), over=Over.STEP, scale="auto", is_smooth=False)
    views.say.assert_called_once()


@pytest.mark.parametrize("other", ["digits1", ".nbddp/runs/20270111-080000-digits1"])
def test_the_same_run_twice_is_told(other: str, here: Path) -> None:
    two(here)
    desk = Mock(views=Mock(), current_run=None, shell=None)
    same = "these are the same run, 20270111-080000-digits1: compare needs two or more"
    with pytest.raises(UsageError, match=f"^{same}$"):
        LineMagics(desk).ddp(f"compare digits1 {other}")
    with pytest.raises(UsageError, match="compare takes 2 to 8 runs, got 1"):
        LineMagics(desk).ddp("compare digits1")


# ---- names, and numbers that are no lines


def test_runs_are_called_without_their_time_where_that_tells_them_apart(here: Path) -> None:
    short = compare([make_run(here, f"2027011{day}-080000-{name}") for day, name in named("ab")])
    assert short.names == ["a", "b"]
    assert '<code title="20270110-080000-a">a</code>' in compare_html(short)
    mixed = compare([make_run(here, f"2027041{day}-080000-{name}") for day, name in named("abb")])
    assert mixed.names == ["a", "20270411-080000-b", "20270412-080000-b"]
    alike = compare([make_run(here, f"2027021{day}-080000-{name}") for day, name in named("aa")])
    assert alike.names == ["20270210-080000-a", "20270211-080000-a"]
    bare = compare([make_run(here, f"2027031{day}-080000") for day in (1, 2)])
    assert bare.names == ["20270311-080000", "20270312-080000"]


def named(names: str) -> list[tuple[int, str]]:
    return list(enumerate(names))


def with_final(begin: float) -> list[dict[str, Any]]:
    """Rows of a training that says its test's result once, at the end."""
    rows = rows_of(20, begin=begin)
    last = {key: rows[-1][key] for key in ("time", "rank", "attempt", "step")}
    return [*rows, {**last, "final": begin / 10}]


def test_a_number_that_was_reported_once_is_in_the_table_and_no_chart(here: Path) -> None:
    paths = [
        make_run(here, f"2027011{at}-080000-r{at}", rows=with_final(at + 2.0)) for at in (0, 1)
    ]
    comparison = compare(paths)
    assert "final" in comparison.metrics
    assert comparison.drawn == ("loss", "accuracy")
    html = compare_html(comparison)
    assert html.count('class="nbddp-chart"') == 2
    assert "<td>0.2</td>" in html
    only = compare(paths, "final")
    assert only.drawn == ("final",)  # what was asked for is drawn
    assert compare_html(only).count('class="nbddp-chart"') == 1
