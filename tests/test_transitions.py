"""The worker group's life: what follows from every event, in every state.

The first part is the table of transitions, a sentence each; the second, in
``test_lifecycle_orders.py``, plays any order of events.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nbddp.lifecycle.events import (
    GRACE,
    Action,
    Alarm,
    Event,
    Exited,
    Finished,
    InterruptAsked,
    Kill,
    KillAsked,
    NotStarted,
    Rang,
    RankEnded,
    RankNoticed,
    RankReady,
    RankUnable,
    Refuse,
    Remark,
    RestartAsked,
    ReturnAsked,
    RunAsked,
    SendCell,
    SendInterrupt,
    SendLeave,
    SendRegroup,
    SetAlarm,
    Spawn,
    StartAsked,
    Started,
    StopAsked,
    Stopped,
    TakeBack,
    Terminate,
)
from nbddp.lifecycle.reasons import RAN_TO_ITS_END
from nbddp.lifecycle.states import GroupState, Life, RankState
from nbddp.lifecycle.transitions import (
    CLEANUP,
    DEATH_PATIENCE,
    PEERS_PATIENCE,
    START_PATIENCE,
    STUCK_AFTER,
    advance,
)

START = StartAsked(world_size=2)


def ready(rank: int, attempt: int = 1) -> RankReady:
    return RankReady(attempt=attempt, rank=rank)


def unable(rank: int, attempt: int = 1) -> RankUnable:
    return RankUnable(attempt=attempt, rank=rank, reason="OSError: no")


def died(rank: int, exitcode: int | None = -9, attempt: int = 1) -> Exited:
    return Exited(attempt=attempt, rank=rank, exitcode=exitcode)


def run(*ranks: int, cell: int = 1, needs_group: bool | None = True) -> RunAsked:
    return RunAsked(cell=cell, ranks=ranks or (0, 1), needs_group=needs_group)


def ended(
    rank: int,
    *,
    cell: int = 1,
    is_ok: bool = True,
    in_group: bool = True,
    sequence: int = 0,
    attempt: int = 1,
) -> RankEnded:
    return RankEnded(
        attempt=attempt,
        rank=rank,
        cell=cell,
        is_ok=is_ok,
        in_group=in_group,
        sequence=sequence,
    )


def noticed(rank: int, cell: int = 1, attempt: int = 1) -> RankNoticed:
    return RankNoticed(attempt=attempt, rank=rank, cell=cell)


def rang(
    alarm: Alarm,
    cell: int = 1,
    attempt: int = 1,
    stopped: tuple[tuple[int, int], ...] = (),
    working: tuple[int, ...] = (),
) -> Rang:
    return Rang(alarm=alarm, attempt=attempt, cell=cell, stopped=stopped, working=working)


def alarm(kind: Alarm, seconds: float, cell: int = 1, attempt: int = 1) -> SetAlarm:
    return SetAlarm(alarm=kind, attempt=attempt, cell=cell, seconds=seconds)


def play(*events: Event, life: Life | None = None) -> tuple[Life, list[Action]]:
    """The life after all events, and what the last of them made the session do."""
    life, actions = life or Life(), []
    for event in events:
        life, actions = advance(life, event)
    return life, actions


def after(*events: Event) -> Life:
    return play(*events)[0]


OFF = Life()
STARTING = after(START)
IDLE = after(START, ready(0), ready(1))
RUNNING = after(START, ready(0), ready(1), run())
INTERRUPTING = after(START, ready(0), ready(1), run(), InterruptAsked())
BROKEN = after(START, ready(0), ready(1), died(1))
ALL_GONE = after(START, ready(0), ready(1), died(0), died(1))
STOPPING = after(START, ready(0), ready(1), StopAsked())
EVERY = {
    "off": OFF,
    "starting": STARTING,
    "idle": IDLE,
    "running": RUNNING,
    "interrupting": INTERRUPTING,
    "broken": BROKEN,
    "all gone": ALL_GONE,
    "stopping": STOPPING,
}
each_life = pytest.mark.parametrize("life", EVERY.values(), ids=EVERY.keys())


def test_the_lives_above_are_in_the_states_that_they_are_named_for() -> None:
    assert [life.state for life in EVERY.values()] == [
        GroupState.OFF,
        GroupState.STARTING,
        GroupState.IDLE,
        GroupState.RUNNING,
        GroupState.INTERRUPTING,
        GroupState.BROKEN,
        GroupState.BROKEN,
        GroupState.STOPPING,
    ]


# ---- start


def test_a_start_spawns_all_ranks_and_sets_one_alarm() -> None:
    life, actions = play(START)
    assert life.state is GroupState.STARTING
    assert life.alive == [0, 1]
    assert actions == [
        Spawn(attempt=1, world_size=2, joins_group=True),
        alarm(Alarm.START, START_PATIENCE, cell=0),
    ]


@pytest.mark.parametrize("joins_group", [True, False])
def test_a_start_says_whether_there_is_a_process_group(joins_group: bool) -> None:
    life, actions = play(StartAsked(world_size=1, joins_group=joins_group))
    assert life.has_group is joins_group
    assert actions[0] == Spawn(attempt=1, world_size=1, joins_group=joins_group)


def test_the_group_has_started_when_every_rank_is_ready_and_not_before() -> None:
    life, actions = play(START, ready(1))
    assert (life.state, actions) == (GroupState.STARTING, [])
    life, actions = play(ready(0), life=life)
    assert (life.state, actions) == (GroupState.IDLE, [Started()])


def test_a_rank_that_says_it_is_ready_twice_counts_once() -> None:
    life, actions = play(START, ready(1), ready(1))
    assert (life.state, actions) == (GroupState.STARTING, [])


def test_a_rank_that_is_unable_ends_the_start_and_all_ranks() -> None:
    life, actions = play(START, ready(0), unable(1))
    assert life.state is GroupState.STOPPING
    assert actions == [
        NotStarted(reason="rank 1 could not start: OSError: no"),
        Kill(ranks=(0, 1)),
    ]


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [(-9, "was killed by SIGKILL"), (1, "exited with code 1"), (None, "disappeared")],
)
def test_a_rank_that_dies_while_it_starts_ends_the_start_with_its_exit_in_words(
    exitcode: int | None, words: str
) -> None:
    life, actions = play(START, died(1, exitcode))
    assert life.state is GroupState.STOPPING
    assert actions == [NotStarted(reason=f"rank 1 {words} while it started"), Kill(ranks=(0,))]


def test_an_only_rank_that_dies_while_it_starts_leaves_the_group_off() -> None:
    life, actions = play(StartAsked(world_size=1), died(0, 3))
    assert life.state is GroupState.OFF
    assert actions == [
        NotStarted(reason="rank 0 exited with code 3 while it started"),
        Stopped(),
    ]


def test_a_start_that_takes_too_long_names_the_ranks_that_are_late() -> None:
    life, actions = play(StartAsked(world_size=4), ready(1), rang(Alarm.START, cell=0))
    assert life.state is GroupState.STOPPING
    assert actions == [
        NotStarted(reason="ranks 0,2-3 did not get ready in 90 s"),
        Kill(ranks=(0, 1, 2, 3)),
    ]


def test_a_failed_start_is_told_once_and_over_when_every_process_is_gone() -> None:
    life, actions = play(START, unable(1), died(1, 1))
    assert (life.state, actions) == (GroupState.STOPPING, [])
    life, actions = play(died(0), life=life)
    assert (life.state, actions) == (GroupState.OFF, [Stopped()])


@pytest.mark.parametrize("life", [IDLE, RUNNING, INTERRUPTING, BROKEN], ids=lambda it: it.state)
def test_news_of_a_start_that_is_over_changes_nothing(life: Life) -> None:
    for event in (ready(0), unable(0), rang(Alarm.START, cell=0)):
        assert advance(life, event) == (life, [])


@pytest.mark.parametrize(
    ("life", "words"),
    [
        (STARTING, "the worker group is starting already"),
        (IDLE, "the worker group is ready already"),
        (RUNNING, "the worker group is running a cell already"),
        (INTERRUPTING, "the worker group is interrupting the cell already"),
        (STOPPING, "the worker group is stopping already"),
    ],
    ids=lambda it: it.state if isinstance(it, Life) else "",
)
def test_a_second_start_is_refused_with_what_the_group_does(life: Life, words: str) -> None:
    assert advance(life, START) == (life, [Refuse(reason=words)])


def test_a_start_beside_a_dead_rank_is_refused_in_a_sentence() -> None:
    life, [refusal] = advance(BROKEN, START)
    assert life == BROKEN
    assert isinstance(refusal, Refuse)
    assert "is a rank is gone" not in refusal.reason


# ---- cells


def test_a_cell_goes_to_all_its_ranks_at_once() -> None:
    life, actions = play(run(cell=5), life=IDLE)
    assert life.state is GroupState.RUNNING
    assert [each.state for each in life.ranks] == [RankState.RUNNING, RankState.RUNNING]
    assert actions == [SendCell(cell=5, ranks=(0, 1))]


def test_a_cell_is_finished_when_its_last_rank_is_through() -> None:
    life, actions = play(ended(1), life=RUNNING)
    assert (life.state, actions) == (GroupState.RUNNING, [])
    life, actions = play(ended(0), life=life)
    assert (life.state, actions) == (GroupState.IDLE, [Finished(cell=1)])
    assert life.cell is None
    assert life.has_group


def test_a_cell_on_some_ranks_leaves_the_others_alone() -> None:
    life, actions = play(run(1, cell=3), life=IDLE)
    assert actions == [SendCell(cell=3, ranks=(1,))]
    assert [each.state for each in life.ranks] == [RankState.IDLE, RankState.RUNNING]
    life, actions = play(ended(1, cell=3), life=life)
    assert (life.state, actions) == (GroupState.IDLE, [Finished(cell=3)])


def test_a_rank_that_does_not_run_the_cell_cannot_end_it() -> None:
    life = after(START, ready(0), ready(1), run(1))
    assert advance(life, ended(0)) == (life, [])


def test_a_rank_that_ends_twice_counts_once() -> None:
    life = after(START, ready(0), ready(1), run(), ended(0))
    assert advance(life, ended(0)) == (life, [])


@pytest.mark.parametrize("life", [RUNNING, INTERRUPTING], ids=lambda it: it.state)
def test_a_second_cell_is_refused_while_one_runs(life: Life) -> None:
    words = "a cell is still running; `%ddp wait` waits for it, `%ddp interrupt` ends it"
    assert advance(life, run(cell=2)) == (life, [Refuse(reason=words)])


@pytest.mark.parametrize(
    ("life", "words"),
    [
        (OFF, "the worker group is not started"),
        (STARTING, "the worker group is starting"),
        (STOPPING, "the worker group is stopping"),
    ],
    ids=lambda it: it.state if isinstance(it, Life) else "",
)
def test_a_cell_is_refused_while_no_rank_could_run_it(life: Life, words: str) -> None:
    assert advance(life, run()) == (life, [Refuse(reason=words)])


@pytest.mark.parametrize("rank", [2, -1, 100])
def test_a_cell_for_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    words = f"there is no rank {rank}; the group has ranks 0 to 1"
    assert advance(IDLE, run(0, rank)) == (IDLE, [Refuse(reason=words)])


def test_a_cell_for_no_rank_at_all_is_refused() -> None:
    life, actions = advance(IDLE, RunAsked(cell=1, ranks=()))
    assert life == IDLE
    assert [type(action) for action in actions] == [Refuse]


def test_a_rank_named_twice_gets_the_cell_once() -> None:
    _, actions = advance(IDLE, RunAsked(cell=1, ranks=(1, 1)))
    sent = [action.ranks for action in actions if isinstance(action, SendCell)]
    assert sent in ([(1,)], [])  # once, or refused


def test_a_cell_for_a_dead_rank_is_refused_with_all_ways_out() -> None:
    words = (
        "rank 1 was killed by SIGKILL; `%ddp heal` replaces it, `%ddp restart` restarts all ranks, "
        "`%%ddp --ranks 0` uses the others"
    )
    assert advance(BROKEN, run()) == (BROKEN, [Refuse(reason=words)])


def test_when_every_rank_is_dead_only_a_restart_is_offered() -> None:
    words = "rank 0 was killed by SIGKILL; `%ddp restart` restarts all ranks"
    assert advance(ALL_GONE, run()) == (ALL_GONE, [Refuse(reason=words)])


def test_the_survivors_of_a_dead_rank_run_cells() -> None:
    life, actions = play(run(0, cell=2), life=BROKEN)
    assert actions == [SendCell(cell=2, ranks=(0,))]
    life, actions = play(ended(0, cell=2, in_group=False), life=life)
    assert (life.state, actions) == (GroupState.BROKEN, [Finished(cell=2)])


# ---- the process group


def test_a_cell_finds_its_group_as_it_was() -> None:
    life = after(START, ready(0), ready(1), run(), ended(0, sequence=3), ended(1, sequence=3))
    assert play(run(cell=2), life=life)[1] == [SendCell(cell=2, ranks=(0, 1))]


def test_the_group_is_formed_anew_when_a_cell_lost_it_on_any_rank() -> None:
    life = after(START, ready(0), ready(1), run(), ended(0), ended(1, in_group=False))
    assert not life.has_group
    life, actions = play(run(0, cell=2), life=life)
    assert actions == [
        SendRegroup(ranks=(0, 1), generation=1, form=True),
        SendCell(cell=2, ranks=(0,)),
    ]
    assert life.has_group


def test_a_cell_on_some_ranks_makes_no_group_whole_that_others_have_lost() -> None:
    lost = after(START, ready(0), ready(1), run(), ended(0, in_group=False), ended(1))
    assert not lost.has_group
    life, _ = play(run(1, cell=2, needs_group=False), ended(1, cell=2), life=lost)
    assert not life.has_group
    _, actions = play(run(cell=3), life=life)
    assert any(isinstance(each, SendRegroup) and each.form for each in actions)


def test_the_group_is_formed_anew_when_the_ranks_left_at_different_collectives() -> None:
    life = after(
        START, ready(0), ready(1), run(), ended(0, is_ok=False, sequence=3), ended(1, sequence=4)
    )
    assert play(run(cell=2), life=life)[1][0] == SendRegroup(ranks=(0, 1), generation=1, form=True)


def test_the_group_stays_when_all_failed_at_the_same_collective() -> None:
    life = after(
        START,
        ready(0),
        ready(1),
        run(),
        ended(0, is_ok=False, sequence=3),
        ended(1, is_ok=False, sequence=3),
    )
    assert life.has_group


def test_every_new_group_is_of_a_new_generation() -> None:
    life = IDLE
    for number in (1, 2, 3):
        life, actions = play(run(cell=number), life=life)
        regroups = [each.generation for each in actions if isinstance(each, SendRegroup)]
        assert regroups == ([number - 1] if number > 1 else [])
        life, _ = play(ended(0, cell=number, in_group=False), ended(1, cell=number), life=life)


def test_a_cell_that_wants_no_group_has_the_ranks_leave_theirs() -> None:
    life, actions = play(run(cell=2, needs_group=False), life=IDLE)
    assert actions[0] == SendRegroup(ranks=(0, 1), generation=1, form=False)
    assert not life.has_group


@pytest.mark.parametrize("lost", [{"in_group": False}, {"is_ok": False, "sequence": 3}])
def test_a_cell_that_wants_no_group_has_the_ranks_leave_what_a_failed_one_left(
    lost: dict[str, Any],
) -> None:
    life, _ = play(ended(0), ended(1, **lost), life=RUNNING)
    assert not life.has_group
    _, actions = play(run(cell=2, needs_group=False), life=life)
    assert actions[0] == SendRegroup(ranks=(0, 1), generation=1, form=False)


def test_a_group_that_a_cell_made_by_itself_is_kept() -> None:
    life = after(StartAsked(world_size=2, joins_group=False), ready(0), ready(1))
    life, _ = play(run(needs_group=False), ended(0), ended(1), life=life)
    assert life.has_group
    assert play(run(cell=2), life=life)[1] == [SendCell(cell=2, ranks=(0, 1))]


@pytest.mark.parametrize("has_group", [True, False])
def test_a_cell_that_does_not_care_leaves_the_group_as_it_is(has_group: bool) -> None:
    life = replace(IDLE, has_group=has_group)
    life, actions = play(run(cell=2, needs_group=None), life=life)
    assert actions == [SendCell(cell=2, ranks=(0, 1))]
    assert life.has_group is has_group


def test_no_group_is_formed_with_a_rank_missing() -> None:
    _, actions = play(run(0, cell=2), life=BROKEN)
    assert actions == [SendCell(cell=2, ranks=(0,))]


def test_ranks_leave_their_group_with_a_rank_missing() -> None:
    life, actions = play(run(0, cell=2, needs_group=False), life=BROKEN)
    assert actions[0] == SendRegroup(ranks=(0,), generation=1, form=False)
    assert not life.has_group


def test_the_group_is_lost_with_a_rank() -> None:
    assert not BROKEN.has_group
    assert not after(START, ready(0), ready(1), run(), died(1), ended(0)).has_group


# ---- a rank fails


def test_the_first_failure_gives_the_peers_a_moment() -> None:
    life, actions = play(ended(1, is_ok=False), life=RUNNING)
    assert life.state is GroupState.RUNNING
    assert actions == [alarm(Alarm.PEERS, PEERS_PATIENCE)]


def test_a_dead_rank_gives_the_peers_a_shorter_one() -> None:
    life, actions = play(died(1), life=RUNNING)
    assert life.state is GroupState.RUNNING
    said = Remark(text="rank 1 was killed by SIGKILL")
    assert actions == [said, alarm(Alarm.PEERS, DEATH_PATIENCE)]


def test_the_last_rank_to_die_is_told_by_the_verdict_alone() -> None:
    assert Remark not in map(type, play(ended(0), died(1), life=RUNNING)[1])


def test_a_second_failure_sets_no_second_alarm() -> None:
    life = after(StartAsked(world_size=3), ready(0), ready(1), ready(2), run(0, 1, 2))
    life, _ = play(ended(0, is_ok=False), life=life)
    assert play(ended(1, is_ok=False), life=life)[1] == []


def test_a_death_that_is_heard_of_after_a_failure_makes_the_moment_shorter() -> None:
    life = after(StartAsked(world_size=4), *map(ready, range(4)), run(0, 1, 2, 3))
    life, _ = play(ended(0, is_ok=False), life=life)  # of the connection to rank 1
    said = Remark(text="rank 1 was killed by SIGKILL")
    life, actions = play(died(1), life=life)
    assert actions == [said, alarm(Alarm.PEERS, DEATH_PATIENCE)]
    assert alarm(Alarm.PEERS, DEATH_PATIENCE) not in play(died(2), life=life)[1]


def test_a_success_sets_no_alarm() -> None:
    assert play(ended(0), life=RUNNING)[1] == []


def test_the_last_rank_to_fail_ends_the_cell_without_an_alarm() -> None:
    life, actions = play(ended(0), ended(1, is_ok=False), life=RUNNING)
    assert (life.state, actions) == (GroupState.IDLE, [Finished(cell=1)])


def test_peers_that_still_wait_are_freed_when_their_moment_is_over() -> None:
    life, actions = play(ended(1, is_ok=False), rang(Alarm.PEERS), life=RUNNING)
    assert life.state is GroupState.INTERRUPTING
    assert actions == [
        SendInterrupt(cell=1, ranks=(0,)),
        alarm(Alarm.GRACE, GRACE),
        alarm(Alarm.CLEANUP, CLEANUP),
    ]


def test_peers_of_a_dead_rank_are_told_that_they_wait_in_vain() -> None:
    _, actions = play(died(1), rang(Alarm.PEERS), life=RUNNING)
    assert actions[0] == SendInterrupt(cell=1, ranks=(0,), is_for_death=True)


def test_peers_that_the_user_interrupted_already_are_not_interrupted_again() -> None:
    life = after(START, ready(0), ready(1), run(), ended(1, is_ok=False), InterruptAsked())
    assert advance(life, rang(Alarm.PEERS)) == (life, [])


def test_a_rank_that_dies_in_a_cell_leaves_a_broken_group_whose_cell_finished() -> None:
    life, actions = play(died(1), ended(0, is_ok=False), life=RUNNING)
    assert (life.state, actions) == (GroupState.BROKEN, [Finished(cell=1)])
    assert life.alive == [0]


def test_a_cell_finishes_when_all_its_ranks_died() -> None:
    life, actions = play(died(1), died(0), life=RUNNING)
    assert (life.state, actions) == (GroupState.BROKEN, [Finished(cell=1)])


def test_a_rank_that_dies_beside_a_cell_is_named_and_does_not_disturb_it() -> None:
    life = after(START, ready(0), ready(1), run(0))
    life, actions = play(died(1), life=life)
    assert (life.state, actions) == (
        GroupState.RUNNING,
        [Remark(text="rank 1 was killed by SIGKILL")],
    )
    life, actions = play(ended(0), life=life)
    assert (life.state, actions) == (GroupState.BROKEN, [Finished(cell=1)])


def test_a_rank_that_dies_after_it_was_through_is_named_and_does_not_disturb_the_cell() -> None:
    life, actions = play(ended(1), died(1), life=RUNNING)
    assert (life.state, actions) == (
        GroupState.RUNNING,
        [Remark(text="rank 1 was killed by SIGKILL")],
    )


def test_an_idle_rank_that_dies_breaks_the_group() -> None:
    life, actions = play(died(1, 3), life=IDLE)
    assert (life.state, actions) == (GroupState.BROKEN, [])
    assert life.ranks[1].exitcode == 3


def test_a_process_ends_only_once() -> None:
    assert advance(BROKEN, died(1, 0)) == (BROKEN, [])
    assert advance(IDLE, died(7)) == (IDLE, [])


# ---- interrupts


def test_an_interrupt_reaches_the_ranks_that_still_run_and_sets_three_alarms() -> None:
    life, actions = play(ended(0), InterruptAsked(), life=RUNNING)
    assert life.state is GroupState.INTERRUPTING
    assert actions == [
        SendInterrupt(cell=1, ranks=(1,)),
        alarm(Alarm.STUCK, STUCK_AFTER),
        alarm(Alarm.GRACE, GRACE),
        alarm(Alarm.CLEANUP, CLEANUP),
    ]


AGAIN = "rank 1: killed, as the cell was interrupted again"


def test_a_second_interrupt_kills_what_still_runs_once_the_first_had_its_second() -> None:
    life, actions = play(ended(0), rang(Alarm.STUCK), InterruptAsked(), life=INTERRUPTING)
    assert life.state is GroupState.INTERRUPTING
    assert actions == [Remark(text=AGAIN), Kill(ranks=(1,))]


def test_ranks_that_are_killed_for_not_answering_are_named_once_and_not_each() -> None:
    life, actions = play(rang(Alarm.GRACE), life=INTERRUPTING)
    text = "ranks 0-1 did not answer the interrupt in 5 s: killed"
    assert actions == [Remark(text=text), Kill(ranks=(0, 1))]
    life, actions = play(died(0), life=life)
    assert actions == []
    assert play(died(1), life=life)[1] == [Finished(cell=1)]


def test_a_double_click_does_not_kill_what_obeys_within_a_second() -> None:
    life, actions = play(InterruptAsked(), life=INTERRUPTING)
    assert actions == []
    life, actions = play(ended(0, is_ok=False), ended(1, is_ok=False), life=life)
    assert (life.state, actions) == (GroupState.IDLE, [Finished(cell=1)])


def test_after_a_double_click_the_user_is_told_before_another_interrupt_kills() -> None:
    """C code that ends by itself after some seconds keeps all names."""
    life, actions = play(InterruptAsked(), ended(0), rang(Alarm.STUCK), life=INTERRUPTING)
    assert [type(each) for each in actions] == [Remark]
    _, actions = play(InterruptAsked(), life=life)
    assert actions == [Remark(text=AGAIN), Kill(ranks=(1,))]


def test_the_users_first_interrupt_after_the_peers_were_freed_does_not_kill() -> None:
    life = after(START, ready(0), ready(1), run(), ended(1, is_ok=False), rang(Alarm.PEERS))
    _, actions = play(InterruptAsked(), life=life)
    assert actions[0] == SendInterrupt(cell=1, ranks=(0,))
    assert not any(isinstance(action, Kill) for action in actions)


def test_an_interrupted_cell_ends_with_every_rank_alive() -> None:
    life, actions = play(ended(0, is_ok=False), ended(1, is_ok=False), life=INTERRUPTING)
    assert (life.state, actions) == (GroupState.IDLE, [Finished(cell=1)])
    assert life.alive == [0, 1]


def test_of_an_interrupted_cell_that_ran_to_its_end_the_user_is_told_so() -> None:
    _, actions = play(ended(0), ended(1), life=INTERRUPTING)
    assert actions == [Remark(text=RAN_TO_ITS_END), Finished(cell=1)]
    _, actions = play(ended(0), ended(1, is_ok=False), life=INTERRUPTING)
    assert actions == [Finished(cell=1)]


def test_a_failure_in_an_interrupted_cell_sets_no_alarm() -> None:
    assert play(ended(0, is_ok=False), life=INTERRUPTING)[1] == []


@pytest.mark.parametrize("life", [OFF, IDLE, BROKEN, ALL_GONE])
def test_an_interrupt_of_nothing_does_nothing(life: Life) -> None:
    assert advance(life, InterruptAsked()) == (life, [])


def test_an_interrupt_of_a_start_stops_it() -> None:
    life, actions = play(START, ready(0), InterruptAsked())
    assert life.state is GroupState.STOPPING
    assert actions == [
        SendLeave(ranks=(0,)),
        Terminate(ranks=(1,)),
        alarm(Alarm.STOP, GRACE, cell=0),
    ]


def test_an_interrupt_of_a_stop_kills_at_once() -> None:
    life, actions = play(died(0, 0), InterruptAsked(), life=STOPPING)
    assert (life.state, actions) == (GroupState.STOPPING, [Kill(ranks=(1,))])


def test_after_a_second_the_user_is_told_which_ranks_are_deaf() -> None:
    _, actions = play(noticed(0), rang(Alarm.STUCK), life=INTERRUPTING)
    assert actions == [
        Remark(
            text="rank 1 did not answer the interrupt yet (in C code that does not return?); "
            "will be killed in 4 s, or at once if you interrupt again"
        )
    ]


def test_after_a_second_a_rank_that_was_stopped_by_hand_is_told_from_a_deaf_one() -> None:
    _, actions = play(noticed(0), rang(Alarm.STUCK, stopped=((1, 4321),)), life=INTERRUPTING)
    assert actions == [
        Remark(
            text="rank 1 stopped by SIGSTOP (`kill -CONT 4321` wakes); will be killed in 4 s, or "
            "at once if you interrupt again"
        )
    ]
    _, actions = play(rang(Alarm.STUCK, stopped=((1, 4321),)), life=INTERRUPTING)
    assert actions == [
        Remark(
            text="rank 1 stopped by SIGSTOP (`kill -CONT 4321` wakes); rank 0 did not answer the "
            "interrupt yet (in C code that does not return?); will be killed in 4 s, or at once if "
            "you interrupt again"
        )
    ]


def test_at_the_end_of_the_grace_it_is_said_who_was_stopped_by_hand() -> None:
    _, actions = play(rang(Alarm.GRACE, stopped=((1, 4321),)), life=INTERRUPTING)
    assert actions == [
        Remark(
            text="ranks 0-1 did not answer the interrupt in 5 s (rank 1 stopped by SIGSTOP): killed"
        ),
        Kill(ranks=(0, 1)),
    ]


def test_after_a_second_the_user_is_told_which_ranks_clean_up() -> None:
    _, actions = play(noticed(0), noticed(1), rang(Alarm.STUCK), life=INTERRUPTING)
    assert actions == [
        Remark(
            text="ranks 0-1: interrupted, and still busy (cleaning up, or in C code that "
            "computes); interrupt again to kill at once"
        )
    ]


def test_at_the_end_of_the_grace_the_deaf_ranks_are_killed_and_named() -> None:
    life, actions = play(rang(Alarm.GRACE), life=INTERRUPTING)
    assert life.state is GroupState.INTERRUPTING
    assert actions == [
        Remark(text="ranks 0-1 did not answer the interrupt in 5 s: killed"),
        Kill(ranks=(0, 1)),
    ]


def test_at_the_end_of_the_grace_ranks_that_noticed_are_not_killed() -> None:
    _, actions = play(noticed(0), rang(Alarm.GRACE), life=INTERRUPTING)
    assert actions == [
        Remark(text="rank 1 did not answer the interrupt in 5 s: killed"),
        Kill(ranks=(1,)),
    ]
    life, actions = play(noticed(0), noticed(1), rang(Alarm.GRACE), life=INTERRUPTING)
    assert (life.state, actions) == (GroupState.INTERRUPTING, [])


COMPUTING = "still computing in C code that holds the GIL and will be killed in 59 s"


def test_after_a_second_the_user_is_told_which_deaf_ranks_compute() -> None:
    _, actions = play(rang(Alarm.STUCK, working=(0, 1)), life=INTERRUPTING)
    assert actions == [Remark(text=f"ranks 0-1 are {COMPUTING}, or at once if you interrupt again")]
    _, actions = play(rang(Alarm.STUCK, working=(0,)), life=INTERRUPTING)
    assert actions == [
        Remark(
            text=f"rank 0 is {COMPUTING}; rank 1 did not answer the interrupt yet (in C code that "
            "does not return?); will be killed in 4 s, or at once if you interrupt again"
        )
    ]


def test_a_deaf_rank_that_computes_outlives_the_grace_and_one_that_waits_does_not() -> None:
    life, actions = play(rang(Alarm.GRACE, working=(0,)), life=INTERRUPTING)
    assert actions == [
        Remark(text="rank 1 did not answer the interrupt in 5 s: killed"),
        Kill(ranks=(1,)),
        alarm(Alarm.GRACE, GRACE),
    ]
    _, actions = play(died(1), rang(Alarm.GRACE), life=life)
    assert actions[1:] == [Kill(ranks=(0,))], "it computes no more and did not answer"
    _, actions = play(died(1), rang(Alarm.CLEANUP, working=(0,)), life=life)
    assert actions == [
        Remark(text="rank 0 still ran 60 s after the interrupt: killed"),
        Kill(ranks=(0,)),
    ]


def test_a_rank_that_answers_after_it_computed_is_looked_at_no_more() -> None:
    life, actions = play(rang(Alarm.GRACE, working=(0, 1)), life=INTERRUPTING)
    assert actions == [alarm(Alarm.GRACE, GRACE)]
    assert play(noticed(0), noticed(1), rang(Alarm.GRACE), life=life)[1] == []


def test_a_rank_that_cleans_up_without_end_is_killed_at_last() -> None:
    _, actions = play(noticed(0), ended(1), rang(Alarm.CLEANUP), life=INTERRUPTING)
    assert actions == [
        Remark(text="rank 0 still ran 60 s after the interrupt: killed"),
        Kill(ranks=(0,)),
    ]


def test_the_grace_is_the_one_that_the_start_asked_for() -> None:
    patient = StartAsked(world_size=2, grace=20.0)
    life = after(patient, ready(0), ready(1), run())
    _, actions = play(InterruptAsked(), life=life)
    assert alarm(Alarm.GRACE, 20.0) in actions
    _, [remark, _] = play(InterruptAsked(), rang(Alarm.GRACE), life=life)
    assert remark == Remark(text="ranks 0-1 did not answer the interrupt in 20 s: killed")
    _, [remark] = play(InterruptAsked(), rang(Alarm.STUCK), life=life)
    assert isinstance(remark, Remark)
    assert "will be killed in 19 s" in remark.text
    _, actions = play(StopAsked(), life=life)
    assert alarm(Alarm.STOP, 20.0) in actions


def test_a_restart_has_the_grace_that_it_asked_for() -> None:
    again = StartAsked(world_size=2, grace=2.0)
    life, _ = play(RestartAsked(start=again), died(0), died(1), life=RUNNING)
    assert life.grace == 2.0


@pytest.mark.parametrize("kind", [Alarm.PEERS, Alarm.STUCK, Alarm.GRACE, Alarm.CLEANUP])
@each_life
def test_an_alarm_of_an_earlier_cell_changes_nothing(life: Life, kind: Alarm) -> None:
    late = Rang(alarm=kind, attempt=life.attempt, cell=99)
    assert advance(life, late) == (life, [])


@pytest.mark.parametrize("kind", [Alarm.PEERS, Alarm.STUCK, Alarm.GRACE, Alarm.CLEANUP])
def test_an_alarm_of_a_cell_whose_group_stops_changes_nothing(kind: Alarm) -> None:
    life = after(START, ready(0), ready(1), run(), StopAsked())
    assert advance(life, rang(kind)) == (life, [])


def test_news_that_a_rank_of_an_earlier_cell_noticed_changes_nothing() -> None:
    assert advance(INTERRUPTING, noticed(0, cell=9)) == (INTERRUPTING, [])
    assert advance(IDLE, noticed(0)) == (IDLE, [])


# ---- kill


@pytest.mark.parametrize("life", [STARTING, IDLE, RUNNING, INTERRUPTING, STOPPING])
def test_any_living_rank_can_be_killed(life: Life) -> None:
    assert advance(life, KillAsked(rank=1)) == (life, [Kill(ranks=(1,))])


def test_a_rank_that_is_not_there_cannot_be_killed() -> None:
    words = "there is no rank 2; the group has ranks 0 to 1"
    assert advance(IDLE, KillAsked(rank=2)) == (IDLE, [Refuse(reason=words)])


def test_a_dead_rank_cannot_be_killed_again() -> None:
    life, [refusal] = advance(BROKEN, KillAsked(rank=1))
    assert life == BROKEN
    assert isinstance(refusal, Refuse)
    assert refusal.reason.startswith("rank 1 was killed by SIGKILL; ")


def test_where_there_is_no_group_a_kill_is_refused_in_words_that_make_sense() -> None:
    life, [refusal] = advance(OFF, KillAsked(rank=0))
    assert life == OFF
    assert isinstance(refusal, Refuse)
    assert "0 to -1" not in refusal.reason


# ---- stop


def test_a_stop_asks_idle_ranks_to_leave_and_ends_the_others() -> None:
    life, actions = play(ended(0), StopAsked(), life=RUNNING)
    assert life.state is GroupState.STOPPING
    assert actions == [
        SendLeave(ranks=(0,)),
        Terminate(ranks=(1,)),
        alarm(Alarm.STOP, GRACE),
    ]


def test_a_stop_is_over_when_the_last_process_is_gone() -> None:
    life, actions = play(died(0, 0), life=STOPPING)
    assert (life.state, actions) == (GroupState.STOPPING, [])
    life, actions = play(died(1, 0), life=life)
    assert (life.state, actions) == (GroupState.OFF, [Stopped()])
    assert life.ranks == ()


def test_what_outlives_the_grace_of_a_stop_is_killed() -> None:
    life, actions = play(died(0, 0), rang(Alarm.STOP, cell=0), life=STOPPING)
    text = f"rank 1 did not end in {GRACE:g} s: killed"
    assert (life.state, actions) == (GroupState.STOPPING, [Remark(text=text), Kill(ranks=(1,))])


def test_the_alarm_of_a_stop_rings_for_nobody_when_there_is_none() -> None:
    for life in (IDLE, RUNNING, BROKEN):
        assert advance(life, rang(Alarm.STOP)) == (life, [])


@each_life
def test_a_stop_leads_to_off_from_every_state(life: Life) -> None:
    stopping, actions = advance(life, StopAsked())
    over, more = play(*(died(rank, -15) for rank in stopping.alive), life=stopping)
    assert over.state is GroupState.OFF
    assert over.ranks == ()
    told = [type(each) for each in [*actions, *more]]
    assert told.count(Stopped) == (0 if life is OFF else 1)
    assert told.count(Finished) == (1 if life.cell else 0)


def test_a_second_stop_does_nothing_more() -> None:
    assert advance(STOPPING, StopAsked()) == (STOPPING, [])


def test_a_cell_that_a_stop_ended_is_finished_when_the_processes_are_gone() -> None:
    life, actions = play(StopAsked(), ended(0), ended(1), died(0), life=RUNNING)
    assert (life.state, actions) == (GroupState.STOPPING, [])
    assert play(died(1), life=life)[1] == [Finished(cell=1), Stopped()]


def test_a_report_that_comes_after_the_exit_does_not_bring_a_rank_back_to_life() -> None:
    for before in (RUNNING, after(START, ready(0), ready(1), run(), StopAsked())):
        life, _ = play(died(1), life=before)
        life, actions = play(ended(1), life=life)
        assert (life.alive, actions) == ([0], [])
    life, actions = play(died(0), life=life)
    assert (life.state, actions) == (GroupState.OFF, [Finished(cell=1), Stopped()])


# ---- restart


@each_life
def test_a_restart_leads_to_a_new_start_from_every_state(life: Life) -> None:
    again = StartAsked(world_size=3, joins_group=False)
    stopping, actions = advance(life, RestartAsked(start=again))
    if stopping.attempt == life.attempt:
        stopping, actions = play(*(died(rank) for rank in stopping.alive), life=stopping)
    assert stopping.state is GroupState.STARTING
    assert stopping.attempt == life.attempt + 1
    assert len(stopping.ranks) == 3
    assert actions[-2:] == [
        Spawn(attempt=life.attempt + 1, world_size=3, joins_group=False),
        alarm(Alarm.START, START_PATIENCE, cell=0, attempt=life.attempt + 1),
    ]


def test_a_restart_tells_that_the_old_attempt_stopped_before_it_starts_the_new() -> None:
    _, actions = play(RestartAsked(start=START), died(0), died(1), life=RUNNING)
    assert [type(each) for each in actions] == [Finished, Stopped, Spawn, SetAlarm]


def test_a_restart_of_a_group_whose_ranks_are_all_dead_tells_that_it_stopped() -> None:
    _, actions = advance(ALL_GONE, RestartAsked(start=START))
    assert [type(each) for each in actions] == [Stopped, Spawn, SetAlarm]


def test_a_stop_during_a_restart_cancels_it() -> None:
    life = after(START, ready(0), ready(1), RestartAsked(start=START), StopAsked())
    life, actions = play(died(0), died(1), life=life)
    assert (life.state, actions) == (GroupState.OFF, [Stopped()])


def test_a_restart_during_a_stop_starts_when_that_is_over() -> None:
    life, actions = play(RestartAsked(start=START), died(0), died(1), life=STOPPING)
    assert (life.state, life.attempt) == (GroupState.STARTING, 2)
    assert actions[0] == Stopped()


def test_of_two_restarts_the_later_one_counts() -> None:
    second = StartAsked(world_size=5)
    events = (RestartAsked(start=START), RestartAsked(start=second), died(0), died(1))
    assert len(play(*events, life=RUNNING)[0].ranks) == 5


def test_a_restarted_group_begins_with_nothing_of_the_old_one() -> None:
    old = after(START, ready(0), ready(1), run(), ended(0, in_group=False), ended(1), run(cell=2))
    life, _ = play(RestartAsked(start=START), died(0), died(1), life=old)
    assert old.generation == 1
    assert life == replace(after(START), attempt=2)


# ---- late news


@pytest.mark.parametrize(
    "late",
    [
        ready(0, attempt=1),
        unable(0, attempt=1),
        noticed(0, attempt=1),
        ended(0, attempt=1),
        died(0, attempt=1),
        rang(Alarm.START, attempt=1),
        rang(Alarm.GRACE, attempt=1),
        rang(Alarm.STOP, attempt=1),
    ],
    ids=lambda event: type(event).__name__,
)
def test_news_of_an_attempt_that_is_over_is_dropped(late: Event) -> None:
    life = after(START, ready(0), ready(1), RestartAsked(start=START), died(0), died(1))
    assert advance(life, late) == (life, [])
    for event in (ready(0, attempt=2), ready(1, attempt=2), run()):
        life, _ = advance(life, event)
        assert advance(life, late) == (life, [])


# ---- the words for states


def test_a_group_is_live_unless_it_is_off_and_busy_while_a_cell_runs() -> None:
    assert [state for state in GroupState if not state.is_live] == [GroupState.OFF]
    assert [state for state in GroupState if state.is_busy] == [
        GroupState.RUNNING,
        GroupState.INTERRUPTING,
    ]


# ---- ranks that another notebook has left

BACK = ReturnAsked(attempt=4, world_size=3, living=((0, 0), (2, 1)))


def test_ranks_that_have_come_back_are_those_of_their_attempt_and_the_others_are_gone() -> None:
    life, actions = play(BACK)
    assert actions == [TakeBack(), alarm(Alarm.START, START_PATIENCE, cell=0, attempt=4)]
    assert (life.alive, life.gone, life.attempt) == ([0, 2], (1,), 4)
    assert [each.incarnation for each in life.ranks] == [0, 0, 1]
    life, actions = play(ready(0, 4), ready(2, 4), life=life)
    assert actions == [Started()]
    assert life.state is GroupState.BROKEN
    _, actions = play(run(0, 2), life=life)
    assert SendCell(cell=1, ranks=(0, 2)) in actions


def test_one_that_is_late_or_dies_costs_the_others_nothing() -> None:
    life, actions = play(BACK, ready(0, 4), rang(Alarm.START, cell=0, attempt=4))
    assert Kill(ranks=(2,)) in actions
    life, actions = play(died(2, attempt=4), life=life)
    assert actions[-1] == Started()
    assert life.state is GroupState.BROKEN
    assert life.alive == [0]


def test_where_ranks_are_none_are_taken_back() -> None:
    life, actions = play(BACK, life=IDLE)
    assert life is IDLE
    assert isinstance(actions[0], Refuse)
