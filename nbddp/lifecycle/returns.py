"""How a worker group goes on whose notebook is gone: another one takes its ranks back.

Those of them that are not there are gone, and one that is late costs the others nothing.
"""

from __future__ import annotations

from nbddp.lifecycle import reasons
from nbddp.lifecycle.events import Alarm, Refuse, ReturnAsked, TakeBack
from nbddp.lifecycle.states import GroupState, Life, RankLife, RankState
from nbddp.lifecycle.steps import START_PATIENCE, Step, ring_in


def on_return_asked(life: Life, event: ReturnAsked) -> Step:
    """Wait until each that lives says that it is ready: none may be in a cell."""
    if life.state.is_live:
        return life, [Refuse(reason=reasons.already(life))]
    living = dict(event.living)
    back = Life(
        state=GroupState.STARTING,
        attempt=event.attempt,
        ranks=tuple(
            RankLife(rank, incarnation=living[rank])
            if rank in living
            else RankLife(rank, RankState.GONE)
            for rank in range(event.world_size)
        ),
        is_return=True,
    )
    return back, [TakeBack(), ring_in(back, Alarm.START, START_PATIENCE)]
