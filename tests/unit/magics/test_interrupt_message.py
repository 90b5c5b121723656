"""An interrupted magic describes the state of the ranks in one line."""

from dataclasses import replace

from syrupy.assertion import SnapshotAssertion

from nbddp.lifecycle.group_state import GroupState, Life, RankLife, RankState
from nbddp.lifecycle.refusals import rank_not_running, with_way_out
from nbddp.magics.magic_errors import interrupt_error


def life(state: GroupState, *, attempt: int = 1, gone: tuple[int, ...] = ()) -> Life:
    ranks = tuple(
        RankLife(rank, RankState.GONE if rank in gone else RankState.IDLE) for rank in range(3)
    )
    return Life(state=state, attempt=attempt, ranks=ranks if state.is_live else ())


OFF, IDLE = life(GroupState.OFF), life(GroupState.IDLE)
ONE_GONE = life(GroupState.BROKEN, gone=(1,))
TWO_GONE = life(GroupState.BROKEN, gone=(0, 1))
MOMENTS = (
    ("%ddp start", OFF, OFF),
    ("%ddp restart", IDLE, OFF),
    ("%ddp restart", IDLE, life(GroupState.IDLE, attempt=2)),
    ("%ddp status", IDLE, IDLE),
    ("%ddp kill", IDLE, ONE_GONE),
    ("%ddp heal", TWO_GONE, TWO_GONE),
    ("%ddp stop", IDLE, life(GroupState.STOPPING)),
    ("%ddp logs", life(GroupState.RUNNING), life(GroupState.RUNNING)),
    ("%ddp logs", life(GroupState.HEALING), life(GroupState.HEALING)),
    ("%ddp push", IDLE, IDLE),
    ("%ddp pull", IDLE, IDLE),
)


def test_the_interrupt_message_is_one_line_for_each_state(snapshot: SnapshotAssertion) -> None:
    tracebacks = [interrupt_error(*moment)._render_traceback_() for moment in MOMENTS]
    assert [len(lines) for lines in tracebacks] == [1] * len(MOMENTS)
    assert [line for [line] in tracebacks] == snapshot


def test_the_message_of_a_failed_heal_has_the_next_step(snapshot: SnapshotAssertion) -> None:
    vain = "the group was not healed: rank 1 was killed"
    assert with_way_out(vain, ONE_GONE) == snapshot
    refused = "the group cannot be healed: rank 0: its model is sharded"
    no_heal = replace(ONE_GONE, is_heal_refused=True)
    others = "`%ddp restart` restarts all ranks, `%%ddp --ranks 0,2` uses the others"
    assert with_way_out(refused, no_heal) == f"{refused}; {others}"
    # nor does a later message propose the heal that was refused
    assert rank_not_running(no_heal, 1).endswith(f"; {others}")
    has_own = f"{refused}; `%ddp restart --replay` runs the cells again"
    assert with_way_out(has_own, no_heal) == has_own
    assert with_way_out(vain, OFF) == vain
    assert with_way_out("rank 0 lives", ONE_GONE) == "rank 0 lives"
