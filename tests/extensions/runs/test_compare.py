"""``%ddp compare``: runs beside each other, with all that was not finite, stood out, or differs."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from console import ddp, refused
from hypothesis import given
from hypothesis import strategies as st
from pages import Page, readable
from runs_on_disk import BEGAN, make_run, rows_of

from nbddp.charts.axes import AxisScale
from nbddp.charts.chart_lines import Chart
from nbddp.charts.svg import Drawing, Frame, draw
from nbddp.errors import ArgumentError, RequestError
from nbddp.extensions.runs import XAxis
from nbddp.extensions.runs.compared_chart import compared_chart
from nbddp.extensions.runs.comparison import Comparison, compare
from nbddp.extensions.runs.comparison_view import SAME_CODE, comparison_report
from nbddp.ui.report.render import render_html, render_text

Rows = list[dict[str, Any]]


def two(base: Path, **facts: Any) -> list[Path]:
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


def compared(base: Path, rows: Rows, other: Rows | None = None, **facts: Any) -> Comparison:
    first = make_run(base, "a", rows=rows, **facts)
    return compare([first, make_run(base, "b", rows=rows if other is None else other, **facts)])


def drawn(chart: Chart) -> Drawing:
    return draw(chart, Frame(chart))


def page_of(comparison: Comparison, **how: Any) -> str:
    return render_html(comparison_report(comparison, **how))


def text_of(comparison: Comparison) -> str:
    return render_text(comparison_report(comparison))


# ---- in what they differ, and what they came to


def test_a_comparison_shows_only_differences(folder: Path, snapshot: Any) -> None:
    same = {"config": {"lr": 0.1, "seed": 1}, "versions": {"torch": "2.1", "nbddp": "0.1"}}
    git = {"commit": "0123456789abcdef"}
    facts = {"git": git | {"dirty": True}, "devices": ["cpu"] * 2, "hosts": ["x", "x"]}
    one = make_run(folder, "a", **same, **facts)
    facts = {"git": git | {"dirty": False}, "devices": ["cuda:0"] * 4, "hosts": ["x", "y"]}
    other = make_run(folder, "b", **same, **facts, world_size=4)
    assert compare([one, one]).differences() == []
    assert dict(compare([one, other]).differences()) == snapshot


def test_retried_cells_do_not_count_as_different_code(folder: Path) -> None:
    one = make_run(folder, "a")
    again = {"number": 9, "ranks": [0, 1], "source": "train()", "again": True}
    other = make_run(folder, "b", extra=[{**again, "time": BEGAN + 5, "kind": "cell"}])
    assert compare([one, other]).code_diffs[1] == []
    assert text_of(compare([one, other])).endswith(SAME_CODE)


def test_comparing_too_few_too_many_or_damaged_runs_is_refused(folder: Path) -> None:
    paths = two(folder)
    for count in (1, 9):
        with pytest.raises(ArgumentError, match=f"2 to 8 runs, got {count}"):
            compare(paths[:1] * count)
    (paths[1] / "events.jsonl").write_text('{"time": 1.0, "kind": "cell"}\n')
    with pytest.raises(RequestError, match="digits2 is damaged"):
        compare(paths)


# ---- the curves


def points(comparison: Comparison, over: XAxis) -> tuple[list[float], list[float]]:
    line = compared_chart(comparison, "loss", over).lines[0]
    return line.steps.tolist(), line.values.tolist()


def test_curves_can_be_drawn_over_steps_samples_and_time(folder: Path) -> None:
    rows = [row(step, float(step)) for step in range(3)]
    comparison = compared(folder, rows, samples_per_step=64)
    assert comparison.axes == [XAxis.STEP, XAxis.SAMPLES, XAxis.TIME]
    assert points(comparison, XAxis.STEP) == ([0, 1, 2], [0, 1, 2])
    assert points(comparison, XAxis.SAMPLES) == ([64, 128, 192], [0, 1, 2])
    assert points(comparison, XAxis.TIME)[0] == pytest.approx([0, 0.1, 0.2], abs=1e-6)
    unknown = compare(two(folder))
    assert unknown.axes == [XAxis.STEP, XAxis.TIME]


def test_time_counts_from_the_first_metric_of_a_run_for_any_requested_metric(folder: Path) -> None:
    late = {"time": BEGAN + 101, "rank": 0, "attempt": 1, "step": 5, "val": 1.0}
    rows = [row(0, 1.0), late]
    paths = [make_run(folder, name, rows=rows) for name in "ab"]
    run = compare(paths, "val").runs[0]
    assert run.curves("val", XAxis.TIME)[0].steps == (100.0,)
    assert run.metrics().ended - run.metrics().began == 100.0


def test_the_line_of_a_run_is_the_mean_over_ranks_and_the_band_is_the_spread(folder: Path) -> None:
    rows = [row(step, 2.0 + rank, rank=rank) for step in range(4) for rank in (0, 1, 4)]
    chart = compared_chart(compared(folder, rows), "loss", XAxis.STEP)
    line = chart.lines[0]
    assert line.values.tolist() == [pytest.approx(11 / 3)] * 4
    assert (line.low.min(), line.high.max()) == (2.0, 6.0)
    assert 'opacity="0.18"' in drawn(chart).inline("x")


def test_restarts_and_heals_are_marks_on_every_axis(folder: Path) -> None:
    cost = {"kind": "resumed", "lost": 0, "seconds": 1.0, "detected": 0.1}
    resumed = [
        {"time": BEGAN + 3, "step": 20, **cost},
        {"time": BEGAN + 5, "step": 40, "healed": 0.2, **cost},
    ]
    comparison = compared(folder, rows_of(60), extra=resumed, samples_per_step=10)
    marks = {over: compared_chart(comparison, "loss", over).marks[:2] for over in comparison.axes}
    assert [(mark.at, mark.is_heal) for mark in marks[XAxis.STEP]] == [(20.0, False), (40.0, True)]
    assert [mark.at for mark in marks[XAxis.SAMPLES]] == [210.0, 410.0]
    assert [mark.at for mark in marks[XAxis.TIME]] == pytest.approx([2.0, 4.0])
    assert {mark.color for mark in marks[XAxis.STEP]} == {0}
    for words in ("orange is a restart", "green a heal"):
        assert words in Page(page_of(comparison)).text


def test_nonfinite_values_are_marked_and_attributed_to_their_run(folder: Path) -> None:
    rows = [row(step, math.nan if step > 5 else 1.0) for step in range(10)]
    comparison = compared(folder, rows_of(20), rows)
    page = Page(page_of(comparison))
    assert "4 values not finite (B)" in page.text
    assert "B nan" in page.text
    assert "#dd4444" in drawn(compared_chart(comparison, "loss", XAxis.STEP)).inline("x")


def test_a_steep_comparison_has_a_log_scale_unless_linear_is_requested(folder: Path) -> None:
    comparison = compared(folder, [row(step, 10.0 ** (-step / 5)) for step in range(30)])
    for scale, is_log in ((AxisScale.AUTO, True), (AxisScale.LOG, True), (AxisScale.LINEAR, False)):
        assert ("log scale" in page_of(comparison, scale=scale)) == is_log


NUMBERS = st.floats() | st.sampled_from([0.0, 1.0, 1e308, -1e308])
MANY = st.lists(
    st.fixed_dictionaries(
        {"rank": st.integers(0, 3), "step": st.integers(-5, 50), "loss": NUMBERS},
        optional={"accuracy": NUMBERS},
    ),
    max_size=40,
)


@given(first=MANY, second=MANY)
def test_any_values_can_be_compared(first: Rows, second: Rows, tmp_path_factory: Any) -> None:
    timed = [
        [{"time": BEGAN + at, "attempt": 1, **each} for at, each in enumerate(rows)]
        for rows in (first, second)
    ]
    comparison = compared(tmp_path_factory.mktemp("any"), *timed, samples_per_step=8)
    Page(page_of(comparison))
    assert text_of(comparison)


# ---- on the page, as text, and in files


def test_a_comparison_as_text_and_without_metrics_as_html(folder: Path, snapshot: Any) -> None:
    two(folder)
    assert ddp("compare digits1 digits2") == snapshot(name="text")
    for name in ("a", "b"):
        cells = [(f"train({name!r})", f"rank 1: <{name}>")]
        make_run(folder, name, rows=[], config={"<lr>": f"<{name}>"}, cells=cells)
    for name in ("c", "d"):
        make_run(folder, name, rows=[], config={"path": f"/begin{'/long' * 90}/{name}"})
    text = ddp("compare c d")
    assert re.search(r"path +/begin\S+…\S+long/c +/begin\S+…\S+long/d", text)
    assert max(map(len, text.splitlines())) < 160
    html = page_of(compare([folder / ".nbddp" / "runs" / name for name in ("a", "b")]))
    assert readable(html) == snapshot(name="page without charts")


def test_the_page_of_a_comparison_has_charts_keys_and_a_smooth_switch(folder: Path) -> None:
    comparison = compare(two(folder, samples_per_step=64))
    picture = comparison_report(comparison).picture
    assert picture is not None
    assert picture.draw()[1] == 740  # where no page shows the charts
    page = Page(page_of(comparison))
    switches = [each for tag, each in page.tags if tag == "input"]
    assert [each["aria-label"] for each in switches] == ["smooth"]
    assert "checked" not in switches[0]
    assert 'checked="checked"' in page_of(comparison, is_smooth=True)
    assert len([1 for tag, _ in page.tags if tag == "svg"]) == 2
    assert len([1 for tag, _ in page.tags if tag == "img"]) == 2
    assert {"A", "B"} <= {each.removeprefix("━ ")[:1] for each in page.by_tag["span"]}


def test_the_code_of_a_run_without_cells_is_not_compared(folder: Path, snapshot: Any) -> None:
    complete, unknown = make_run(folder, "a"), make_run(folder, "b", cells=())
    last = make_run(folder, "c")
    orders = (
        [complete, unknown],
        [unknown, complete],
        [complete, unknown, last],
        [unknown, complete, last],
    )
    texts = [text_of(compare(order)) for order in orders]
    assert [text.splitlines()[-2:] for text in texts] == snapshot
    assert not any("code from" in text or SAME_CODE in text for text in texts)


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_compare_saves_its_charts_in_the_format_of_the_file_name(kind: str, folder: Path) -> None:
    two(folder)
    reply = ddp(f"compare digits1 digits2 --over time --smooth --save figure.{kind}")
    assert reply == f"nbddp: 2 charts in figure.{kind}"
    begins = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    assert (folder / f"figure.{kind}").read_bytes().startswith(begins[kind])


def test_refused_arguments_get_an_error_with_the_reason(folder: Path, snapshot: Any) -> None:
    two(folder)
    for name in ("a", "b"):
        make_run(folder, name, rows=[])
    lines = ["digits1", "digits1 digits1", "digits1 .nbddp/runs/20270111-080000-digits1"]
    lines += ["digits1 digits2 --metrics lose", "digits1 digits2 --over samples"]
    lines += ["digits1 digits2 --save figure.docx", "digits1 digits2 --save no/figure.png"]
    lines += ["a b --save figure.png"]
    assert {line: refused(f"compare {line}") for line in lines} == snapshot


def test_a_metric_reported_once_is_in_the_table_and_has_no_chart(folder: Path) -> None:
    rows = rows_of(20)
    rows.append({key: rows[-1][key] for key in ("time", "rank", "attempt", "step")} | {"f1": 0.2})
    comparison = compared(folder, rows)
    assert "f1" in comparison.metrics
    assert comparison.drawn == ("loss", "accuracy")
    html = page_of(comparison)
    assert html.count('class="nbddp-chart"') == 2
    assert "<td>0.2</td>" in html
    only = compare([run.path for run in comparison.runs], "f1")
    assert only.drawn == ("f1",)  # the requested metrics are drawn
    assert page_of(only).count('class="nbddp-chart"') == 1


def test_lines_of_a_sweep_have_its_values_as_labels() -> None:
    def labels(*settings: dict[str, Any], keys: str = "aaa") -> list[str]:
        sweeps = zip(settings, keys, strict=False)
        facts = [{"sweep": {"key": key, "settings": each}} for each, key in sweeps]
        runs: Any = tuple(SimpleNamespace(facts=each) for each in facts)
        return Comparison(runs, metrics=()).labels

    assert labels({"lr": 0.1, "seed": 1}, {"lr": 0.01, "seed": 1}) == ["lr=0.1", "lr=0.01"]
    assert labels({"lr": 0.1}, {"lr": 0.01}, keys="ab") == ["A", "B"], "of two sweeps"
    assert labels({"lr": 0.1}, {"lr": 0.1}) == ["A", "B"], "the same values again"
    assert labels({"name": "x" * 40}, {"name": "y"}) == ["A", "B"], "too long"
