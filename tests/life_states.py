"""A life cycle of a two-rank worker group in each state, and the events that lead there."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import GroupState, Life
from nbddp.lifecycle.transitions import advance
from nbddp.wire.messages import Shutdown

START = ev.StartAsked(world_size=2)
INTERRUPT = ev.InterruptAsked()
STOP = ev.StopAsked()
HEAL = ev.HealAsked(ranks=(1,))
# the actions with a text for the user
WITH_TEXT = (ev.Notify, ev.Refuse, ev.GroupStartFailed, ev.HealFailed)


def ready(rank: int, attempt: int = 1) -> ev.RankReady:
    return ev.RankReady(attempt=attempt, rank=rank)


def unable(rank: int) -> ev.RankStartFailed:
    return ev.RankStartFailed(attempt=1, rank=rank, reason="OSError: no")


def died(rank: int, exitcode: int | None = -9, attempt: int = 1) -> ev.ProcessExited:
    return ev.ProcessExited(attempt=attempt, rank=rank, exitcode=exitcode)


def run(*ranks: int, cell: int = 1, needs_group: bool | None = True) -> ev.RunAsked:
    return ev.RunAsked(cell=cell, ranks=ranks or (0, 1), needs_group=needs_group)


def ended(
    rank: int,
    *,
    cell: int = 1,
    is_ok: bool = True,
    in_group: bool = True,
    sequence: int = 0,
    attempt: int = 1,
) -> ev.RankEndedCell:
    return ev.RankEndedCell(
        attempt=attempt, rank=rank, cell=cell, is_ok=is_ok, in_group=in_group, sequence=sequence
    )


def failed(rank: int, **more: Any) -> ev.RankEndedCell:
    return ended(rank, is_ok=False, **more)


def acknowledged(rank: int, cell: int = 1) -> ev.RankAcknowledged:
    return ev.RankAcknowledged(attempt=1, rank=rank, cell=cell)


def step_awaited(rank: int, seconds: float) -> ev.StepAwaited:
    return ev.StepAwaited(attempt=1, rank=rank, cell=1, seconds=seconds)


def passed(kind: ev.Deadline, cell: int = 1, attempt: int = 1, **more: Any) -> ev.DeadlinePassed:
    return ev.DeadlinePassed(deadline=kind, attempt=attempt, cell=cell, **more)


def deadline_set(
    kind: ev.Deadline, seconds: float, cell: int = 1, attempt: int = 1, **more: Any
) -> ev.SetDeadline:
    return ev.SetDeadline(seconds=seconds, event=passed(kind, cell, attempt, **more))


def kill(*ranks: int) -> ev.Kill:
    return ev.Kill(ranks=ranks)


def leave(*ranks: int) -> ev.Send:
    return ev.Send(ranks=ranks, message=Shutdown())


def terminate(*ranks: int) -> ev.Terminate:
    return ev.Terminate(ranks=ranks)


def send(*ranks: int, cell: int = 1) -> ev.SendCell:
    return ev.SendCell(cell=cell, ranks=ranks)


def interrupt(*ranks: int, **more: bool) -> ev.SendInterrupt:
    return ev.SendInterrupt(cell=1, ranks=ranks, **more)


def after(life: Life, *events: ev.Event) -> Life:
    for event in events:
        life, _ = advance(life, event)
    return life


class Row(NamedTuple):
    """Events, and the effect of the last one; without a state, it changes nothing."""

    life: Life
    events: list[ev.Event]
    state: GroupState | None = None
    actions: Sequence[Any] = ()  # of an action with a text, only the type


def last_step(row: Row) -> tuple[Life, list[ev.Action]]:
    return advance(after(row.life, *row.events[:-1]), row.events[-1])


def effect_of(row: Row) -> tuple[GroupState, list[Any]]:
    """Return the last state and its actions. Of an action with a text, return only the type."""
    changed, actions = last_step(row)
    return changed.state, [type(each) if isinstance(each, WITH_TEXT) else each for each in actions]


def assert_unchanged(refused: Mapping[str, Row], ignored: Mapping[str, Row]) -> None:
    """Check that last events are refused, or ignored without an action, and change no state."""
    for name, row in {**refused, **ignored}.items():
        changed, actions = last_step(row)
        expected = [ev.Refuse] if name in refused else []
        before = after(row.life, *row.events[:-1])
        assert (changed, [*map(type, actions)]) == (before, expected), name


def texts_of(rows: Mapping[str, Row]) -> dict[str, str]:
    """Return the texts for the user that last events lead to, by the name of the row."""
    return {
        name: effect.text if isinstance(effect, ev.Notify) else effect.reason
        for name, row in rows.items()
        for effect in last_step(row)[1]
        if isinstance(effect, WITH_TEXT)
    }


OFF = Life()
STARTING = after(OFF, START)
IDLE = after(STARTING, ready(0), ready(1))
RUNNING = after(IDLE, run())
INTERRUPTING = after(RUNNING, INTERRUPT)
BROKEN = after(IDLE, died(1))
ALL_GONE = after(BROKEN, died(0))
HEALING = after(BROKEN, HEAL)
STOPPING = after(IDLE, STOP)
