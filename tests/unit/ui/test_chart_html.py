"""A chart as part of a page: tooltips, keys, and the version for a bare page."""

import base64
import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from losses import counting, losses
from pages import Page

from nbddp.charts.chart_lines import rank_chart
from nbddp.charts.svg import WIDTH, Frame
from nbddp.record.metrics import MAX_NAMES, Curve, MetricStore
from nbddp.ui import chart_html
from nbddp.ui.chart_html import Tooltip
from nbddp.ui.html_pieces import MAX_CHARTS


def rising(rank: int, step: int) -> float:
    return step + 0.25 * rank


def tooltips(curves: dict[int, Curve]) -> list[Tooltip]:
    chart = rank_chart("loss", curves)
    return [*chart_html.tooltips_of(chart, Frame(chart))]


def live(curves: Mapping[int, Curve]) -> str:
    return chart_html.render(rank_chart("loss", curves), is_live=True)


def static(curves: Mapping[int, Curve], name: str = "loss") -> str:
    return chart_html.render(rank_chart(name, curves))


def told(curves: dict[int, Curve]) -> list[str]:
    return [tip.text for tip in tooltips(curves)]


def test_tooltips_show_the_values_at_the_pointer(snapshot: Any) -> None:
    def broken(rank: int, _step: int) -> float:
        return math.nan if rank else 1.0

    told_of = {
        "nothing": {},
        "one rank": losses(rising, steps=1),
        "every step": losses(rising, ranks=2, steps=2),
        "many ranks": losses(rising, ranks=12, steps=1),
        "not finite": losses(broken, ranks=2, steps=1),
        "many not finite": losses(broken, ranks=12, steps=1),
    }
    assert {name: told(curves) for name, curves in told_of.items()} == snapshot


def test_tooltips_are_thinned_cover_the_chart_and_omit_ranks_without_values() -> None:
    curves = losses(rising, ranks=2, steps=5000)
    columns = tooltips(curves)
    assert chart_html.MAX_TOOLTIPS - 2 <= len(columns) <= chart_html.MAX_TOOLTIPS
    assert columns[0].x == Frame(rank_chart("loss", curves)).left
    for one, other in pairwise(columns):
        assert one.x + one.width == pytest.approx(other.x)
    assert columns[-1].x + columns[-1].width == pytest.approx(WIDTH - 8)
    curves = losses(rising, ranks=2)
    curves[1] = losses(rising, ranks=2, steps=40)[1]
    assert "rank 1" in told(curves)[0]
    assert "rank 1" not in told(curves)[-1]


def test_the_legend_names_two_of_many_ranks_and_counts_values_that_are_not_finite() -> None:
    many = Page(live(losses(rising, ranks=64)))
    assert many.text.endswith("━ mean of 64 ranks ▒ all ━ 0 ━ 63 ")
    curves = losses(lambda _rank, step: math.nan if step == 3 else 10.0 ** (-step / 20), ranks=2)
    page = Page(live(curves))
    assert "log scale" in page.text
    assert "2 values not finite" in page.text


def bare(html: str) -> str:
    """The HTML that a page keeps if it removes styles and SVG, and shows hidden text."""
    html = re.sub(r"<(style|svg).*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r' (data-t|aria-label)="[^"]*"', "", html)


def test_a_chart_without_css_shows_its_name_its_keys_and_an_image_only() -> None:
    page = Page(bare(chart_html.charts_html([static(losses(counting, ranks=2))])))
    assert page.text.split() == ["loss", "100━", "mean", "of", "2", "ranks", "━", "0", "━", "1"]
    [image] = [known for tag, known in page.tags if tag == "img"]
    assert (image["alt"], image["width"], image["height"]) == ("loss", "360", "190")
    assert image["title"] == "loss: 100 at step 99, mean of 2 ranks"
    assert all("hidden" in known for tag, known in page.tags if tag == "input")
    [source] = Page(static(losses(rising), "<b> & '")).values("src")
    picture = base64.b64decode(source.partition(",")[2]).decode()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert re.findall(r">([\d.]+|step)</text>", picture)[-3:] == ["60", "80", "step"]


def test_a_chart_appears_once_and_is_smaller_than_seventy_kilobytes() -> None:
    noisy = losses(lambda rank, step: (step * 7919 + rank) % 1000 + 1.0, ranks=4, steps=3000)
    assert static(noisy).count("<svg") == 1
    assert len(live(noisy)) < 40_000
    assert len(static(noisy)) < 70_000


def test_a_metric_reported_once_is_a_number_without_a_chart() -> None:
    drawn = static(losses(lambda r, _s: 0.5 + r, ranks=2, steps=1))
    assert "1 (0.5 to 1.5)" in Page(drawn).text
    assert "svg" not in drawn
    assert "<input" not in chart_html.charts_html([drawn])
    assert "<input" in chart_html.charts_html([drawn, static(losses(counting))])


def names_in(html: str) -> list[str]:
    return re.findall('class="nbddp-name" title="([^"]*)"', html)


# of the last, not even all values are kept
@pytest.mark.parametrize("count", [0, 1, MAX_CHARTS, MAX_CHARTS + 3, MAX_NAMES + 5])
def test_metrics_without_a_chart_are_named_below_the_charts(count: int, snapshot: Any) -> None:
    metrics = MetricStore()
    metrics.add(0, 0.0, 0, {f"m{number}": 1.0 for number in range(count)})
    shown = metrics.snapshot(most=MAX_CHARTS)
    html, lines = chart_html.metrics_html(shown), chart_html.metrics_text(shown)
    assert names_in(html) == metrics.names()[:MAX_CHARTS]
    text = "\n".join(lines[len(names_in(html)) :])
    assert text == snapshot
    assert Page(html).text.endswith(text)


def test_a_chart_that_cannot_be_drawn_is_named_and_the_others_are_drawn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, snapshot: Any
) -> None:
    charts = {"good": rank_chart}
    monkeypatch.setattr(chart_html, "rank_chart", lambda name, *how: charts[name](name, *how))
    metrics = MetricStore()
    metrics.add(0, 0.0, 0, {"bad": 1.0, "good": 2.0})
    html = chart_html.metrics_html(metrics.snapshot(most=MAX_CHARTS))
    assert names_in(html) == ["good"]
    assert Page(html).text.removeprefix("good 2") == snapshot
    assert [record.levelname for record in caplog.records] == ["ERROR"]
