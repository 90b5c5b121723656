"""The status of a group, in a few lines of text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pages import readable

from nbddp.lifecycle.group_state import GroupState
from nbddp.lifecycle.refusals import NO_GROUP
from nbddp.record.rank_monitor import LoopProgress
from nbddp.record.run_events import RankFailed, RanksReady
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.ui.report.render import render_html, render_text
from nbddp.ui.report.status import SHOWN_EVENTS, status_report

ONE = RankSnapshot(rank=0, state="ready")
TWO = Snapshot(
    state=GroupState.IDLE,
    began=100.0,
    attempt=2,
    backend="gloo",
    devices=("cpu", "cpu"),
    ranks=(ONE, replace(ONE, rank=1)),
)


def status(snapshot: Snapshot) -> str:
    return render_text(status_report(snapshot))


def with_ranks(**change: Any) -> Snapshot:
    """Two ranks; the second is changed."""
    return replace(TWO, ranks=(ONE, replace(ONE, rank=1, **change)))


def failure(number: int) -> RankFailed:
    return RankFailed(time=100.0 + number, rank=1, what=f"error {number}")


def test_the_status_as_text_and_as_a_page_with_a_time_line(snapshot: Any) -> None:
    bars = (LoopProgress("epoch", 1, 4, 2.0),)
    hang = replace(
        with_ranks(state="waiting", line=3, seconds=12.0, pid=4711, progress_bars=bars),
        events=(failure(1), RanksReady(time=102.0, attempt=1), failure(3)),
        alarm="no progress for 10 s:\n  ranks 0-1 waiting",
        folder="/elsewhere/2025-first",
        rejected_messages=3,
    )
    gone = with_ranks(state="was killed by SIGKILL", is_alive=False, pid=4711, memory=1 << 20)
    off = Snapshot(state=GroupState.OFF)
    groups = {"off": off, "ready": TWO, "in a hang": hang, "one is gone": gone}
    assert {name: status(each) for name, each in groups.items()} == snapshot
    assert "%ddp start" in NO_GROUP == status(off)
    events = failure(1), failure(2)
    group = replace(with_ranks(state="waiting"), events=events, alarm="<no progress>")
    assert readable(render_html(status_report(group))) == snapshot


def test_the_status_has_the_newest_events_and_relative_log_paths(folder: Path) -> None:
    events = tuple(failure(number) for number in range(SHOWN_EVENTS + 5))
    text = status(replace(TWO, events=events, folder=str(folder / "runs" / "x")))
    *told, logs = text.split("\n")[4:]
    assert [line.split()[-1] for line in told] == [str(at) for at in range(5, SHOWN_EVENTS + 5)]
    assert logs == "logs in runs/x"
