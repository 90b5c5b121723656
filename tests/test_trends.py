"""The small curves of a rank: what they are of, their scale, and how they are drawn."""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import replace

from pages import Page, column

from nbddp.record.devices import DeviceUse
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.panel.ranks import ranks_html
from nbddp.ui.panel.style import SHEET
from nbddp.ui.panel.trends import PERIOD, POINTS, Trends, Whole

ONE = RankSnapshot(rank=0, state="running", step=50, steps_per_second=10.0, memory=300 << 20)


def points(drawn: str) -> list[str]:
    return drawn.partition('d="M')[2].partition('"')[0].split()


def test_a_curve_has_a_point_each_second_and_says_what_it_is_of_with_its_scale() -> None:
    trends = Trends()
    for at in range(100):
        trends.note([replace(ONE, steps_per_second=float(at))], at * PERIOD / 2)
    drawn = trends.columns()["step"](ONE)
    said = "steps per second: now 98, axis 0 to 98, over 39.0 s"
    assert f'role="img" aria-label="{said}"' in drawn
    assert f'<span title="{said}">' in drawn
    assert len(points(drawn)) == POINTS
    assert points(drawn)[-1] == "32.0,1.0"


def test_the_curve_of_the_memory_is_of_the_whole_cell_and_keeps_what_stood_out() -> None:
    trends = Trends()
    for at in range(1000):
        used = 900 << 20 if at == 123 else 300 << 20
        trends.note([replace(ONE, memory=used)], at * PERIOD)
    drawn = trends.columns()["memory"](ONE)
    said = "memory: now 300 MiB, axis 0 to 900 MiB, over 16:39"
    assert f'aria-label="{said}"' in drawn
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


def test_without_steps_the_curve_is_of_the_gpu_or_the_cpu() -> None:
    for rank, title, said in (
        (replace(ONE, step=None, cpu=50.0), "CPU", "CPU in percent: now 50"),
        (replace(ONE, step=None, gpu_use=DeviceUse(load=70)), "GPU", "GPU in percent: now 70"),
    ):
        trends = Trends()
        for at in (0, 2):
            trends.note([rank], at)
        curves = trends.columns()
        assert said in curves[title](rank)
        assert curves["step"](rank) == ""


def test_a_gpus_memory_has_a_curve_in_its_column() -> None:
    trends, rank = Trends(), replace(ONE, gpu="T4", gpu_memory=2 << 30)
    for at in (0, 2):
        trends.note([rank], at)
    assert "GPU memory: now 2.0 GiB, axis 0 to 2.0 GiB" in trends.columns()["GPU"](rank)
    assert "<path" not in trends.columns()["GPU"](replace(ONE, rank=1))


def test_a_rank_that_has_ended_gets_no_more_points() -> None:
    trends = Trends()
    for at in range(4):
        trends.note([replace(ONE, is_alive=at < 2)], at * PERIOD)
    assert len(points(trends.columns()["memory"](ONE))) == 2


def test_in_a_record_the_curves_are_there_as_images_too_for_a_page_that_takes_svg_away() -> None:
    trends = Trends()
    for at in range(3):
        trends.note([ONE], at * PERIOD)
    page = Page(ranks_html([ONE], is_open=True, curves=trends.columns(is_kept=True)))
    images = [known for tag, known in page.tags if tag == "img"]
    said = [
        "steps per second: now 10, axis 0 to 10, over 2.0 s",
        "memory: now 300 MiB, axis 0 to 300 MiB, over 2.0 s",
    ]
    assert [each["alt"] for each in images] == said
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
