"""A magic that was interrupted says in one line what is so now."""

from __future__ import annotations

import pytest

from nbddp.lifecycle.reasons import with_way_on
from nbddp.lifecycle.states import GroupState, Life, RankLife, RankState
from nbddp.magics.stopped import interrupted


def life(state: GroupState, *, attempt: int = 1, gone: tuple[int, ...] = ()) -> Life:
    ranks = tuple(
        RankLife(rank, RankState.GONE if rank in gone else RankState.IDLE) for rank in range(3)
    )
    return Life(state=state, attempt=attempt, ranks=ranks if state.is_live else ())


OFF, IDLE = life(GroupState.OFF), life(GroupState.IDLE)


@pytest.mark.parametrize(
    ("magic", "before", "now", "words"),
    [
        ("%ddp start", OFF, OFF, "there are no ranks; the next cell starts them"),
        (
            "%ddp restart",
            IDLE,
            OFF,
            "all ranks are stopped, their names are gone; the next cell starts new ones",
        ),
        ("%ddp status", IDLE, IDLE, "every rank keeps its names; the next cell works"),
        (
            "%ddp restart",
            IDLE,
            life(GroupState.IDLE, attempt=2),
            "the ranks were restarted; the next cell works",
        ),
        (
            "%ddp kill",
            IDLE,
            life(GroupState.BROKEN, gone=(1,)),
            "of rank 1 all names are gone; `%ddp heal` replaces it, `%ddp restart` restarts "
            "all ranks, `%%ddp --ranks 0,2` uses the others",
        ),
        (
            "%ddp heal",
            life(GroupState.BROKEN, gone=(0, 1)),
            life(GroupState.BROKEN, gone=(0, 1)),
            "of ranks 0-1 all names are gone; `%ddp heal` replaces those that are gone, `%ddp "
            "restart` restarts all ranks, `%%ddp --ranks 2` uses the others",
        ),
        (
            "%ddp stop",
            IDLE,
            life(GroupState.STOPPING),
            "the ranks are stopping; `%ddp status` shows how far they are",
        ),
        (
            "%ddp logs",
            life(GroupState.RUNNING),
            life(GroupState.RUNNING),
            "a cell is running: `%ddp wait` waits for it, `%ddp interrupt` ends it",
        ),
        (
            "%ddp logs",
            life(GroupState.HEALING),
            life(GroupState.HEALING),
            "the group is healing; `%ddp status` shows how far it is, `%ddp interrupt` ends it",
        ),
        (
            "%ddp push",
            IDLE,
            IDLE,
            "the values may have come to some ranks only: push them again; every rank keeps its "
            "names; the next cell works",
        ),
        (
            "%ddp pull",
            IDLE,
            IDLE,
            "nothing was fetched; every rank keeps its names; the next cell works",
        ),
    ],
)
def test_what_is_so_now_is_said_in_one_line(
    magic: str, before: Life, now: Life, words: str
) -> None:
    error = interrupted(magic, before, now)
    assert error._render_traceback_() == [f"`{magic}` was interrupted; {words}"]


def test_a_heal_in_vain_is_said_with_what_can_be_done() -> None:
    vain, broken = "the group was not healed: rank 1 was killed", life(GroupState.BROKEN, gone=(1,))
    assert with_way_on(vain, broken) == (
        f"{vain}; `%ddp heal` replaces it, `%ddp restart` restarts all ranks, `%%ddp --ranks "
        "0,2` uses the others"
    )
    assert with_way_on(vain, OFF) == vain
    assert with_way_on("rank 0 lives", broken) == "rank 0 lives"
