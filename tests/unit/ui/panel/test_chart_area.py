"""The charts of a running cell: each is drawn when it has changed, as the user has chosen."""

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import ipywidgets as widgets
import pytest

from nbddp.charts.axes import AxisScale
from nbddp.charts.chart_lines import rank_chart
from nbddp.record.metrics import MetricStore
from nbddp.ui.html_pieces import MAX_CHARTS
from nbddp.ui.panel import chart_area as module
from nbddp.ui.panel.chart_area import ChartArea


class Area(ChartArea):
    """An area that records the calls of ``rank_chart``, which draw the charts."""

    def __init__(self, *ranks: int) -> None:
        self.curves = MetricStore()
        self.draw_one = Mock(wraps=rank_chart)
        super().__init__(self.curves.snapshot, ranks)

    def log(self, step: int, **values: float) -> None:
        self.curves.add(0, float(step), step, values)

    def redrawn(self) -> list[str]:
        self.draw_one.reset_mock()
        self.draw()
        return [call.args[0] for call in self.draw_one.call_args_list]

    def choices_by_name(self) -> dict[str, Any]:
        """The controls above the charts, by their label."""
        return {each.description: each for each in self.root.children[0].children}


@pytest.fixture
def area(monkeypatch: pytest.MonkeyPatch) -> Iterator[Area]:
    area = Area(0, 1)
    monkeypatch.setattr(module, "rank_chart", area.draw_one)
    yield area
    widgets.Widget.close_all()


def test_only_changed_charts_are_redrawn(area: Area) -> None:
    assert area.redrawn() == []
    assert area.root.children == (), "before the first number nothing is shown"
    area.log(0, loss=0.5, accuracy=0.25)
    assert area.redrawn() == ["loss", "accuracy"]
    assert area.redrawn() == []
    area.log(1, accuracy=0.5)
    assert area.redrawn() == ["accuracy"]
    assert [">0.5<" in chart.value for chart in area.box.children] == [True, True]


@pytest.mark.usefixtures("area")
def test_ranks_with_lines_can_be_highlighted() -> None:
    for ranks, has_lines in ((range(3, 4), False), (range(8), True), (range(9), False)):
        area = Area(*ranks)
        area.log(0, loss=0.5)
        area.draw()
        assert list(area.choices_by_name()) == ["Scale", "Highlight", "Smooth", "Metrics"]
        assert (area.choices_by_name()["Highlight"].layout.display is None) is has_lines


def test_a_redrawn_chart_keeps_its_widget_and_charts_of_speeds_come_last(area: Area) -> None:
    area.log(0, samples_per_second=64.0)
    area.draw()
    [speed] = area.box.children
    area.log(1, samples_per_second=64.0, loss=0.5)
    area.draw()
    [loss, last] = area.box.children
    assert ('title="loss"' in loss.value, last) == (True, speed)


def test_a_failing_chart_hides_no_other_chart(area: Area, caplog: pytest.LogCaptureFixture) -> None:
    area.draw_one.side_effect = lambda *it: 1 // 0 if it[0] == "bad" else rank_chart(*it)
    area.log(0, bad=1.0, good=2.0)
    assert area.redrawn() == ["bad", "good"]
    area.log(1, bad=1.0, good=2.0)
    assert area.redrawn() == ["good"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert len(area.box.children) == 1


def test_changing_the_axis_scale_redraws_the_charts(area: Area) -> None:
    area.log(0, loss=0.5)
    area.draw()
    before = area.choice
    area.choices_by_name()["Scale"].value = AxisScale.LOG
    assert area.choice != before
    assert area.redrawn() == ["loss"]
    assert area.draw_one.call_args.args[-1] is AxisScale.LOG


def test_highlighting_a_rank_and_smoothing_only_change_css_classes(area: Area) -> None:
    area.log(0, loss=0.5)
    area.draw()
    there, before = area.choices_by_name(), set(area.box._dom_classes)
    for name, value, classes in (
        ("Highlight", "rank 1", {"nbddp-only-1"}),
        ("Highlight", "rank 0", {"nbddp-only-0"}),
        ("Smooth", True, {"nbddp-only-0", "nbddp-is-smooth"}),
        ("Highlight", "all", {"nbddp-is-smooth"}),
        ("Smooth", False, set()),
    ):
        setattr(there[name], "label" if name == "Highlight" else "value", value)
        assert set(area.box._dom_classes) - before == classes
    assert area.choice == (AxisScale.AUTO, None)


def test_metrics_can_be_selected_if_there_are_more_than_charts(area: Area) -> None:
    names = [f"m{number}" for number in range(MAX_CHARTS)]
    area.log(0, **dict.fromkeys(names, 1.0))
    assert area.redrawn() == names
    offer = area.choices_by_name()["Metrics"]
    assert offer.layout.display == "none"
    area.log(1, more=1.0)
    area.draw()
    assert (offer.layout.display, area._names.layout.display) == (None, "none")
    assert area._names.options == (*names, "more")
    assert area._names.value == tuple(names)
    assert area.choice == (AxisScale.AUTO, None)
    offer.value = True
    assert area._names.layout.display is None
    area._names.value = ("m1", "more")
    assert area.choice == (AxisScale.AUTO, ("m1", "more"))
    assert area.redrawn() == ["more"]
    shown = [re.findall('title="([^"]*)"', each.value)[0] for each in area.box.children]
    assert shown == [*area._names.value] == ["m1", "more"]
    assert area._names.options == (*names, "more")
