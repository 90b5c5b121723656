"""The charts of a cell: each is drawn when it has changed, a bounded number of them, to the end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
from processes import wait_until
from syrupy.assertion import SnapshotAssertion

from nbddp.record.metrics import MAX_NAMES, Curve, MetricStore
from nbddp.ui.charts.frame import Scale
from nbddp.ui.panel import charts as module
from nbddp.ui.panel.charthtml import Drawn
from nbddp.ui.panel.charts import MAX_CHARTS, Charts

DRAWING = Drawn.__module__  # loaded when there is something to draw
Picture = tuple[str, str]  # a metric's name and its newest values


class Room:
    """Charts of a cell's metrics, which are drawn in no time, or as long as ``is_free`` is not set.

    Attributes:
        drawn: what was drawn, in this order; on which ``scales``, and what of it was ``shown``.
    """

    def __init__(self) -> None:
        self.metrics = MetricStore()
        self.drawn: list[str] = []
        self.scales: list[Scale] = []
        self.shown: list[Picture] = []
        self.is_held, self.is_free = threading.Event(), threading.Event()
        self.is_free.set()
        self.show: Callable[[Drawn], None] = lambda it: self.shown.append((it.name, it.html))
        self.charts = Charts(self.metrics.snapshot, lambda it: self.show(it))

    def draw(self, name: str, curves: Mapping[int, Curve], scale: Scale = Scale.AUTO) -> Drawn:
        self.drawn.append(name)
        self.scales.append(scale)
        self.is_held.set()
        assert self.is_free.wait(30)
        if name == "bad":
            raise OverflowError("too large")
        return Drawn(name, f"{name} {[curve.last for curve in curves.values()]}", tuple(curves))

    def log(self, step: int, **values: float) -> None:
        self.metrics.add(0, float(step), step, values)

    def kept(self) -> list[Picture]:
        return [(each.name, each.html) for each in self.charts.finish()]

    def hold(self) -> None:
        """Begin to draw on a thread, which does not end its first chart."""
        self.is_free.clear()
        self.charts.draw_on_thread()
        assert self.is_held.wait(30)


def is_drawing() -> bool:
    return any(thread.name == "nbddp-charts" for thread in threading.enumerate())


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    room = Room()
    drawing = SimpleNamespace(live_chart=room.draw, kept_chart=room.draw)
    monkeypatch.setitem(sys.modules, DRAWING, drawing)
    monkeypatch.setattr(module, "LOOK_PERIOD", 0.005)
    yield room
    room.is_free.set()
    room.charts.stop()


# ---- at the end


def test_at_the_end_every_metric_has_its_chart_and_what_is_drawn_is_not_drawn_again(
    room: Room,
) -> None:
    room.log(0, loss=0.5, accuracy=0.25)
    first = room.kept()
    assert first == [("loss", "loss [0.5]"), ("accuracy", "accuracy [0.25]")]
    assert room.kept() == first
    assert room.drawn == ["loss", "accuracy"]
    room.log(1, accuracy=0.5)
    assert room.kept() == [("loss", "loss [0.5]"), ("accuracy", "accuracy [0.5]")]
    assert room.drawn == ["loss", "accuracy", "accuracy"]
    assert room.shown == [], "what would show it is about to go"


def test_without_numbers_there_are_no_charts_and_nothing_is_loaded(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, DRAWING, None)  # importing it would fail
    room.charts.draw_on_thread()
    assert (room.kept(), room.drawn) == ([], [])


def test_there_are_never_more_than_so_many_unless_they_are_chosen(room: Room) -> None:
    names = [f"m{number}" for number in range(MAX_CHARTS + 8)]
    room.log(0, **dict.fromkeys(names, 1.0))
    assert [name for name, _ in room.kept()] == room.drawn == names[:MAX_CHARTS]
    assert "8 more" in room.charts.note()
    room.charts.choose(chosen=names[5:])
    assert [name for name, _ in room.kept()] == names[5:]
    assert room.charts.names == [*names[5:], *names[:5]]
    assert "5 more" in room.charts.note()


REPORTS = {  # how many metrics, at which steps
    "none": (0, [0]),
    "one": (1, [0]),
    "as many as fit": (MAX_CHARTS, [0]),
    "more": (MAX_CHARTS + 3, [0]),
    "not even kept": (MAX_NAMES + 5, [0]),
}


@pytest.mark.parametrize(("count", "steps"), REPORTS.values(), ids=REPORTS)
def test_what_the_charts_do_not_show_is_said(
    room: Room, count: int, steps: list[int], snapshot: SnapshotAssertion
) -> None:
    for step in steps:
        room.log(step, **{f"m{number}": 1.0 for number in range(count)})
    room.charts.finish()
    assert room.charts.note() == snapshot


def test_a_chart_that_cannot_be_drawn_is_named_and_the_others_come(
    room: Room, caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion
) -> None:
    room.log(0, bad=1.0, good=2.0)
    for _ in range(2):
        assert room.kept() == [("good", "good [2.0]")]
        assert [record.levelname for record in caplog.records] == ["ERROR"], "it is tried once"
    assert room.charts.note() == snapshot


# ---- while the cell runs


def test_only_what_has_changed_is_drawn_and_taken_once(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    curves = room.metrics.curves
    monkeypatch.setattr(room.metrics, "curves", lambda name: copied.append(name) or curves(name))
    room.log(0, loss=0.5, accuracy=0.25)
    assert not is_drawing()
    room.charts.draw_on_thread()
    assert wait_until(lambda: len(room.shown) == 2)
    room.log(1, accuracy=0.5)
    assert wait_until(lambda: len(room.shown) == 3)
    assert room.shown[-1] == ("accuracy", "accuracy [0.5]")
    assert copied == room.drawn == ["loss", "accuracy", "accuracy"]
    room.charts.finish()
    assert not is_drawing()


def test_numbers_that_come_while_one_draws_are_drawn_at_the_end(room: Room) -> None:
    room.log(0, loss=0.5, accuracy=0.25)
    room.hold()
    room.log(1, loss=0.25)
    room.is_free.set()
    assert room.kept() == [("loss", "loss [0.25]"), ("accuracy", "accuracy [0.25]")]
    assert not is_drawing()


def test_a_thread_that_is_stopped_ends_and_draws_no_more(room: Room) -> None:
    room.log(0, loss=0.5, accuracy=0.25)
    room.hold()
    room.charts.stop()
    room.is_free.set()
    assert wait_until(lambda: not is_drawing())
    assert room.drawn == ["loss"]


def test_drawing_gets_its_share_of_the_time_and_a_pause_is_never_long(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Nudge(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            if len(pauses) > 3:
                room.charts.stop()
            return False

    room.log(0, loss=0.5)
    loading = [100.0, 107.0]
    now = iter([0.0, *loading, 7.0 + 0.03, 10.0, 10.00001, 20.0, 120.0])
    monkeypatch.setattr(module.time, "thread_time", lambda: next(now))
    room.charts._nudge = Nudge()
    room.charts._draw_news()
    drawing = pytest.approx(0.03 / module.SHARE)
    assert pauses == [0.0, drawing, module.LOOK_PERIOD, module.MAX_PAUSE]


def test_another_scale_is_drawn_at_once_and_kept(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOK_PERIOD", "MAX_PAUSE"):
        monkeypatch.setattr(module, name, 1000)
    room.log(0, loss=0.5)
    room.charts.draw_on_thread()
    assert wait_until(lambda: room.scales == [Scale.AUTO])
    room.charts.choose(scale=Scale.LOG)
    assert wait_until(lambda: room.scales == [Scale.AUTO, Scale.LOG])
    room.charts.finish()
    assert room.scales == [Scale.AUTO, Scale.LOG, Scale.LOG]


def test_pictures_are_shown_where_the_charts_were_made() -> None:
    where: ContextVar[str] = ContextVar("where", default="nowhere")
    token = where.set("under this cell")
    room, places = Room(), list[str]()
    where.reset(token)
    room.show = lambda _chart: places.append(where.get())
    room.log(0, loss=0.5)
    room.charts.draw_on_thread()
    assert wait_until(lambda: places == ["under this cell"])
    room.charts.finish()
