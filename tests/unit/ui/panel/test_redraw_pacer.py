"""When each part of a panel is redrawn: rarely if it is slow, at once for a new line."""

import time

import pytest

from nbddp.ui.panel.redraw_pacer import RedrawPacer, next_redraw


class Panel:
    """A panel whose redraws have a given cost, with a clock that it advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.spent, self.next_draw = 100.0, 0.0, 0.0
        self.cost = {"log": 0.0005, "rest": 0.0005}
        self.lines = self.news = self.choices = 0
        self.drawn: list[tuple[str, float]] = []
        self.log = RedrawPacer(0.015, least=0.1, most=0.3)
        self.rest = RedrawPacer(0.01, least=0.25, most=1.0, tick=0.5)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "thread_time", lambda: self.spent)

    def look(self) -> None:
        if self.now >= self.next_draw:
            self.log.draw_if_changed((self.lines,), lambda: self._draw("log"))
            self.rest.draw_if_changed((self.news, self.choices), lambda: self._draw("rest"))
            self.next_draw = next_redraw(self.log, self.rest)

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
def test_the_redraw_rate_depends_on_the_cost_of_a_redraw(
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
        assert ("log", panel.now) in panel.drawn[-2:]


def test_the_last_log_line_is_drawn_without_a_later_line(panel: Panel) -> None:
    panel.live(1.04, lines=True)
    panel.drawn.clear()
    panel.live(0.3)
    assert panel.count("log") == 1


def test_a_single_slow_redraw_delays_the_next_one_only_briefly(panel: Panel) -> None:
    panel.cost["rest"] = 0.5
    panel.live(0.3, news=True)
    panel.cost["rest"] = 0.0005
    panel.live(0.6, news=True)
    assert panel.count("rest") == 2


def test_a_choice_of_the_user_is_drawn_at_once(panel: Panel) -> None:
    panel.live(0.6, news=True)
    panel.now += 0.003
    panel.choices += 1
    panel.look()
    assert panel.drawn[-1] == ("rest", panel.now)


def test_an_unchanged_panel_redraws_only_its_running_times(panel: Panel) -> None:
    panel.live(10.0)
    assert panel.count("log") == 0
    assert 19 <= panel.count("rest") <= 21


def test_waiting_for_other_threads_does_not_count_as_redraw_cost(panel: Panel) -> None:
    def wait() -> None:
        panel.spent += 0.001
        panel.now += 2.0

    panel.rest.draw_if_changed((1, 1), wait)
    assert panel.rest.next_at == pytest.approx(panel.now + 0.25)
