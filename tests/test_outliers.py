"""Of very many ranks a chart shows the mean, the spread, and those that stand apart."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from losses import losses
from pages import Page

from nbddp.record.metrics import Curve, MetricStore
from nbddp.ui.charts.drawing import VERY_MANY, Chart
from nbddp.ui.charts.outliers import MOST
from nbddp.ui.panel.charthtml import kept_chart, live_chart

RANKS = 128


def noisy(strange: Callable[[int, int], float] = lambda _rank, _step: 0.0) -> dict[int, Curve]:
    """A loss that falls, with the noise of each rank's batches, and what is strange of some."""
    chance = random.Random(7)
    return losses(
        lambda rank, step: 3 / (1 + step / 20) + chance.gauss(0, 0.05) + strange(rank, step),
        ranks=RANKS,
        steps=60,
    )


def apart(curves: dict[int, Curve]) -> list[int]:
    return list(Chart.of("loss", curves).thin)


@pytest.mark.parametrize(
    ("strange", "found"),
    [
        (lambda _rank, _step: 0.0, []),
        (lambda rank, _step: 1.0 * (rank == 37), [37]),
        (lambda rank, _step: -1.0 * (rank == 37), [37]),
        (lambda rank, step: 0.05 * max(0, step - 40) * (rank == 37), [37]),
        (lambda rank, step: 1.0 * (rank == 37 and step < 35), [37]),
        (lambda rank, step: 5.0 * (rank == 37 and step == 30), []),
        (lambda rank, _step: 0.1 * rank * (rank < 20), list(range(20 - MOST, 20))),
    ],
    ids=["noise", "above", "below", "of late", "for more than half", "one step", "too many"],
)
def test_a_rank_that_is_far_from_the_others_stands_apart(
    strange: Callable[[int, int], float], found: list[int]
) -> None:
    assert apart(noisy(strange)) == found


@pytest.mark.parametrize(
    ("value", "ranks", "found"),
    [
        (lambda _rank: 0.1, RANKS, []),
        (lambda rank: 0.1 * (1 + 1e-6 * (rank == 3)), RANKS, []),
        (lambda rank: 0.1 * (1 + 0.1 * (rank == 3)), RANKS, [3]),
        (lambda rank: 1.0 * (rank == 3), RANKS, [3]),
        (lambda rank: rank, VERY_MANY, list(range(VERY_MANY))),
        (lambda rank: rank % 3, VERY_MANY + 1, []),
    ],
    ids=["the same", "rounding", "a small difference", "from zero", "a line for each", "many"],
)
def test_where_each_rank_has_one_value(
    value: Callable[[int], float], ranks: int, found: list[int]
) -> None:
    assert apart(losses(lambda rank, _step: value(rank), ranks=ranks, steps=60)) == found


def test_the_chart_of_128_ranks_has_the_lines_and_keys_of_those_that_stand_apart() -> None:
    chart = live_chart("loss", noisy(lambda rank, _step: 1.0 * (rank in (3, 77))))
    page = Page(chart.html)
    kinds = [known.get("class", "") for _, known in page.tags]
    assert sum(kind.startswith("nbddp-rank") for kind in kinds) == 2
    keys = [known["title"] for _, known in page.tags if "nbddp-key" in known.get("class", "")]
    assert keys == ["rank 3", "rank 77"]
    assert "mean of 128 ranks" in page.text
    assert "▒ the others" in page.text
    assert chart.ranks == (3, 77)
    assert "▒ all" in Page(live_chart("loss", noisy()).html).text


def test_the_chart_of_128_ranks_is_no_larger_than_one_of_8() -> None:
    chance = random.Random(7)

    def value(_rank: int, step: int) -> float:
        return 3 / (1 + step / 20) + chance.gauss(0, 0.05)

    few, many = (kept_chart("loss", losses(value, ranks=count)).html for count in (8, RANKS))
    assert len(many) < len(few)


@given(
    st.dictionaries(
        st.integers(0, 40),
        st.lists(
            st.tuples(st.integers(0, 9), st.floats(allow_nan=True, allow_infinity=True, width=32)),
            min_size=1,
            max_size=4,
        ),
        min_size=VERY_MANY + 1,
        max_size=30,
    )
)
def test_no_numbers_stop_a_chart_of_many(points: dict[int, list[tuple[int, float]]]) -> None:
    metrics = MetricStore()
    for rank, known in points.items():
        for step, value in known:
            metrics.add(rank, 0.0, step, {"loss": value})
    chart = Chart.of("loss", metrics.curves("loss"))
    assert len(chart.thin) <= MOST
    live_chart("loss", metrics.curves("loss"))
