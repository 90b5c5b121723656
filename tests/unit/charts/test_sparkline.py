"""Small curves next to numbers: how they are drawn, and what those of ranks are of."""

import math
import re
from base64 import b64decode
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nbddp.charts.sparkline import MAX_BLOCKS, block_characters, sparkline
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.html_pieces import STYLE_SHEET
from nbddp.ui.report.rank_table import MAX_POINTS, SAMPLE_PERIOD, RankSparklines

ONE = RankSnapshot(rank=0, state="running", step=50, steps_per_second=10.0, memory=300 << 20)


def points(drawn: str) -> list[str]:
    path = drawn.partition('<path d="M')[2].partition('"')[0]
    return re.split("[ML]", path)


def noted(*moments: RankSnapshot) -> RankSparklines:
    """The recorded samples of a rank, oldest first."""
    sparklines = RankSparklines()
    for at, rank in enumerate(moments):
        sparklines.add_points([rank], at * SAMPLE_PERIOD)
    return sparklines


def test_a_sparkline_spans_its_values_and_marks_those_that_are_not_finite() -> None:
    assert points(sparkline([1.0, 3.0], "x")) == ["2.0,14.0", "94.0,2.0"]
    assert points(sparkline([1.0, 3.0], "x", low=0.0)) == ["2.0,10.0", "94.0,2.0"]
    assert sparkline([1.0], "x") == sparkline([math.nan] * 3, "x") == ""
    drawn = sparkline([1.0, 2.0, math.nan, 2.0, 1.0], "x", is_static=False)
    assert drawn.partition('<path d="')[2].partition('"')[0].count("M") == 2
    assert drawn.count("#dd4444") == 1
    assert "#dd4444" not in sparkline([1.0, 2.0], "x")


def test_a_sparkline_is_also_an_image_for_pages_that_remove_svg() -> None:
    html = noted(ONE, ONE).draw(ONE, "step", is_static=True)
    [image] = re.findall(r'<img .* src="[^,]*,([^"]*)"', html)
    drawn = b64decode(image).decode()
    assert re.fullmatch(r"<svg xmlns=.*><path d=.* stroke=\"#.*></path></svg>", drawn)
    assert ".nbddp-ranks img {" in STYLE_SHEET, "other pages hide it"


@given(st.lists(st.floats(), max_size=60))
def test_any_numbers_make_a_valid_sparkline(values: list[float]) -> None:
    assert "nan" not in sparkline(values, "x")
    assert len(block_characters(values)) == min(len(values), MAX_BLOCKS)


def test_the_title_of_a_sparkline_names_its_quantity_and_its_scale(snapshot: Any) -> None:
    drawn = {title: noted(ONE, ONE).draw(ONE, title) for title in ("step", "memory")}
    labels = {
        title: re.findall('role="img" aria-label="([^"]*)"', html) for title, html in drawn.items()
    }
    assert labels == snapshot
    assert not any(noted(ONE, ONE).draw(replace(ONE, rank=1), title) for title in drawn)


def test_a_ranks_sparkline_has_one_point_per_second_of_the_last_minute_until_it_ends() -> None:
    sparklines = RankSparklines()
    for at in range(300):
        sparklines.add_points([replace(ONE, steps_per_second=float(at))], at * SAMPLE_PERIOD / 2)
    drawn = sparklines.draw(ONE, "step")
    assert "now 298, axis 0 to 298, last 60 s" in drawn
    assert len(points(drawn)) == MAX_POINTS
    assert points(drawn)[-1] == "30.0,2.0"
    sparklines = noted(*(replace(ONE, is_alive=at < 2) for at in range(4)))
    assert len(points(sparklines.draw(ONE, "memory"))) == 2
