"""A magic that the user interrupted, in one line: what was not done, and what is so now."""

from __future__ import annotations

from nbddp.errors import CommandInterruptedError, format_ranks
from nbddp.lifecycle.group_state import GroupState, Life
from nbddp.lifecycle.refusals import way_out

_HALF_DONE = {
    "%ddp push": "the values may have come to some ranks only: push them again",
    "%ddp pull": "nothing was fetched",
    "%ddp nodes": "nodes on their way still come in, `%ddp nodes` lists them",
}


def interrupt_error(magic: str, before: Life, now: Life) -> CommandInterruptedError:
    """What the user reads in the place of a traceback through code that is not his.

    Args:
        magic: as it is written, like ``%ddp push``.
        before: what was so when it began.
        now: what is so.
    """
    half_done = f"; {_HALF_DONE[magic]}" if magic in _HALF_DONE else ""
    return CommandInterruptedError(
        f"`{magic}` was interrupted{half_done}; {describe_group(before, now)}"
    )


def describe_group(before: Life, now: Life) -> str:
    """What the user finds, and the way on."""
    match now.state:
        case GroupState.OFF if before.state.is_live:
            return "all ranks are stopped, their names are gone; the next cell starts new ones"
        case GroupState.OFF:
            return "there are no ranks; the next cell starts them"
        case GroupState.IDLE if now.attempt > before.attempt:
            return "the ranks were restarted; the next cell works"
        case GroupState.IDLE:
            return "every rank keeps its names; the next cell works"
        case GroupState.BROKEN:
            gone = format_ranks([each.rank for each in now.ranks if not each.is_alive])
            return f"of {gone} all names are gone; {way_out(now)}"
        case GroupState.STARTING | GroupState.STOPPING:
            return f"the ranks are {now.state.value}; `%ddp status` shows how far they are"
        case GroupState.HEALING:
            return (
                "the group is healing; `%ddp status` shows how far it is, `%ddp interrupt` ends it"
            )
        case _:
            return "a cell is running: `%ddp wait` waits for it, `%ddp interrupt` ends it"
