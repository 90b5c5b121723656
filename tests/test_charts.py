"""The charts of a cell: each is drawn when it has changed, a bounded number of them, to the end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
from processes import wait_until

from nbddp.record.curves import MAX_NAMES, Curves
from nbddp.record.series import Curve
from nbddp.ui.charts.frame import Scale
from nbddp.ui.panel import charts as room
from nbddp.ui.panel.charthtml import Drawn
from nbddp.ui.panel.charts import MAX_CHARTS, Charts

Make = Callable[..., Charts]


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
    monkeypatch.setitem(sys.modules, "nbddp.ui.panel.charthtml", fake)


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
        if charts._thread.ident is not None:
            charts._thread.join()


@pytest.fixture
def charts(make: Make) -> Charts:
    return make()


def kept(charts: Charts) -> list[Picture]:
    return [(each.name, each.html) for each in charts.finish()]


def log(metrics: Curves, step: int, **values: float) -> None:
    metrics.add(0, float(step), step, values)


# ---- at the end


def test_at_the_end_every_metric_has_its_chart_in_the_order_they_came(
    charts: Charts, metrics: Curves
) -> None:
    log(metrics, 0, loss=0.5, accuracy=0.25)
    log(metrics, 1, loss=0.25, b=1.0)
    assert kept(charts) == [
        ("loss", "loss [0.25]"),
        ("accuracy", "accuracy [0.25]"),
        ("b", "b [1.0]"),
    ]


def test_without_numbers_there_are_no_charts_and_nothing_is_loaded(
    charts: Charts, pencil: FakePencil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nbddp.ui.panel.charthtml", None)  # importing it would fail
    charts.draw_on_thread()
    assert kept(charts) == []
    assert pencil.drawn == []


def test_what_is_drawn_already_is_not_drawn_again(
    charts: Charts, metrics: Curves, pencil: FakePencil
) -> None:
    log(metrics, 0, loss=0.5, accuracy=0.25)
    first = kept(charts)
    assert kept(charts) == first
    assert pencil.drawn == ["loss", "accuracy"]
    log(metrics, 1, accuracy=0.5)
    assert kept(charts) == [("loss", "loss [0.5]"), ("accuracy", "accuracy [0.5]")]
    assert pencil.drawn == ["loss", "accuracy", "accuracy"]


def test_there_are_never_more_than_so_many_and_the_rest_is_said(
    charts: Charts, metrics: Curves, pencil: FakePencil
) -> None:
    log(metrics, 0, **{f"m{number}": 1.0 for number in range(MAX_CHARTS + 3)})
    names = [f"m{number}" for number in range(MAX_CHARTS)]
    assert [name for name, _ in kept(charts)] == names
    assert pencil.drawn == names
    assert charts.note() == (
        "3 more metrics (m12, m13, m14): `%ddp show --metrics NAME` draws them, "
        "metrics.jsonl has them all"
    )


@pytest.mark.parametrize("count", [0, 1, MAX_CHARTS])
def test_where_all_have_a_chart_nothing_is_said(
    charts: Charts, metrics: Curves, count: int
) -> None:
    log(metrics, 0, **{f"m{number}": 1.0 for number in range(count)})
    charts.finish()
    assert charts.note() == ""


def test_a_step_that_fell_back_is_said_once(charts: Charts, metrics: Curves) -> None:
    for step in (0, 1, 0, 1, 0):
        log(metrics, step, loss=1.0)
    charts.finish()
    assert charts.note() == "the step of loss fell back 2 times: its chart counts on from there"


def test_steps_of_several_metrics_that_fell_back_are_said_together(
    charts: Charts, metrics: Curves
) -> None:
    for step in (0, 1, 0):
        log(metrics, step, loss=1.0, accuracy=1.0)
    charts.finish()
    said = "the steps of loss, accuracy fell back (once): their charts count on from there"
    assert charts.note() == said


def test_metrics_that_were_not_even_kept_are_counted(charts: Charts, metrics: Curves) -> None:
    log(metrics, 0, **{f"m{number}": 1.0 for number in range(MAX_NAMES + 5)})
    charts.finish()
    left_out = MAX_NAMES + 5 - MAX_CHARTS
    named = ", ".join(f"m{number}" for number in range(MAX_CHARTS, MAX_CHARTS + 20))
    assert charts.note().startswith(
        f"{left_out} more metrics ({named}, {left_out - 20} more): `%ddp show "
    )


# ---- while the cell runs


def test_what_comes_is_shown_while_it_comes(
    charts: Charts, metrics: Curves, shown: list[Picture]
) -> None:
    charts.draw_on_thread()
    for step in range(3):
        log(metrics, step, loss=float(step))
        newest = ("loss", f"loss [{float(step)}]")
        assert wait_until(lambda newest=newest: newest in shown)


def test_only_what_has_changed_is_drawn(
    charts: Charts, metrics: Curves, pencil: FakePencil, shown: list[Picture]
) -> None:
    log(metrics, 0, loss=0.5, accuracy=0.25)
    charts.draw_on_thread()
    assert wait_until(lambda: len(shown) == 2)
    log(metrics, 1, accuracy=0.5)
    assert wait_until(lambda: len(shown) == 3)
    charts.finish()
    assert pencil.drawn[:3] == ["loss", "accuracy", "accuracy"]
    assert shown[-1] == ("accuracy", "accuracy [0.5]")


def test_nobody_draws_before_it_is_asked_for(
    charts: Charts, metrics: Curves, pencil: FakePencil
) -> None:
    log(metrics, 0, loss=0.5)
    assert not charts._thread.is_alive()
    assert pencil.drawn == []


def test_what_is_drawn_at_the_end_is_not_shown_in_what_is_about_to_go(
    charts: Charts, metrics: Curves, shown: list[Picture]
) -> None:
    log(metrics, 0, loss=0.5)
    assert kept(charts) == [("loss", "loss [0.5]")]
    assert shown == []


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
    assert not charts._thread.is_alive()


def test_drawing_gets_its_share_of_the_time_and_a_pause_is_never_long(
    charts: Charts, metrics: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            if len(pauses) > 3:
                charts._over.set()
            return False

    log(metrics, 0, loss=0.5)
    loading = [100.0, 107.0]
    now = iter([0.0, *loading, 7.0 + 0.03, 10.0, 10.00001, 20.0, 120.0])
    monkeypatch.setattr(room.time, "thread_time", lambda: next(now))
    charts._nudge = Over()
    charts._draw_news()
    drawing = pytest.approx(0.03 / room.SHARE)
    assert pauses == [0.0, drawing, room.LOOK_PERIOD, room.MAX_PAUSE]


def test_the_numbers_are_taken_once_for_each_time_they_are_drawn(
    charts: Charts, metrics: Curves, pencil: FakePencil, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    curves = metrics.curves
    monkeypatch.setattr(metrics, "curves", lambda name: copied.append(name) or curves(name))
    for number in range(3):
        log(metrics, number, loss=0.5)
        charts._look_and_draw()
    assert copied == pencil.drawn == ["loss"] * 3


def test_while_there_are_no_numbers_one_looks_now_and_then(
    charts: Charts, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            if len(pauses) > 2:
                charts._over.set()
            return False

    monkeypatch.setitem(sys.modules, "nbddp.ui.panel.charthtml", None)  # importing it would fail
    charts._nudge = Over()
    charts._draw_news()
    assert pauses[0] == 0.0
    assert min(pauses[1:]) >= room.LOOK_PERIOD  # longer where a look takes long


# ---- what somebody chose


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


def test_the_metrics_that_were_chosen_are_drawn_however_many_there_are(
    charts: Charts, metrics: Curves
) -> None:
    names = [f"m{number}" for number in range(MAX_CHARTS + 8)]
    log(metrics, 0, **dict.fromkeys(names, 1.0))
    charts.choose(chosen=names[5:])
    assert [name for name, _ in kept(charts)] == names[5:]
    assert charts.names == [*names[5:], *names[:5]]
    assert charts.note().startswith("5 more metrics (m0, m1, m2, m3, m4): ")


# ---- the end of the thread


def test_the_thread_ends_with_the_last_chart(charts: Charts, metrics: Curves) -> None:
    log(metrics, 0, loss=0.5)
    charts.draw_on_thread()
    charts.finish()
    assert not charts._thread.is_alive()


def test_a_thread_that_is_stopped_ends_and_draws_no_more(
    charts: Charts, metrics: Curves, pencil: FakePencil
) -> None:
    pencil.is_free.clear()
    log(metrics, 0, loss=0.5, accuracy=0.25)
    charts.draw_on_thread()
    assert pencil.is_held.wait(30)
    charts.stop()
    pencil.is_free.set()
    charts._thread.join(30)
    assert not charts._thread.is_alive()
    assert pencil.drawn == ["loss"]


def test_charts_that_were_never_started_can_be_stopped_and_finished(charts: Charts) -> None:
    charts.stop()
    assert kept(charts) == []


def test_pictures_are_shown_where_the_charts_were_made(make: Make, metrics: Curves) -> None:
    where: ContextVar[str] = ContextVar("where", default="nowhere")
    places: list[str] = []
    token = where.set("under this cell")
    charts = make(lambda _chart: places.append(where.get()))
    where.reset(token)
    log(metrics, 0, loss=0.5)
    charts.draw_on_thread()
    assert wait_until(lambda: places == ["under this cell"])


def test_a_chart_that_cannot_be_drawn_is_named_and_the_others_come(
    make: Make, metrics: Curves, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def draw(name: str, _curves: Mapping[int, Curve]) -> Drawn:
        if name == "bad":
            raise OverflowError("too large")
        return Drawn(name, name, (0,))

    use(monkeypatch, draw)
    log(metrics, 0, bad=1.0, good=2.0)
    charts = make()
    assert kept(charts) == [("good", "good")]
    assert charts.note() == "bad could not be drawn: OverflowError: too large"
    assert "the chart of 'bad' could not be drawn" in caplog.text
    assert kept(charts) == [("good", "good")]
    assert caplog.text.count("could not be drawn") == 1, "it is tried once"
