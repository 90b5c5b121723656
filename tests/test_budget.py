"""What is drawn pays for itself: the next drawing waits until the last one was its share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbddp.ui.panel import budget as room
from nbddp.ui.panel.budget import Budget


class Clock:
    """Tells the time, and the CPU time, that a test says."""

    def __init__(self) -> None:
        self.now = self.spent = 0.0

    def draw(self, seconds: float, *, waits: float = 0.0) -> None:
        """Draw for so long, and wait for others."""
        self.now += seconds + waits
        self.spent += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(room.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(room.time, "thread_time", lambda: clock.spent)
    return clock


def drawings(clock: Clock, budget: Budget, draw: Callable[[], None], seconds: float) -> int:
    """How many there are in so many seconds, of something that always has news."""
    count, end = 0, clock.now + seconds
    while clock.now < end:
        if clock.now >= budget.next_at:
            count += 1
            with budget.spending():
                draw()
        clock.now = max(clock.now, budget.next_at)
    return count


@pytest.mark.parametrize("cost", [0.003, 0.006, 0.015])
def test_what_is_dear_is_drawn_less_often_and_takes_its_share(clock: Clock, cost: float) -> None:
    budget = Budget(0.02, least=0.1, most=1.0)
    count = drawings(clock, budget, lambda: clock.draw(cost), 100.0)
    assert count * cost / 100.0 == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(("cost", "seconds", "count"), [(0.0001, 100.0, 400), (0.2, 120.0, 100)])
def test_nothing_is_drawn_too_often_or_never(
    clock: Clock, cost: float, seconds: float, count: int
) -> None:
    budget = Budget(0.02, least=0.25, most=1.0)
    assert drawings(clock, budget, lambda: clock.draw(cost), seconds) == pytest.approx(count, abs=2)


def test_who_waits_for_others_while_he_draws_does_not_pay_for_them(clock: Clock) -> None:
    budget = Budget(0.02, least=0.25, most=10.0)
    with budget.spending():
        clock.draw(0.001, waits=2.0)
    assert budget.next_at == pytest.approx(clock.now + 0.25)


def test_a_drawing_that_fails_has_been_paid_for(clock: Clock) -> None:
    budget = Budget(0.02, least=0.1, most=1.0)

    @budget.spending()
    def fail() -> None:
        clock.draw(0.01)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert budget.next_at == pytest.approx(clock.now + 0.5)
