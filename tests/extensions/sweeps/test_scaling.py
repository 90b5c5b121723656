"""A cell on several world sizes: figures computed from its rounds, their text and their picture."""

import io
from collections.abc import Sequence
from typing import Any

import pytest
from pages import readable
from PIL import Image

from nbddp.charts.figure import png_of
from nbddp.extensions.sweeps.scaling_figure import draw_scaling
from nbddp.extensions.sweeps.scaling_results import (
    Repetition,
    Scaling,
    WorldSizeResult,
    steady_rate,
    time_shares,
)
from nbddp.extensions.sweeps.scaling_view import scaling_report
from nbddp.extensions.timeline.collective_timeline import DdpOverlap, Timeline
from nbddp.record.collectives.collective_history import MatchedCollective
from nbddp.ui.report.render import render_html, render_text
from nbddp.wire.collective import Collective


def size(ranks: int, *paces: float, **facts: Any) -> WorldSizeResult:
    return WorldSizeResult(ranks, tuple(Repetition(rate=pace, **facts) for pace in paces))


def scaling(
    *sizes: WorldSizeResult, cores: int = 8, devices: Sequence[str] = ("cpu",), **more: Any
) -> Scaling:
    return Scaling(sizes=sizes, cores=cores, devices=tuple(devices), **more)


def rows(paces: Sequence[tuple[int, float]], *, every: int = 1, rank: int = 0) -> list[Any]:
    """A row for every so many steps, where so many steps have this pace."""
    found, at, step = [], 100.0, 0
    for count, pace in paces:
        for _ in range(count):
            if step % every == 0:
                found.append({"time": at, "rank": rank, "attempt": 1, "step": step, "loss": 1.0})
            step, at = step + 1, at + 1 / pace
    return found


def test_the_step_rate_is_that_of_the_longest_loop_without_its_first_steps() -> None:
    twice = rows([(20, 10.0)])
    later = [{**row, "time": row["time"] + 2.0} for row in twice]
    for name, found, pace in (
        ("the first steps do not count", rows([(10, 1.0), (90, 20.0)]), 20.0),
        ("not each step is reported", rows([(100, 20.0)], every=5), 20.0),
        ("numbers fall back", [*twice, *later], 10.0),
        ("nothing", [], None),
        ("two steps", rows([(2, 10.0)]), None),
        ("one step, often", rows([(1, 1.0)]) * 9, None),
    ):
        rate = steady_rate(found, 0.0)
        assert (rate and rate[0]) == (pace and pytest.approx(pace)), name
    assert steady_rate(rows([(10, 1.0), (90, 20.0)]), 0.0) == (pytest.approx(20.0), 79)
    of_cell = [*rows([(50, 10.0)]), *rows([(50, 20.0)], rank=1)]
    epochs = [{"time": 100.0 + each, "rank": 0, "accuracy": 0.5} for each in range(5)]
    before = [{"time": each / 1000, "rank": 0, "loss": 1.0} for each in range(500)]
    rate = steady_rate([*before, *of_cell, *epochs], 100.0)
    assert rate is not None
    assert rate[0] == pytest.approx(15.0)


def line(*meetings: MatchedCollective, **facts: Any) -> Timeline:
    return Timeline(cell=1, ranks=(0, 1), span=(10.0, 20.0), meetings=meetings, **facts)


def met(at: float, waited: float) -> MatchedCollective:
    return MatchedCollective(
        call=Collective("all_reduce", 1),
        arrivals={0: at - waited, 1: at},
        wait_seconds={0: waited},
        last_rank=1,
        places={},
    )


def test_waits_and_communication_are_shares_of_the_time_of_all_ranks() -> None:
    found = time_shares(
        line(met(15.0, 1.0), met(16.0, 2.0), loads={0: [(10.0, 12.0), (17.0, 18.0)]}), 10.0
    )
    # from 14, when rank 0 arrived at the first kept collective, to 20: six seconds of two ranks
    assert found == {"waiting": pytest.approx(3 / 12), "loading": pytest.approx(1 / 12)}
    assert time_shares(line(), 10.0) == {}
    facts = {"iteration": 1, "forward": 0.0, "backward": 0.0}
    overlaps = tuple(
        DdpOverlap(rank=rank, name=name, communication=0.02, overlapped=0.005, **facts)
        for rank in (0, 1)
        for name in ("one", "other")
    )
    found = time_shares(line(met(15.0, 1.0), overlaps=overlaps), 10.0)
    assert found["communication"] == pytest.approx(0.4)
    assert found["exposed"] == pytest.approx(0.3)
    slower = time_shares(line(met(15.0, 1.0), overlaps=overlaps), 40.0)
    assert (slower["communication"], slower["exposed"]) == (1.0, 1.0), "no more than the whole step"


def test_speed_up_and_efficiency_of_strong_and_weak_scaling() -> None:
    steps, samples = (
        (size(1, 10.0), size(4, 8.0)),
        (size(2, 10.0, batch=64), size(4, 8.0, batch=128)),
    )
    for sizes, is_weak, speed_up, efficiency in (
        (steps, False, 0.8, 0.2),
        (steps, True, 3.2, 0.8),
        (samples, False, 1.6, 0.8),  # samples a second are what counts where they are known
        (samples, True, 1.6, 0.8),
    ):
        found = scaling(*sizes, is_weak=is_weak)
        assert found.speed_up(sizes[1]) == pytest.approx(speed_up)
        assert found.efficiency(sizes[1]) == pytest.approx(efficiency)


FULL = {"batch": 64, "waiting": 0.25, "loading": 0.1, "communication": 0.5, "exposed": 0.25}


def test_scaling_reports_as_text_and_as_an_html_table(snapshot: Any) -> None:
    whole = scaling(
        size(1, 10.0, 10.0, 10.0, memory=300 << 20, **FULL),
        size(2, 15.0, 15.3, 15.2, memory=300 << 20, gpu_memory=2 << 30, **FULL),
    )
    grown = size(1, 10.0, batch=64), size(2, 9.0, batch=128)
    timed = size(1, 0.5, counts_steps=False), size(2, 1.0, 1.3, counts_steps=False)
    nccl = size(1, 9.0, 9.1, 9.1, loading=0.1), size(2, 9.0, loading=0.1)
    reports = {
        "whole": scaling_report(whole),
        "more ranks than cores": scaling_report(scaling(*grown, cores=1)),
        "weak": scaling_report(scaling(*grown, is_weak=True)),
        "time, noisy": scaling_report(scaling(*timed)),
        "one GPU": scaling_report(scaling(*nccl, devices=["cuda:0"] * 2)),
        "nothing": scaling_report(scaling()),
    }
    assert {name: render_text(each) for name, each in reports.items()} == snapshot(name="text")
    assert readable(render_html(reports["whole"])) == snapshot(name="page")
    pictures = [each.picture.draw() for each in reports.values() if each.picture is not None]
    assert [width for _, width in pictures] == [720] * 5


@pytest.mark.parametrize("back", ["white", "#111111"])
def test_the_scaling_picture_is_readable_on_light_and_dark_pages(back: str) -> None:
    png, _ = png_of(draw_scaling(scaling(size(1, 10.0, **FULL), size(2, 15.0, **FULL))))
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    assert picture.getchannel("A").getpixel((0, 0)) == 0  # the page shows through
    ground = Image.new("RGBA", picture.size, back)
    ground.alpha_composite(picture)
    grey = ground.convert("L").getcolors(1 << 16)
    assert grey is not None
    page = max(grey)[1]
    assert sum(count for count, level in grey if abs(level - page) > 80) > 2000
