"""What is drawn in a panel, and when: lines at once, all else as often as one can see."""

from __future__ import annotations

import pytest

from nbddp.ui.panel import budget
from nbddp.ui.panel import rhythm as room
from nbddp.ui.panel.rhythm import Rhythm


class Panel:
    """A panel whose drawings cost as much as a test says, in a time that it lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.spent = 100.0, 0.0
        self.cost = {"log": 0.0005, "rest": 0.0005}
        self.lines = self.news = 0
        self.turns = 0
        self.drawn: list[tuple[str, float]] = []
        self.rhythm = Rhythm()
        monkeypatch.setattr(room.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(budget.time, "thread_time", lambda: self.spent)

    def look(self) -> None:
        """As the view does when it is time."""
        if self.now >= self.rhythm.next_at:
            self.rhythm.draw_log((self.lines,), lambda: self._draw("log"))
            self.rhythm.draw_rest((self.news, self.turns), lambda: self._draw("rest"))

    def _draw(self, what: str) -> None:
        self.drawn.append((what, self.now))
        self.spent += self.cost[what]

    def live(self, seconds: float, *, lines: bool = False, news: bool = False) -> None:
        """Let time pass, with something new at each moment."""
        for _ in range(round(seconds * 100)):
            self.now += 0.01
            self.lines += lines
            self.news += news
            self.look()

    def count(self, what: str) -> int:
        """How often it was drawn."""
        return [each for each, _ in self.drawn].count(what)


@pytest.fixture
def panel(monkeypatch: pytest.MonkeyPatch) -> Panel:
    panel = Panel(monkeypatch)
    panel.lines = 1
    panel.look()
    assert panel.drawn == [("log", 100.0), ("rest", 100.0)]
    panel.drawn.clear()
    return panel


@pytest.mark.parametrize(
    ("log", "rest", "logs", "rests"),
    [
        (0.0005, 0.0005, (90, 101), (38, 41)),
        (0.003, 0.001, (45, 51), (38, 41)),
        (0.5, 0.5, (30, 34), (9, 11)),
    ],
    ids=["cheap", "the log is dear", "all is dear"],
)
def test_how_often_it_is_drawn_in_ten_seconds_goes_by_what_it_costs(
    panel: Panel, log: float, rest: float, logs: tuple[int, int], rests: tuple[int, int]
) -> None:
    panel.cost = {"log": log, "rest": rest}
    panel.live(10.0, lines=True, news=True)
    assert logs[0] <= panel.count("log") <= logs[1]
    assert rests[0] <= panel.count("rest") <= rests[1]


def test_a_line_after_a_pause_is_drawn_at_once(panel: Panel) -> None:
    panel.cost["log"] = 0.5
    for _ in range(20):
        panel.live(0.37, news=True)
        panel.now += 0.003
        panel.lines += 1
        panel.look()
        assert panel.drawn[-1] == ("log", panel.now) or panel.drawn[-2] == ("log", panel.now)


def test_the_last_line_is_drawn_though_nothing_follows_it(panel: Panel) -> None:
    panel.live(1.04, lines=True)
    panel.drawn.clear()
    panel.live(0.3)
    assert panel.count("log") == 1


def test_a_turn_of_the_group_is_drawn_at_once(panel: Panel) -> None:
    panel.live(0.6, news=True)
    panel.now += 0.003
    panel.turns += 1
    panel.look()
    assert panel.drawn[-1] == ("rest", panel.now)


def test_what_does_not_change_is_not_drawn_but_for_the_times_that_go_on(panel: Panel) -> None:
    panel.live(10.0)
    assert panel.count("log") == 0
    assert 19 <= panel.count("rest") <= 21
