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

from nbddp.record.curves import MAX_NAMES, Curves
from nbddp.record.series import Curve
from nbddp.ui.charts.frame import Scale
from nbddp.ui.panel import charts as room
from nbddp.ui.panel.charthtml import Drawn
from nbddp.ui.panel.charts import MAX_CHARTS, Charts

Make = Callable[..., Charts]
DRAWING = Drawn.__module__  # loaded when there is something to draw
Picture = tuple[str, str]


class FakePencil:
    """Draws in no time: a picture is the metric's name and its newest values."""

    def __init__(self) -> None:
        self.drawn: list[str] = []
        self.scales: list[Scale] = []
        self.is_held = threading.Event()
        self.is_free = threading.Event()
        self.is_free.set()

    def draw(self, name: str, curves: Mapping[int, Curve], scale: Scale = Scale.AUTO) -> Drawn:
        self.drawn.append(name)
        self.scales.append(scale)
        self.is_held.set()
        assert self.is_free.wait(30)
        return Drawn(name, f"{name} {[curve.last for curve in curves.values()]}", tuple(curves))


def use(monkeypatch: pytest.MonkeyPatch, draw: object) -> None:
    """Have charts drawn by this, live and at the end."""
    fake = SimpleNamespace(live_chart=draw, kept_chart=draw)
    monkeypatch.setitem(sys.modules, DRAWING, fake)


@pytest.fixture
def pencil(monkeypatch: pytest.MonkeyPatch) -> FakePencil:
    pencil = FakePencil()
    use(monkeypatch, pencil.draw)
    monkeypatch.setattr(room, "LOOK_PERIOD", 0.005)
    return pencil


@pytest.fixture
def metrics() -> Curves:
    return Curves()


@pytest.fixture
def shown() -> list[Picture]:
    return []


@pytest.fixture
def make(pencil: FakePencil, metrics: Curves, shown: list[Picture]) -> Iterator[Make]:
    """Makes charts; their threads end with the test."""
    made: list[Charts] = []

    def build(show: Callable[[Drawn], None] | None = None) -> Charts:
        made.append(Charts(metrics.snapshot, show or (lambda it: shown.append((it.name, it.html)))))
        return made[-1]

    yield build
    pencil.is_free.set()
    for charts in made:
        charts.stop()


@pytest.fixture
def charts(make: Make) -> Charts:
    return make()


def kept(charts: Charts) -> list[Picture]:
    return [(each.name, each.html) for each in charts.finish()]


def is_drawing() -> bool:
    return any(thread.name == "nbddp-charts" for thread in threading.enumerate())


def log(metrics: Curves, step: int, **values: float) -> None:
    metrics.add(0, float(step), step, values)


# ---- at the end


def test_at_the_end_every_metric_has_its_chart_and_what_is_drawn_is_not_drawn_again(
    charts: Charts, metrics: Curves, pencil: FakePencil, shown: list[Picture]
) -> None:
    log(metrics, 0, loss=0.5, accuracy=0.25)
    first = kept(charts)
    assert first == [("loss", "loss [0.5]"), ("accuracy", "accuracy [0.25]")]
    assert kept(charts) == first
    assert pencil.drawn == ["loss", "accuracy"]
    log(metrics, 1, accuracy=0.5)
    assert kept(charts) == [("loss", "loss [0.5]"), ("accuracy", "accuracy [0.5]")]
    assert pencil.drawn == ["loss", "accuracy", "accuracy"]
    assert shown == [], "what would show it is about to go"


def test_without_numbers_there_are_no_charts_and_nothing_is_loaded(
    charts: Charts, pencil: FakePencil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, DRAWING, None)  # importing it would fail
    charts.draw_on_thread()
    assert kept(charts) == []
    assert pencil.drawn == []


def test_there_are_never_more_than_so_many_unless_they_are_chosen(
    charts: Charts, metrics: Curves, pencil: FakePencil
) -> None:
    names = [f"m{number}" for number in range(MAX_CHARTS + 8)]
    log(metrics, 0, **dict.fromkeys(names, 1.0))
    assert [name for name, _ in kept(charts)] == pencil.drawn == names[:MAX_CHARTS]
    assert "8 more" in charts.note()
    charts.choose(chosen=names[5:])
    assert [name for name, _ in kept(charts)] == names[5:]
    assert charts.names == [*names[5:], *names[:5]]
    assert "5 more" in charts.note()


REPORTS = {  # how many metrics, at which steps
    "none": (0, [0]),
    "one": (1, [0]),
    "as many as fit": (MAX_CHARTS, [0]),
    "more": (MAX_CHARTS + 3, [0]),
    "not even kept": (MAX_NAMES + 5, [0]),
    "falls back": (1, [0, 1, 0, 1, 0]),
    "several fall back": (2, [0, 1, 0]),
}


@pytest.mark.parametrize(("count", "steps"), REPORTS.values(), ids=REPORTS)
def test_what_the_charts_do_not_show_is_said(
    charts: Charts, metrics: Curves, count: int, steps: list[int], snapshot: SnapshotAssertion
) -> None:
    for step in steps:
        log(metrics, step, **{f"m{number}": 1.0 for number in range(count)})
    charts.finish()
    assert charts.note() == snapshot


def test_a_chart_that_cannot_be_drawn_is_named_and_the_others_come(
    make: Make,
    metrics: Curves,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    snapshot: SnapshotAssertion,
) -> None:
    def draw(name: str, _curves: Mapping[int, Curve]) -> Drawn:
        if name == "bad":
            raise OverflowError("too large")
        return Drawn(name, name, (0,))

    use(monkeypatch, draw)
    log(metrics, 0, bad=1.0, good=2.0)
    charts = make()
    for _ in range(2):
        assert kept(charts) == [("good", "good")]
        assert [record.levelname for record in caplog.records] == ["ERROR"], "it is tried once"
    assert charts.note() == snapshot


# ---- while the cell runs


def test_only_what_has_changed_is_drawn_and_taken_once(
    charts: Charts,
    metrics: Curves,
    pencil: FakePencil,
    shown: list[Picture],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[str] = []
    curves = metrics.curves
    monkeypatch.setattr(metrics, "curves", lambda name: copied.append(name) or curves(name))
    log(metrics, 0, loss=0.5, accuracy=0.25)
    assert not is_drawing()
    charts.draw_on_thread()
    assert wait_until(lambda: len(shown) == 2)
    log(metrics, 1, accuracy=0.5)
    assert wait_until(lambda: len(shown) == 3)
    assert shown[-1] == ("accuracy", "accuracy [0.5]")
    assert copied == pencil.drawn == ["loss", "accuracy", "accuracy"]
    charts.finish()
    assert not is_drawing()


def test_numbers_that_come_while_one_draws_are_drawn_at_the_end(
    charts: Charts, metrics: Curves, pencil: FakePencil
) -> None:
    pencil.is_free.clear()
    log(metrics, 0, loss=0.5, accuracy=0.25)
    charts.draw_on_thread()
    assert pencil.is_held.wait(30)
    log(metrics, 1, loss=0.25)
    pencil.is_free.set()
    assert kept(charts) == [("loss", "loss [0.25]"), ("accuracy", "accuracy [0.25]")]
    assert not is_drawing()


def test_a_thread_that_is_stopped_ends_and_draws_no_more(
    charts: Charts, metrics: Curves, pencil: FakePencil
) -> None:
    pencil.is_free.clear()
    log(metrics, 0, loss=0.5, accuracy=0.25)
    charts.draw_on_thread()
    assert pencil.is_held.wait(30)
    charts.stop()
    pencil.is_free.set()
    assert wait_until(lambda: not is_drawing())
    assert pencil.drawn == ["loss"]


def test_drawing_gets_its_share_of_the_time_and_a_pause_is_never_long(
    charts: Charts, metrics: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Nudge(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            if len(pauses) > 3:
                charts.stop()
            return False

    log(metrics, 0, loss=0.5)
    loading = [100.0, 107.0]
    now = iter([0.0, *loading, 7.0 + 0.03, 10.0, 10.00001, 20.0, 120.0])
    monkeypatch.setattr(room.time, "thread_time", lambda: next(now))
    charts._nudge = Nudge()
    charts._draw_news()
    drawing = pytest.approx(0.03 / room.SHARE)
    assert pauses == [0.0, drawing, room.LOOK_PERIOD, room.MAX_PAUSE]


def test_another_scale_is_drawn_at_once_and_kept(
    charts: Charts, metrics: Curves, pencil: FakePencil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LOOK_PERIOD", 1000)
    monkeypatch.setattr(room, "MAX_PAUSE", 1000)
    log(metrics, 0, loss=0.5)
    charts.draw_on_thread()
    assert wait_until(lambda: pencil.scales == [Scale.AUTO])
    charts.choose(scale=Scale.LOG)
    assert wait_until(lambda: pencil.scales == [Scale.AUTO, Scale.LOG])
    charts.finish()
    assert pencil.scales == [Scale.AUTO, Scale.LOG, Scale.LOG]


def test_pictures_are_shown_where_the_charts_were_made(make: Make, metrics: Curves) -> None:
    where: ContextVar[str] = ContextVar("where", default="nowhere")
    places: list[str] = []
    token = where.set("under this cell")
    charts = make(lambda _chart: places.append(where.get()))
    where.reset(token)
    log(metrics, 0, loss=0.5)
    charts.draw_on_thread()
    assert wait_until(lambda: places == ["under this cell"])
