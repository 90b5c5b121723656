"""Where a cell's time went: as numbers, as text, as a picture, and in a panel."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from arrivals import BASE, arrival_messages, matcher_of, matcher_with
from matplotlib.colors import to_rgba
from pages import readable
from typed import Typed

from nbddp.charts.figure import png_of
from nbddp.charts.palette import INK
from nbddp.extensions.timeline import notebook as timelines
from nbddp.extensions.timeline.collective_timeline import (
    DdpOverlap,
    Timeline,
    build_timeline,
    find_unfinished,
    overlap_of,
)
from nbddp.extensions.timeline.figure import draw_timeline
from nbddp.extensions.timeline.view import MAX_ROWS, shown_ranks, timeline_as_text, timeline_report
from nbddp.lifecycle.group_state import GroupState
from nbddp.magics.presenter import Presenter
from nbddp.record.collectives.collective_matcher import CollectiveMatcher, Straggler
from nbddp.record.snapshot import Snapshot
from nbddp.ui.report.finished_cell import CellReport, record_html
from nbddp.ui.report.render import render_html, render_text
from nbddp.ui.report.status import status_report
from nbddp.ui.wording import describe_straggler
from nbddp.wire.collective_arrivals import CollectiveArrivals

WAIT_COLOR = [*to_rgba("#b9690f")]
AWAITED = Straggler(2, 0.384, 8.3, 100, "all_reduce float [72]", (9, ""))


def waiting(*, steps: int = 40, ranks: int = 3) -> CollectiveMatcher:
    return matcher_of(lambda rank, _step: 0.15 if rank == 2 else 0.1, steps=steps, ranks=ranks)


def with_steps(found: CollectiveMatcher) -> CollectiveMatcher:
    for step in range(40):
        found.add_step(step % 3, BASE + 0.1501 * (step + 1), step)
    return found


def picture(line: Timeline) -> bytes:
    return png_of(draw_timeline(line, shown_ranks(line)))[0]


def text_of(line: Timeline) -> str:
    return render_text(timeline_report(line))


def line_of(found: CollectiveMatcher, last: int | None = None) -> Timeline:
    return build_timeline(found.history(), found.straggler(), last=last)


def test_the_timeline_covers_the_whole_cell_or_the_requested_last_steps() -> None:
    found = with_steps(waiting())
    whole, last = line_of(found), line_of(found, last=10)
    assert (len(whole.meetings), len(whole.steps)) == (40, 40)
    assert (len(last.meetings), len(last.steps)) == (10, 11)
    assert last.seconds == pytest.approx(10 * 0.1501, abs=0.01)
    assert last.waits[0, 2] == pytest.approx(10 * 0.05, rel=0.01)
    assert whole.waits[0, 2] == pytest.approx(40 * 0.05, rel=0.01)
    without_steps = line_of(waiting(), last=7)
    assert (len(without_steps.meetings), without_steps.steps) == (7, ())
    assert line_of(waiting(steps=3), last=7).meetings


def test_wait_time_is_divided_among_the_lines_in_which_the_straggler_was_sampled() -> None:
    def seen(message: CollectiveArrivals) -> CollectiveArrivals:
        came = message.rows[1] if message.rows else 0
        places, samples = [[4, ""], [9, "a.py"]], [came - 9, 0, came - 5, 0, came - 1, 1]
        return replace(message, cell_lines=places, samples=samples) if came else message

    first, second = (
        arrival_messages([0.2 * step + late for step in range(1, 5)]) for late in (0, 0.1)
    )
    lines = line_of(matcher_with(first, map(seen, second))).lines
    assert list(lines) == ["line 4", "a.py line 9"]
    assert lines["line 4"] == pytest.approx(2 * lines["a.py line 9"])
    assert sum(lines.values()) == pytest.approx(4 * 0.1, rel=1e-3)


def test_waits_are_returned_as_rows_and_a_frame_needs_pandas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = line_of(waiting())
    call = {"group": "", "number": 1, "name": "all_reduce", "shape": "float [72]"}
    times = {"came": pytest.approx(BASE + 0.1), "waited": pytest.approx(0.05, rel=1e-3)}
    assert line.rows()[0] == call | times | {"rank": 0, "awaited": 2}
    assert len(line.rows()) == 3 * 40
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert line.frame() == line.rows()


def ended_apart() -> CollectiveMatcher:
    """Rank 1 comes to some collectives and is then elsewhere; the others wait in the next one."""
    told_of = []
    for rank in range(3):
        at = [0.2 * step + 0.01 * rank for step in range(1, 4 + (rank != 1))]
        *met, end = arrival_messages(at)
        if rank == 1:
            seen = [round(1e6 * (at[-1] + 0.1 * step)) for step in range(1, 7)]
            samples = [each for at in seen for each in (at, 0)]
            met[-1] = replace(met[-1], cell_lines=[[9, ""]], samples=samples)
        told_of.append([*met, replace(end, sent_at=3_000_000)])
    return matcher_with(*told_of)


def test_the_timeline_shows_the_waits_for_a_missing_rank_and_its_death() -> None:
    told = ended_apart().history()
    (last,) = find_unfinished(told, BASE + 3, is_over=True)
    assert (last.call.number, last.missing, set(last.arrivals)) == (4, (1,), {0, 2})
    line = build_timeline(told, unmet=[last], died={1: BASE + 1.5})
    assert line.waits[0, 1] == pytest.approx(2.2)
    assert line.span[1] == pytest.approx(BASE + 3)
    assert list(line.pieces(0))[-1] == ("wait", pytest.approx(BASE + 0.8), pytest.approx(BASE + 3))
    *before, gone = line.pieces(1)
    assert [kind for kind, _, _ in before] == ["wait"] * 3, "it waits for rank 2 before"
    assert gone == ("gone", BASE + 1.5, pytest.approx(BASE + 3))
    assert line.lines["line 9"] == pytest.approx(2.2 + 2.18, abs=0.01)
    assert picture(line) != picture(replace(line, died={}))


def test_a_rank_is_missing_only_after_the_report_delay_and_if_the_collective_blocks() -> None:
    told = ended_apart().history()
    for track in told.tracks.values():
        track.is_over = False
    assert find_unfinished(told, BASE + 3, is_over=False) == []  # it may have arrived
    (last,) = find_unfinished(told, BASE + 9, is_over=False)
    assert last.wait_seconds == {0: pytest.approx(8.2), 2: pytest.approx(8.18)}
    found = of_kind("broadcast", [0.1, 0.2], [0.1])
    assert find_unfinished(found.history(), BASE + 5, is_over=True) == []
    assert find_unfinished(waiting().history(), BASE + 99, is_over=True) == []


def test_ranks_in_different_collectives_are_unfinished_until_the_end_of_the_cell() -> None:
    told_of = []
    for rank, name in enumerate(("all_reduce", "all_reduce", "barrier")):
        before, _ = arrival_messages([0.1, 0.2])
        last, end = arrival_messages([0.5 + 0.1 * rank], first=3, kind=[name, "", "", True, 0])
        told_of.append([before, last, replace(end, sent_at=2_000_000)])
    found = matcher_with(*told_of).history()
    both = find_unfinished(found, BASE + 2, is_over=True)
    assert [(each.call.name, set(each.arrivals), each.missing) for each in both] == [
        ("all_reduce", {0, 1}, (2,)),
        ("barrier", {2}, (0, 1)),
    ]
    assert [each.call.number for each in build_timeline(found, unmet=both).meetings] == [1, 2]


def test_the_timeline_shows_waits_in_the_first_collective() -> None:
    found = matcher_with(arrival_messages([0.2]), [], []).history()
    line = build_timeline(found, unmet=find_unfinished(found, BASE + 5, is_over=True))
    assert not line.is_empty
    assert line.waits == {(0, 1): pytest.approx(0.075), (0, 2): pytest.approx(0.075)}
    assert picture(line)


def of_kind(name: str, *came: list[float], took: Sequence[int] = ()) -> CollectiveMatcher:
    """Ranks in collectives that do not wait for the others, and how long they took on the GPU."""
    told_of = []
    for rank, at in enumerate(came):
        durations = [took[rank], 0, 2 * took[rank], 0] if took else []
        *met, end = arrival_messages(at, kind=[name, "float [1]", "", False, 0])
        told_of.append([*(replace(each, durations=durations) for each in met), end])
    return matcher_with(*told_of)


def test_the_timeline_of_many_ranks_shows_the_slow_ranks() -> None:
    line = line_of(waiting(ranks=64, steps=5))
    assert len(shown_ranks(line)) == len([*timeline_as_text(line)]) - 1 == MAX_ROWS
    assert 2 in shown_ranks(line)
    assert picture(line)
    text = text_of(line)
    assert "\n32 of 64 ranks" in text
    assert max(map(len, text.splitlines())) <= 110, "wider lines are broken"


MEASURED = {
    "iteration": 104,
    "avg_forward_compute_time": 12_000_000,
    "avg_backward_compute_time": 30_000_000,
    "avg_backward_comm_time": 25_000_000,
    "avg_backward_compute_comm_overlap_time": 20_000_000,
    "bucket_sizes": "2101248",
    "rebuilt_bucket_sizes": "1050624, 26214400",
}
MANY_BUCKETS = MEASURED | {"rebuilt_bucket_sizes": ", ".join(["1048576"] * 9)}


def measured(found: dict[str, Any]) -> DdpOverlap:
    overlap = overlap_of(1, "model", found)
    assert overlap is not None
    return overlap


def test_ddp_overlap_is_read_only_from_measurements_since_the_given_time() -> None:
    found = measured(MEASURED)
    assert (found.forward, found.backward) == (0.012, 0.03)
    assert found.exposed == pytest.approx(0.005)
    assert found.buckets == (1_050_624, 26_214_400)
    assert overlap_of(0, "model", {"iteration": 0, "avg_forward_compute_time": 0}) is None
    assert overlap_of(0, "model", MEASURED | {"backward_compute_time_end": 8e9}, since=9.0) is None
    assert overlap_of(0, "model", MEASURED | {"backward_compute_time_end": 9e9}, since=9.0)


def whole() -> Timeline:
    """Part of the timeline of a successful cell, with all optional facts."""
    line = replace(line_of(waiting(), last=4), lost=12, thinned=3, error=0.0012, awaited=AWAITED)
    begin = line.span[0]
    loads, overlaps = {1: [(begin + 0.06, begin + 0.14)]}, (measured(MEASURED),)
    return replace(line, loads=loads, lines={"line 9": 1.0}, overlaps=overlaps)


def test_timelines_as_text(snapshot: Any) -> None:
    apart, empty = ended_apart().history(), Timeline(cell=1, ranks=(0,), span=(0.0, 0.0))
    missed = build_timeline(apart, unmet=find_unfinished(apart, BASE + 3, is_over=True))
    enqueued = {
        took: line_of(of_kind("all_reduce", [0.1, 0.2], [0.1, 0.2], took=took))
        for took in ((), (8000, 1000))
    }
    lines = {
        "whole": whole(),
        "many buckets": replace(line_of(waiting()), overlaps=(measured(MANY_BUCKETS),)),
        "missed": missed,
        "missed so far": replace(missed, is_over=False),
        "died": replace(missed, died={1: BASE + 1.5}),
        "many ranks": line_of(waiting(ranks=12, steps=5)),
        "nothing": empty,
        "nothing so far": replace(empty, is_over=False),
        "no cell": replace(empty, cell=0),
        "NCCL": enqueued[()],
        "NCCL, measured": enqueued[8000, 1000],
    }
    assert {name: text_of(line) for name, line in lines.items()} == snapshot


def test_the_timeline_picture_has_a_row_for_each_rank_with_dark_waits() -> None:
    line = line_of(with_steps(waiting()), last=3)
    ax, *_ = draw_timeline(line, line.ranks).axes
    waits = [each for each in ax.collections if each.get_facecolor().tolist()[:1] == [WAIT_COLOR]]
    seconds = [0.0, 0.0, 0.0]
    for patches in waits:
        for bar in patches.get_paths():
            box = bar.get_extents()
            seconds[round((box.y0 + box.y1) / 2)] += box.width / 1000
    assert seconds[2] == 0, "the last one waits for nobody"
    assert seconds[0] == pytest.approx(line.seconds / 3, rel=0.15), "a third of the time"
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert {tick.get_color() for tick in ax.get_yticklabels()} == {INK}, "no page's rank colours"


def test_the_timeline_page_has_the_picture_and_the_numbers_below(snapshot: Any) -> None:
    assert readable(render_html(timeline_report(whole()))) == snapshot


def test_the_record_and_the_status_show_the_straggler_only_if_there_is_one() -> None:
    snapshot = Snapshot(state=GroupState.RUNNING, straggler=AWAITED)
    equal, text = replace(snapshot, straggler=None), describe_straggler(AWAITED)
    assert text in record_html(CellReport(snapshot=snapshot))
    assert text in render_text(status_report(snapshot))
    assert "38 %" not in record_html(CellReport(snapshot=equal)) + render_text(status_report(equal))


# ---- a picture

STEP_TIMES = (*(0.001 * number for number in range(1, 12)), 0.5, 1.0)


def test_the_steps_of_a_timeline_do_not_overlap_and_a_death_at_the_end_is_whole() -> None:
    died = {1: 1.0}
    steps = tuple((at, 1000.0 + number) for number, at in enumerate(STEP_TIMES))
    timeline = Timeline(cell=1, ranks=(0, 1), span=(0.0, 1.0), steps=steps, died=died)
    figure = draw_timeline(timeline, [0, 1])
    png_of(figure)
    ax = figure.axes[0]
    [top] = ax.child_axes
    labels = [each for each in top.get_xticklabels() if each.get_text()]
    assert [each.get_text() for each in labels] == ["step 1000", "1011", "1012"]
    boxes = [each.get_window_extent() for each in labels]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    [cross] = ax.get_lines()
    assert not cross.get_clip_on()


@pytest.mark.parametrize("has_record", [False, True])
def test_a_timeline_below_a_record_does_not_repeat_its_warning(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, has_record: bool
) -> None:
    timeline = Timeline(cell=1, ranks=(0,), span=(0.0, 1.0), awaited=Mock())
    monkeypatch.setattr(timelines, "timeline_of", lambda *_: timeline)
    monkeypatch.setattr(Presenter, "has_record", has_record)
    monkeypatch.setattr(Presenter, "show", Mock())
    monkeypatch.setattr(timelines, "timeline_report", report := Mock())
    typed.cell("--timeline")
    [shown] = report.call_args.args
    assert (shown.awaited is None) == has_record
