"""What every part of the lifecycle does to a life."""

from __future__ import annotations

from dataclasses import replace

from nbddp.lifecycle.events import Action, Alarm, SetAlarm
from nbddp.lifecycle.states import Life, RankState

START_PATIENCE = 90.0  # seconds for all ranks to get ready (the first may import torch)
Step = tuple[Life, list[Action]]


def ring_in(life: Life, alarm: Alarm, seconds: float) -> SetAlarm:
    """A deadline of what goes on now."""
    cell = life.cell.number if life.cell else 0
    return SetAlarm(
        alarm=alarm,
        attempt=life.attempt,
        cell=cell,
        seconds=seconds,
        generation=life.generation,
    )


def in_state(life: Life, state: RankState) -> tuple[int, ...]:
    """The ranks that do this now."""
    return tuple(each.rank for each in life.ranks if each.state is state)


def mark(life: Life, rank: int, state: RankState, exitcode: int | None = None) -> Life:
    """One rank does something else."""
    changed = replace(life.ranks[rank], state=state, exitcode=exitcode)
    return replace(life, ranks=(*life.ranks[:rank], changed, *life.ranks[rank + 1 :]))
