"""The panel's pieces of HTML: safe, with texts, and with their colours on a bare page."""

import re
from dataclasses import replace

import pytest
from pages import Page

from nbddp.lifecycle.group_state import GroupState
from nbddp.record.run_events import InterruptAsked, RankFailed, RanksReady, RunEvent
from nbddp.record.snapshot import Snapshot
from nbddp.ui.html_pieces import MAX_EVENTS, STYLE_SHEET, event_log
from nbddp.ui.report.render import title_html
from nbddp.ui.report.status import state_title


def line_of(*events: RunEvent, seconds: float = 10.0) -> Page:
    running = Snapshot(state=GroupState.RUNNING, began=100.0, seconds=seconds)
    return Page(event_log(replace(running, events=events)))


def failure(at: float = 105.0, rank: int = 1) -> RunEvent:
    return RankFailed(time=at, rank=rank, what='<ValueError>: "no"')


def marks(page: Page) -> list[float]:
    """Where the marks on the time line are, in percent."""
    styles = [style for style in page.values("style") if style.startswith("left:")]
    return [float(style.removeprefix("left:").removesuffix("%")) for style in styles]


@pytest.mark.parametrize("state", list(GroupState))
def test_each_group_state_has_a_dot_and_shows_the_time_of_a_running_cell(state: GroupState) -> None:
    page = Page(title_html(state_title(Snapshot(state=state, seconds=12.0))))
    assert page.text.startswith(state.value)
    assert any("nbddp-dot" in name for name in page.values("class"))
    is_busy = state in (GroupState.RUNNING, GroupState.INTERRUPTING)
    assert ("12.0 s" in page.text) == is_busy


def test_the_title_names_a_script_only_while_it_runs() -> None:
    for state, title in (
        (GroupState.RUNNING, "running train.py"),
        (GroupState.INTERRUPTING, "interrupting train.py"),
        (GroupState.IDLE, "ready"),
    ):
        text = state_title(Snapshot(state=state, script="train.py")).text
        assert text.partition(" · ")[0] == title


def test_an_event_is_a_mark_at_its_time_and_a_line_of_text() -> None:
    assert marks(line_of(failure(105.0))) == [], "a single mark would look like a slider"
    page = line_of(failure(105.0), InterruptAsked(time=106.0))
    assert marks(page) == [50.0, 60.0]
    assert {"nbddp-bad", "nbddp-warn"} <= {*page.values("class")}
    assert page.by_tag["li"][0] == '5.0 s rank 1: <ValueError>: "no"'
    assert marks(line_of(failure(99.0), failure(200.0))) == [0.0, 100.0], "outside of the cell"
    assert marks(line_of(failure(100.0), failure(101.0), seconds=0.0)) == [0.0, 100.0]
    for unsaid in ((), (RanksReady(time=101.0, attempt=1),)):
        assert event_log(Snapshot(state=GroupState.RUNNING, events=unsaid)) == ""


def test_the_newest_events_are_listed_and_all_events_have_a_mark() -> None:
    count = MAX_EVENTS + 3
    page = line_of(*(failure(101.0 + at, rank=at) for at in range(count)))
    assert len(marks(page)) == count
    assert page.by_tag["li"][0] == "3 earlier"
    listed = [int(text.split(":")[0].split()[-1]) for text in page.by_tag["li"][1:]]
    assert listed == [*range(3, count)]


@pytest.mark.parametrize(
    "kind", [r"dot\.nbddp-ok", r"dot\.nbddp-warn", r"dot\.nbddp-bad", "wrong", "waits"]
)
def test_colours_of_the_style_sheet_override_inline_colours(kind: str) -> None:
    [rule] = re.findall(rf"\.nbddp-{kind} {{([^}}]*)}}", STYLE_SHEET)
    assert "!important" in rule
