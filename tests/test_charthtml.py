"""A chart as a part of a page: values where one points, keys, scales; what a bare page keeps."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from pages import Page

from nbddp.charts.palette import rank_color
from nbddp.record.metrics import Curve, MetricStore
from nbddp.ui.charts.drawing import Chart
from nbddp.ui.charts.frame import WIDTH, Scale
from nbddp.ui.charts.tips import MAX_TIPS, tips
from nbddp.ui.panel.charthtml import charts_html, kept_chart, live_chart


def curves_of(
    value: Callable[[int, int], float], *, ranks: int = 2, steps: int = 100
) -> dict[int, Curve]:
    metrics = MetricStore()
    for step in range(steps):
        for rank in range(ranks):
            metrics.add(rank, 0.0, step, {"loss": value(rank, step)})
    return metrics.curves("loss")


def rising(rank: int, step: int) -> float:
    return step + 0.25 * rank


def told(curves: dict[int, Curve]) -> list[str]:
    return [tip.text for tip in tips(Chart.of("loss", curves))]


# ---- where one points


def test_values_are_told_where_one_points(snapshot: Any) -> None:
    def broken(rank: int, _step: int) -> float:
        return math.nan if rank else 1.0

    told_of = {
        "nothing": {},
        "one rank": curves_of(rising, ranks=1, steps=1),
        "every step": curves_of(rising, steps=2),
        "many ranks": curves_of(rising, ranks=12, steps=1),
        "not finite": curves_of(broken, steps=1),
        "many not finite": curves_of(broken, ranks=12, steps=1),
    }
    assert {name: told(curves) for name, curves in told_of.items()} == snapshot


def test_of_many_steps_some_tell_and_together_they_cover_the_chart() -> None:
    chart = Chart.of("loss", curves_of(rising, steps=5000))
    columns = tips(chart)
    assert MAX_TIPS - 2 <= len(columns) <= MAX_TIPS
    assert columns[0].left == chart.frame.left
    for one, other in pairwise(columns):
        assert one.left + one.width == pytest.approx(other.left)
    assert columns[-1].left + columns[-1].width == pytest.approx(WIDTH - 8)


def test_a_rank_that_was_lost_is_not_told_of_and_steps_that_fall_back_count_on() -> None:
    curves = curves_of(rising)
    curves[1] = curves_of(rising, steps=40)[1]
    assert "rank 1" in told(curves)[0]
    assert "rank 1" not in told(curves)[-1]
    metrics = MetricStore()
    for step in (0, 1, 0):
        metrics.add(0, 0.0, step, {"loss": 1.0})
    assert told(metrics.curves("loss"))[-1].startswith("step 2\n")


# ---- keys


def test_the_strong_line_is_named_and_every_rank_has_a_key_in_its_colour() -> None:
    page = Page(live_chart("loss", curves_of(rising, ranks=3)).html)
    assert "mean of 3 ranks" in page.text
    keys = [known for _, known in page.tags if "nbddp-key" in known.get("class", "")]
    assert [known["title"] for known in keys] == ["rank 0", "rank 1", "rank 2"]
    assert all(rank_color(rank) in known["style"] for rank, known in enumerate(keys))
    alone = Page(live_chart("loss", {3: curves_of(rising)[0]}).html)
    assert "rank 3" in alone.text
    assert "mean" not in alone.text


def test_the_keys_of_many_ranks_unfold_and_one_band_goes_around_them() -> None:
    page = Page(live_chart("loss", curves_of(rising, ranks=16)).html)
    assert "band" in page.by_tag["details"][0]
    kinds = [known.get("class", "") for _, known in page.tags]
    assert sum(kind.startswith("nbddp-rank") for kind in kinds) == 16


def test_a_step_that_counts_on_from_the_largest_that_there_is_has_a_mean() -> None:
    metrics = MetricStore()
    for rank, step in ((0, 0), (1, 2**53), (1, -1)):
        metrics.add(rank, 0.0, step, {"loss": 1.0})
    chart = Chart.of("loss", metrics.curves("loss"))
    assert chart.strong is not None
    assert chart.strong.values.tolist() == [1.0]


def test_what_is_not_in_the_picture_is_said_beside_the_name() -> None:
    curves = curves_of(lambda _rank, step: math.nan if step == 3 else 10.0 ** (-step / 20))
    page = Page(live_chart("loss", curves).html)
    assert "log scale" in page.text
    assert "2 values not finite" in page.text


# ---- scales


def counting(_rank: int, step: int) -> float:
    return step + 1.0


def falling(_rank: int, step: int) -> float:
    return float(-step)


def test_a_scale_is_as_it_was_asked_for_where_that_is_possible() -> None:
    def steep(_rank: int, step: int) -> float:
        return 10.0 ** (-step / 20)

    for value, scale, is_log in (
        (counting, Scale.AUTO, False),
        (counting, Scale.LOG, True),
        (falling, Scale.LOG, False),
        (steep, Scale.AUTO, True),
        (steep, Scale.LINEAR, False),
    ):
        assert Chart.of("loss", curves_of(value), scale).frame.is_log == is_log


def test_a_kept_chart_has_its_other_scale_if_it_may_have_one() -> None:
    html = kept_chart("loss", curves_of(counting)).html
    assert html.count("<svg") == 2
    assert html.count('data-t="log scale"') == 1
    assert kept_chart("loss", curves_of(falling)).html.count("<svg") == 1


def test_a_smooth_line_lies_between_the_values_before_it_and_keeps_gaps() -> None:
    line = Chart.of("loss", curves_of(lambda _r, s: math.nan if s == 50 else s % 2, ranks=1)).strong
    assert line is not None
    smooth = line.smoothed(99.0)
    assert smooth[0] == 0.0
    assert math.isnan(smooth[50])
    assert all(0.2 < value < 0.8 for value in smooth[60:])


# ---- a page without styles and SVG


def bare(html: str) -> str:
    """What a page leaves that takes styles and SVG away, with what is hidden."""
    html = re.sub(r"<(style|svg).*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r' (data-t|aria-label)="[^"]*"', "", html)


def test_a_bare_page_has_the_name_the_keys_and_an_image_and_no_stray_letters() -> None:
    page = Page(bare(charts_html([kept_chart("loss", curves_of(counting))])))
    assert page.text.split() == ["loss", "100━", "mean", "of", "2", "ranks", "━", "0", "━", "1"]
    [image] = [known for tag, known in page.tags if tag == "img"]
    assert (image["alt"], image["width"], image["height"]) == ("loss", "360", "190")
    assert image["title"] == "loss: 100 at step 99, mean of 2 ranks"
    assert all("hidden" in known for tag, known in page.tags if tag == "input")
    [source] = Page(kept_chart("<b> & '", curves_of(rising)).html).values("src")
    picture = base64.b64decode(source.partition(",")[2]).decode()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert re.findall(r">([\d.]+|step)</text>", picture)[-3:] == ["60", "80", "step"]


def test_a_chart_weighs_less_than_a_hundred_kilobytes() -> None:
    noisy = curves_of(lambda rank, step: (step * 7919 + rank) % 1000 + 1.0, ranks=4, steps=3000)
    assert len(live_chart("loss", noisy).html) < 40_000
    assert len(kept_chart("loss", noisy).html) < 110_000


def test_what_was_reported_once_is_a_number_and_no_chart() -> None:
    drawn = kept_chart("accuracy", curves_of(lambda rank, _step: 0.5 + rank, steps=1))
    assert drawn.is_value
    assert "1 (0.5 to 1.5)" in Page(drawn.html).text
    assert "svg" not in drawn.html
    html = charts_html([drawn])
    assert "nbddp-rescale" not in html.partition("</style><div")[2]
    assert not kept_chart("loss", curves_of(counting)).is_value
