"""A snapshot: what each rank does, in words, from what the lifecycle and the ranks say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from arrivals import letters

from nbddp.lifecycle.states import GroupState, Life, RankLife, RankState
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.record.folder import RunFolder
from nbddp.record.snapshot import RankSnapshot, Snapshot, take
from nbddp.record.timeline import TimeLine
from nbddp.record.whereabouts import LoopProgress, Whereabouts
from nbddp.wire.messages import CellEnded, Failure, Metrics, Progress, Pulse, Ready

Look = Callable[..., Snapshot]

RUNNING = Life(
    state=GroupState.RUNNING,
    attempt=2,
    ranks=(RankLife(0, RankState.RUNNING), RankLife(1, RankState.RUNNING)),
)
IDLE = replace(
    RUNNING,
    state=GroupState.IDLE,
    ranks=(RankLife(0, RankState.IDLE), RankLife(1, RankState.IDLE)),
)
PULSE = Pulse(
    cell=7,
    line=3,
    code="loss.backward()",
    function="backward",
    last="all_reduce #4 float [8]",
    last_cell=7,
    cpu=97.5,
    memory=5 << 20,
    gpu="8f2a",
    gpu_name="NVIDIA T4",
    gpu_memory=3 << 30,
    gpu_reserved=4 << 30,
)


@pytest.fixture
def cell() -> CellHandle:
    return CellHandle(7, CellRequest(source="x"), (0, 1), lambda _: None, attempt=2)


@pytest.fixture
def whereabouts() -> Whereabouts:
    whereabouts = Whereabouts(is_stopped=lambda _rank: False)
    whereabouts.begin_cell([0, 1], now=time.monotonic())
    return whereabouts


@pytest.fixture
def time_line() -> TimeLine:
    return TimeLine(lambda _text: None)


@pytest.fixture
def look(whereabouts: Whereabouts, time_line: TimeLine) -> Look:
    """Takes a snapshot of a group, with or without a cell."""

    def take_one(life: Life, cell: CellHandle | None = None, **more: Any) -> Snapshot:
        more.setdefault("ready", {})
        return take(life, cell=cell, whereabouts=whereabouts, time_line=time_line, **more)

    return take_one


def rank_of(snapshot: Snapshot, rank: int) -> RankSnapshot:
    [found] = [each for each in snapshot.ranks if each.rank == rank]
    return found


def state_of(snapshot: Snapshot, rank: int) -> tuple[str, bool]:
    found = rank_of(snapshot, rank)
    return found.state, found.is_well


def well() -> CellEnded:
    return CellEnded(cell=7, seconds=0.1, in_group=True)


def badly(*, is_interrupted: bool = False) -> CellEnded:
    failure = Failure(name="ValueError", text="no", traceback="Traceback", line=3, at=1.0)
    return replace(well(), failure=asdict(failure), is_interrupted=is_interrupted)


def with_rank(life: Life, rank: RankLife) -> Life:
    ranks = tuple(rank if each.rank == rank.rank else each for each in life.ranks)
    return replace(life, ranks=ranks)


# ---- the state of a rank


def test_a_rank_in_a_cell_is_running_and_well(look: Look, cell: CellHandle) -> None:
    snapshot = look(RUNNING, cell)
    assert [(each.rank, each.state, each.is_well) for each in snapshot.ranks] == [
        (0, "running", True),
        (1, "running", True),
    ]
    assert snapshot.alive == [0, 1]


def test_a_rank_that_waits_in_a_collective_is_waiting(
    look: Look, cell: CellHandle, whereabouts: Whereabouts
) -> None:
    whereabouts.note(1, replace(PULSE, collective=PULSE.last, seconds=2.0), time.monotonic())
    snapshot = look(RUNNING, cell)
    assert state_of(snapshot, 1) == ("waiting", True)
    assert state_of(snapshot, 0) == ("running", True)


def test_a_rank_that_waited_in_an_earlier_cell_is_not_waiting(
    look: Look, cell: CellHandle, whereabouts: Whereabouts
) -> None:
    whereabouts.note(1, replace(PULSE, cell=6, collective=PULSE.last), time.monotonic())
    each = rank_of(look(RUNNING, cell), 1)
    assert (each.state, each.line, each.code) == ("running", 0, "")


def test_a_collective_of_an_earlier_cell_is_not_shown_and_one_of_this_cell_stays(
    look: Look, cell: CellHandle, whereabouts: Whereabouts
) -> None:
    whereabouts.note(1, replace(PULSE, cell=0, last_cell=6), time.monotonic())
    assert rank_of(look(RUNNING, cell), 1).collective == ""
    whereabouts.note(1, replace(PULSE, cell=0, last_cell=7), time.monotonic())
    assert rank_of(look(RUNNING, cell), 1).collective == PULSE.last


def test_a_rank_that_is_through_is_done_while_others_run(look: Look, cell: CellHandle) -> None:
    cell.note_report(0, well())
    snapshot = look(with_rank(RUNNING, RankLife(0, RankState.IDLE)), cell)
    assert state_of(snapshot, 0) == ("done", True)
    assert state_of(snapshot, 1) == ("running", True)


def test_a_rank_that_failed_says_how(look: Look, cell: CellHandle) -> None:
    cell.note_report(1, badly())
    snapshot = look(with_rank(RUNNING, RankLife(1, RankState.IDLE)), cell)
    assert state_of(snapshot, 1) == ("ValueError: no, line 3", False)


def test_a_rank_that_died_says_how_and_is_not_alive(look: Look, cell: CellHandle) -> None:
    cell.note_exit(1, -9)
    snapshot = look(with_rank(RUNNING, RankLife(1, RankState.GONE, -9)), cell)
    assert state_of(snapshot, 1) == ("was killed by SIGKILL", False)
    assert not rank_of(snapshot, 1).is_alive
    assert snapshot.alive == [0]


def test_a_rank_that_left_in_good_order_is_well(look: Look) -> None:
    snapshot = look(with_rank(RUNNING, RankLife(1, RankState.GONE, 0)))
    assert state_of(snapshot, 1) == ("exited with code 0", True)


def test_a_rank_that_the_cell_does_not_run_on_has_its_own_state(look: Look) -> None:
    alone = CellHandle(7, CellRequest(source="x"), (1,), lambda _: None, attempt=2)
    alone.note_report(1, well())
    life = with_rank(RUNNING, RankLife(0, RankState.IDLE))
    assert state_of(look(life, alone), 0) == ("ready", True)


def test_asked_what_the_group_does_now_a_snapshot_does_not_tell_of_the_cell(
    look: Look, cell: CellHandle
) -> None:
    cell.note_report(0, well())
    cell.note_report(1, badly())
    snapshot = look(IDLE, cell, is_for_cell=False)
    assert [(each.state, each.is_well) for each in snapshot.ranks] == [("ready", True)] * 2


def test_a_rank_is_the_cause_when_it_went_wrong_by_itself(look: Look, cell: CellHandle) -> None:
    cell.note_report(0, badly())
    cell.note_report(1, badly(is_interrupted=True))
    snapshot = look(IDLE, cell)
    assert [(each.is_well, each.is_cause) for each in snapshot.ranks] == [
        (False, True),
        (False, False),
    ]
    assert rank_of(look(with_rank(IDLE, RankLife(1, RankState.GONE, 3))), 1).is_cause
    assert not rank_of(look(with_rank(IDLE, RankLife(1, RankState.GONE, 0))), 1).is_cause
    assert not rank_of(look(IDLE), 1).is_cause


def test_a_rank_that_the_user_ended_is_neither_well_nor_the_cause(
    look: Look, cell: CellHandle
) -> None:
    cell.ended_by = "restart"
    cell.note_exit(1, -15)
    each = rank_of(look(with_rank(RUNNING, RankLife(1, RankState.GONE, -15)), cell), 1)
    assert (each.state, each.is_well, each.is_cause) == ("ended by the restart", False, False)


# ---- another group than the cell's


def test_when_the_group_was_started_anew_the_ranks_are_those_of_the_cell(
    look: Look, cell: CellHandle
) -> None:
    cell.note_exit(1, -9)
    anew = replace(RUNNING, attempt=3, ranks=tuple(RankLife(rank) for rank in range(4)))
    snapshot = look(anew, cell)
    assert [(each.rank, each.state, each.is_alive) for each in snapshot.ranks] == [
        (0, "disappeared", False),
        (1, "was killed by SIGKILL", False),
    ]
    assert not any(each.is_well for each in snapshot.ranks)
    assert snapshot.attempt == 3


def test_when_the_group_was_started_anew_it_can_be_asked_for(look: Look, cell: CellHandle) -> None:
    anew = replace(RUNNING, attempt=3, ranks=tuple(RankLife(rank) for rank in range(4)))
    snapshot = look(anew, cell, is_for_cell=False)
    assert [(each.rank, each.state) for each in snapshot.ranks] == [
        (rank, "starting") for rank in range(4)
    ]


def test_when_the_group_is_off_the_ranks_are_those_of_the_cell(
    look: Look, cell: CellHandle
) -> None:
    off = Life(state=GroupState.OFF, attempt=2)
    snapshot = look(off, cell)
    assert [(each.rank, each.state) for each in snapshot.ranks] == [
        (0, "disappeared"),
        (1, "disappeared"),
    ]
    assert look(off, cell, is_for_cell=False).ranks == ()
    assert look(off).ranks == ()


# ---- what is known of a rank


def test_a_rank_is_shown_as_its_last_sign_of_life_said(
    look: Look, cell: CellHandle, whereabouts: Whereabouts
) -> None:
    whereabouts.note(1, PULSE, time.monotonic())
    ready = {1: Ready(pid=4711, device="cuda:1", backend="nccl", host="here")}
    each = rank_of(look(RUNNING, cell, ready=ready), 1)
    assert (each.line, each.code) == (3, "loss.backward()")
    assert each.collective == "all_reduce #4 float [8]"
    assert (each.cpu, each.memory) == (97.5, 5 << 20)
    assert (each.gpu, each.gpu_memory, each.gpu_reserved) == ("NVIDIA T4", 3 << 30, 4 << 30)
    assert (each.pid, each.device) == (4711, "cuda:1")


def test_a_rank_that_moves_on_has_been_nowhere_for_long(
    look: Look, cell: CellHandle, whereabouts: Whereabouts
) -> None:
    whereabouts.note(1, PULSE, time.monotonic() - 5.0)
    assert rank_of(look(RUNNING, cell), 1).seconds == 0.0


def test_the_time_at_a_place_goes_on_between_two_signs(
    look: Look, cell: CellHandle, whereabouts: Whereabouts
) -> None:
    whereabouts.note(1, replace(PULSE, seconds=2.0), time.monotonic() - 5.0)
    assert 7.0 <= rank_of(look(RUNNING, cell), 1).seconds < 12.0


def test_a_rank_between_two_cells_is_on_no_line(look: Look, whereabouts: Whereabouts) -> None:
    whereabouts.note(0, replace(PULSE, cell=0), time.monotonic())
    each = rank_of(look(IDLE), 0)
    assert (each.state, each.line, each.code, each.seconds) == ("ready", 0, "", 0.0)
    assert each.memory == 5 << 20


def test_steps_and_bars_are_those_that_the_rank_reported(
    look: Look, cell: CellHandle, whereabouts: Whereabouts
) -> None:
    rows = [[100.0 + second, 10 * second, {"loss": 1.0}] for second in range(5)]
    whereabouts.note(0, Metrics(rows=rows, missed=3), time.monotonic())
    whereabouts.note(0, Progress(bars=[["epoch", 1, 2, 4.0]]), time.monotonic())
    snapshot = look(RUNNING, cell)
    first, second = snapshot.ranks
    assert (first.step, first.steps_per_second) == (40.0, 10.0)
    assert first.bars == (LoopProgress("epoch", 1, 2, 4.0),)
    assert (second.step, second.steps_per_second, second.bars) == (None, 0.0, ())
    assert snapshot.missed == 3


# ---- the group


def test_backends_and_devices_are_those_of_the_ranks_in_order(look: Look) -> None:
    ready = {
        1: Ready(pid=2, device="cuda:1", backend="nccl", host="here"),
        0: Ready(pid=1, device="cuda:0", backend="nccl", host="here"),
    }
    snapshot = look(RUNNING, ready=ready)
    assert (snapshot.backend, snapshot.devices) == ("nccl", ("cuda:0", "cuda:1"))
    assert (snapshot.state, snapshot.attempt) == (GroupState.RUNNING, 2)
    assert look(RUNNING).backend == ""


def test_refused_messages_and_the_alarm_are_passed_on(look: Look, whereabouts: Whereabouts) -> None:
    whereabouts._hang_watch.alarm = "no progress"
    snapshot = look(RUNNING, refused=3)
    assert (snapshot.refused, snapshot.alarm) == (3, "no progress")


def test_the_run_is_named_for_its_folder(look: Look, time_line: TimeLine) -> None:
    time_line.folder = cast(RunFolder, SimpleNamespace(path=Path("/a/b/2025-first")))
    snapshot = look(RUNNING)
    assert (snapshot.folder, snapshot.run) == ("/a/b/2025-first", "2025-first")
    time_line.folder = None
    assert (look(RUNNING).folder, look(RUNNING).run) == ("", "")


def test_only_what_happened_since_the_cell_began_is_told(
    look: Look, time_line: TimeLine, cell: CellHandle
) -> None:
    time_line.record("exit", rank=0)
    time.sleep(0.002)
    cell = CellHandle(8, CellRequest(source="x"), (0, 1), lambda _: None, attempt=2)
    time_line.record("failure", rank=1)
    snapshot = look(RUNNING, cell)
    assert [event.kind for event in snapshot.events] == ["failure"]
    assert snapshot.began == cell.began_at
    assert snapshot.began <= snapshot.at


def test_a_cell_has_its_time_to_its_end_and_no_further(look: Look, cell: CellHandle) -> None:
    first = look(RUNNING, cell).seconds
    assert look(RUNNING, cell).seconds > first
    cell.finish()
    ended = look(RUNNING, cell).seconds
    assert look(RUNNING, cell).seconds == ended


def test_without_a_cell_what_happened_is_told_from_the_start_of_this_attempt(
    look: Look, time_line: TimeLine
) -> None:
    time_line.record("start", attempt=1)
    time_line.record("exit", rank=0)
    time.sleep(0.002)
    time_line.record("start", attempt=2)
    time_line.record("exit", rank=1)
    snapshot = look(IDLE)
    assert [event.kind for event in snapshot.events] == ["start", "exit"]
    assert snapshot.began == snapshot.events[0].at
    assert 0 <= snapshot.seconds < 60


def test_without_a_cell_and_a_start_it_all_begins_now(look: Look) -> None:
    snapshot = look(Life())
    assert snapshot.events == ()
    assert snapshot.began == snapshot.at
    assert snapshot.seconds == 0.0


def test_what_a_cell_on_ranks_that_are_gone_reported_is_not_shown_of_those_of_now(
    look: Look, cell: CellHandle, whereabouts: Whereabouts, time_line: TimeLine
) -> None:
    rows = [[100.0 + second, 10 * second, {"loss": 1.0}] for second in range(5)]
    whereabouts.note(0, Metrics(rows=rows, missed=3), time.monotonic())
    whereabouts.note(0, Progress(bars=[["epoch", 1, 2, 4.0]]), time.monotonic())
    time_line.record("start", attempt=3)
    snapshot = look(replace(IDLE, attempt=3), cell, is_for_cell=False)
    first = snapshot.ranks[0]
    assert (first.step, first.bars, snapshot.missed) == (None, (), 0)
    assert [event.kind for event in snapshot.events] == ["start"]


def test_a_rank_that_the_others_wait_for_has_its_lag_while_it_lives(
    look: Look, cell: CellHandle, whereabouts: Whereabouts
) -> None:
    for rank, late in ((0, 0.0), (1, 0.1)):
        for letter in letters([step * 0.3 + late for step in range(100)], cell=5):
            whereabouts.note(rank, letter, time.monotonic())
    assert rank_of(look(RUNNING, cell), 0).lag is None
    lag = rank_of(look(RUNNING, cell), 1).lag
    assert lag is not None
    assert (round(lag.share, 2), lag.is_waited_for) == (0.33, True)
    awaited = look(RUNNING, cell).awaited
    assert awaited is not None
    assert (awaited.rank, awaited.title) == (1, "all_reduce float [72]")
    assert rank_of(look(RUNNING), 1).lag is None, "there is no cell"
    dead = with_rank(RUNNING, RankLife(1, RankState.GONE, -9))
    assert rank_of(look(dead, cell), 1).lag is None


def test_ranks_that_do_not_meet_are_told_by_their_steps(
    look: Look, cell: CellHandle, whereabouts: Whereabouts
) -> None:
    for rank, pause in ((0, 0.3), (1, 0.4)):
        rows = [[1000 + step * pause, step, {"loss": 1.0}] for step in range(50)]
        whereabouts.note(rank, Metrics(rows=rows), time.monotonic())
    assert rank_of(look(RUNNING, cell), 0).lag is None
    lag = rank_of(look(RUNNING, cell), 1).lag
    assert lag is not None
    assert (round(lag.share, 2), lag.is_waited_for) == (0.25, False)
