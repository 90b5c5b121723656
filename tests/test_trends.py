"""The small curves of a rank: what they are of, their scale, and how they are drawn."""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import replace
from typing import Any

from pages import Page, column

from nbddp.record.devices import DeviceUse
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.panel.style import SHEET
from nbddp.ui.panel.trends import PERIOD, POINTS, Trends, Whole
from nbddp.ui.report.rank_table import ranks_html

ONE = RankSnapshot(rank=0, state="running", step=50, steps_per_second=10.0, memory=300 << 20)


def points(drawn: str) -> list[str]:
    return drawn.partition('d="M')[2].partition('"')[0].split()


def noted(*moments: RankSnapshot) -> Trends:
    """What was noted of a rank at one moment after the other."""
    trends = Trends()
    for at, rank in enumerate(moments):
        trends.note([rank], at * PERIOD)
    return trends


def test_a_curve_says_what_it_is_of_with_its_scale(snapshot: Any) -> None:
    idle = replace(ONE, step=None, cpu=50.0)
    with_gpu = replace(ONE, step=None, gpu="T4", gpu_use=DeviceUse(load=70), gpu_memory=2 << 30)
    said = {}
    for name, rank in (("steps", ONE), ("no steps", idle), ("GPU", with_gpu)):
        curves = noted(rank, rank).columns()
        drawn = {title: draw(rank) for title, draw in curves.items()}
        said[name] = {
            title: re.findall('role="img" aria-label="([^"]*)"', drawn[title]) for title in drawn
        }
        titles = [*re.findall('<span title="([^"]*)"', "".join(drawn.values()))]
        assert titles == [each for found in said[name].values() for each in found]
        assert "<path" not in curves["GPU"](replace(ONE, rank=1))
    assert said == snapshot


def test_a_curve_has_a_point_each_second() -> None:
    trends = Trends()
    for at in range(100):
        trends.note([replace(ONE, steps_per_second=float(at))], at * PERIOD / 2)
    drawn = trends.columns()["step"](ONE)
    assert "now 98, axis 0 to 98, over 39.0 s" in drawn
    assert len(points(drawn)) == POINTS
    assert points(drawn)[-1] == "32.0,1.0"


def test_the_curve_of_the_memory_is_of_the_whole_cell_and_keeps_what_stood_out() -> None:
    used = [900 if at == 123 else 300 for at in range(1000)]
    trends = noted(*(replace(ONE, memory=each << 20) for each in used))
    drawn = trends.columns()["memory"](ONE)
    assert "now 300 MiB, axis 0 to 900 MiB, over 16:39" in drawn
    shown = points(drawn)
    assert POINTS // 2 <= len(shown) <= POINTS + 1
    assert sum(each.endswith(",1.0") for each in shown) == 1, "the highest is at the top"
    assert shown[-1].endswith(",9.0"), "a third of it at a third of the height"


def test_values_of_a_run_of_any_length_fit_and_end_in_the_newest() -> None:
    for count in (1, 2, 39, 40, 41, 80, 1000, 4321):
        whole = Whole()
        for value in range(count):
            whole.add(value)
        assert len(whole.points) <= POINTS
        assert whole.points[-1] == max(whole.points) == count - 1
        assert whole.points == sorted(whole.points)
        assert whole.seconds == (count - 1) * PERIOD


def test_a_rank_that_has_ended_gets_no_more_points() -> None:
    trends = noted(*(replace(ONE, is_alive=at < 2) for at in range(4)))
    assert len(points(trends.columns()["memory"](ONE))) == 2


def test_in_a_record_the_curves_are_there_as_images_too_for_a_page_that_takes_svg_away() -> None:
    curves = noted(ONE, ONE, ONE).columns(is_kept=True)
    page = Page(ranks_html([ONE], is_open=True, curves=curves))
    images = [known for tag, known in page.tags if tag == "img"]
    assert [each["alt"] for each in images] == [
        known["aria-label"] for tag, known in page.tags if tag == "svg"
    ]
    assert len(images) == 2
    for each in images:
        drawn = b64decode(each["src"].partition(",")[2]).decode()
        assert re.fullmatch(r"<svg xmlns=.*><path d=.* stroke=\"#.*></path></svg>", drawn)
    assert [text.strip() for text in column(page, "memory")] == ["300 MiB"]
    assert page.sheet == ""
    assert ".nbddp-ranks img {" in SHEET


def test_a_rank_without_a_curve_has_its_room_so_that_all_numbers_are_in_line() -> None:
    trends, early = Trends(), replace(ONE, rank=1, is_alive=False)
    assert set(trends.columns()) == {"step", "CPU", "memory", "GPU"}
    for at in range(2):
        assert trends.columns()["step"](ONE) == "", "where nobody has one there is no room"
        trends.note([ONE, early], at * PERIOD)
    for is_kept in (False, True):
        for title, draw in trends.columns(is_kept=is_kept).items():
            shapes = [
                re.findall(r'<(svg|img)[^>]*( width="\d+" height="\d+")', draw(each))
                for each in (ONE, early)
            ]
            assert shapes[0] == shapes[1]
            assert bool(shapes[0]) is (title in ("step", "memory"))
            assert "<path" not in draw(early)
    page = Page(ranks_html([ONE, early], is_open=True, curves=trends.columns(is_kept=True)))
    assert [text.strip() for text in column(page, "memory")] == ["300 MiB", "300 MiB"]
    blank = [known for tag, known in page.tags if tag == "img"][-1]
    assert blank["alt"] == ""
    assert "<path" not in b64decode(blank["src"].partition(",")[2]).decode()
