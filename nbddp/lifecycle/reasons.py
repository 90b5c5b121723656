"""Why something cannot be done now, or takes its time: in words, with the way out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nbddp.errors import describe_exit, say_ranks
from nbddp.lifecycle.states import GroupState, Life

NO_GROUP = "there is no worker group; `%ddp start` or a `%%ddp` cell starts one"


def already(life: Life) -> str:
    """Why a group cannot be started."""
    if life.state is GroupState.BROKEN:
        return "there is a worker group already, with a rank gone; `%ddp restart` starts it anew"
    return f"the worker group is {life.state.value} already"


def no_such_rank(life: Life, rank: int) -> str:
    """Why a rank can do nothing."""
    if not life.ranks:
        return NO_GROUP
    if not 0 <= rank < len(life.ranks):
        return f"there is no rank {rank}; the group has ranks 0 to {len(life.ranks) - 1}"
    how = describe_exit(life.ranks[rank].exitcode)
    others = f", `%%ddp --ranks {_option(life.alive)}` uses the others" if life.alive else ""
    return f"rank {rank} {how}; `%ddp restart` starts the group anew{others}"


def _option(ranks: Iterable[int]) -> str:
    return ",".join(str(rank) for rank in ranks)


def stuck(waiting: Sequence[int], deaf: Sequence[int], *, killed_in: float) -> str:
    """Why an interrupted cell still runs: on ``deaf`` ranks Python has not seen the signal."""
    if not deaf:
        return (
            f"{say_ranks(waiting)}: interrupted, and still busy (cleaning up, or in C code that "
            "computes); interrupt again to kill at once"
        )
    return (
        f"{say_ranks(deaf)} did not answer the interrupt yet (in C code that does not return?); "
        f"killed in {killed_in:.0f} s, or at once if you interrupt again"
    )
