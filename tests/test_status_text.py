"""The status of a group, in a few lines of text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from pages import BIG, SNAPSHOTS

from nbddp.lifecycle.reasons import NO_GROUP
from nbddp.lifecycle.states import GroupState
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.record.timeline import Happening
from nbddp.record.whereabouts import LoopProgress
from nbddp.ui.text.status import SHOWN_EVENTS, say_line, status
from nbddp.ui.words import say_bar, say_cpu, say_event

ONE = RankSnapshot(rank=0, state="ready")
TWO = Snapshot(
    state=GroupState.IDLE,
    began=100.0,
    attempt=2,
    backend="gloo",
    devices=("cpu", "cpu"),
    ranks=(ONE, replace(ONE, rank=1)),
)


def lines(snapshot: Snapshot) -> list[str]:
    return status(snapshot).split("\n")


def with_ranks(**change: Any) -> Snapshot:
    """Two ranks; the second is changed."""
    return replace(TWO, ranks=(ONE, replace(ONE, rank=1, **change)))


def failure(number: int) -> Happening:
    return Happening(100.0 + number, "failure", {"rank": 1, "what": f"error {number}"})


def test_without_a_group_the_way_to_one_is_said() -> None:
    assert status(Snapshot(state=GroupState.OFF)) == NO_GROUP
    assert NO_GROUP == "there is no worker group; `%ddp start` or a `%%ddp` cell starts one"


def test_a_group_is_a_line_and_its_ranks_are_a_table() -> None:
    assert lines(TWO) == [
        "worker group: ready · 2 ranks · gloo · cpu · attempt 2",
        "rank  state",
        "0     ready",
        "1     ready",
    ]


def test_a_table_has_all_that_is_known_in_columns_of_their_width() -> None:
    snapshot = with_ranks(
        state="waiting",
        line=3,
        seconds=12.0,
        collective="all_reduce #7",
        step=120.0,
        steps_per_second=5.0,
        cpu=98.0,
        memory=512 << 20,
        gpu_memory=2 << 30,
        pid=4711,
    )
    assert lines(snapshot)[1:] == [
        "rank  state    line          collective     step         cpu   memory                pid",
        "0     ready",
        "1     waiting  3 for 12.0 s  all_reduce #7  120 · 5.0/s  98 %  512 MiB, GPU 2.0 GiB  4711",
    ]


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"line": 3}, "line"),
        ({"collective": "barrier #1"}, "collective"),
        ({"step": 0.0}, "step"),
        ({"memory": 1 << 20}, "cpu"),
        ({"memory": 1 << 20}, "memory"),
        ({"pid": 3}, "pid"),
    ],
)
def test_a_column_is_there_when_one_rank_has_something_in_it(
    change: dict[str, Any], column: str
) -> None:
    assert column in lines(with_ranks(**change))[1].split()
    assert column not in lines(TWO)[1].split()


def test_of_a_rank_that_is_gone_only_how_it_went_is_said() -> None:
    gone = with_ranks(state="was killed by SIGKILL", is_alive=False, pid=4711, memory=1 << 20)
    assert lines(gone)[3] == "1     was killed by SIGKILL"


def test_bars_events_an_alarm_logs_and_refusals_follow() -> None:
    snapshot = replace(
        with_ranks(bars=(LoopProgress("epoch", 1, 4, 2.0),)),
        events=(failure(1), Happening(102.0, "ready", {}), failure(3)),
        alarm="no progress for 10 s:\n  ranks 0-1 waiting",
        folder="/elsewhere/2025-first",
        refused=3,
    )
    bar, *events, alarm, more, logs, refused = lines(snapshot)[4:]
    assert bar == "rank 1: epoch 1/4 · 0.5/s · 6.0 s left"
    assert [text.split(":", 1)[1] for text in events] == [
        " rank 1: error 1",
        " rank 1: error 3",
    ]
    assert [text.split()[0] for text in events] == ["1.0", "3.0"]
    assert (alarm, more) == ("no progress for 10 s:", "  ranks 0-1 waiting")
    assert logs == "logs in /elsewhere/2025-first"
    assert refused == "3 messages were refused: not signed by this group"


def test_logs_are_named_from_the_notebooks_folder(folder: Path) -> None:
    assert lines(replace(TWO, folder=str(folder / "runs" / "x")))[-1] == "logs in runs/x"


def test_only_the_newest_events_are_told() -> None:
    snapshot = replace(TWO, events=tuple(failure(number) for number in range(SHOWN_EVENTS + 5)))
    told = [line.rpartition(" ")[2] for line in lines(snapshot)[4:]]
    assert told == [str(number) for number in range(5, SHOWN_EVENTS + 5)]


@BIG
@given(SNAPSHOTS)
def test_any_group_can_be_said(snapshot: Snapshot) -> None:
    text = status(snapshot)
    if not snapshot.state.is_live:
        assert text == NO_GROUP
        return
    for each in snapshot.ranks:
        assert each.state.rstrip() in text
        assert all(say_bar(bar) in text for bar in each.bars)
    assert all(say_event(event) in text for event in snapshot.events[-SHOWN_EVENTS:])
    assert snapshot.alarm in text


def test_the_line_of_a_script_has_its_file() -> None:
    rank = replace(ONE, line=12, file="train.py", seconds=0.0)
    assert say_line(rank) == "train.py:12"
    assert say_line(replace(rank, file="", seconds=3.0)).startswith("12 for 3")


def test_no_share_of_a_core_is_shown_before_it_is_known() -> None:
    assert say_cpu(replace(ONE, cpu=-1.0, memory=1 << 20)) == ""
    assert say_cpu(replace(ONE, cpu=12.4, memory=1 << 20)) == "12 %"
