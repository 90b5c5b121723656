"""Report a refused or interrupted magic in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

from IPython.core.error import UsageError

from nbddp.errors import CommandInterruptedError, RequestError
from nbddp.formatting import format_ranks
from nbddp.group.rank_group import RankGroup
from nbddp.lifecycle.group_state import GroupState, Life
from nbddp.lifecycle.refusals import way_out

_HALF_DONE = {
    "%ddp push": "the values may have reached only some ranks: push them again",
    "%ddp pull": "nothing was fetched",
    "%ddp nodes": "nodes that are starting can still join, `%ddp nodes` lists them",
}


class CapturedUsageError(UsageError):
    """A usage error that `%%capture` shows too: IPython prints a plain one to standard error."""

    def _render_traceback_(self) -> list[str]:
        return [f"UsageError: {self}"]


@contextmanager
def reporting_errors(magic: str, group: RankGroup) -> Iterator[None]:
    """Raise the error that the user sees if this magic is refused or interrupted."""
    before = group.life
    try:
        yield
    except (RequestError, UsageError) as error:
        kind = CapturedUsageError if isinstance(sys.stderr, StringIO) else UsageError
        raise kind(str(error)) from None
    except KeyboardInterrupt:
        raise interrupt_error(magic, before, group.life) from None


def interrupt_error(magic: str, before: Life, now: Life) -> CommandInterruptedError:
    """Return the error that is shown instead of a traceback through nbddp's code.

    Args:
        magic: the magic as the user writes it, such as ``%ddp push``.
        before: the state of the group when the magic started.
        now: the state of the group now.
    """
    half_done = f"; {_HALF_DONE[magic]}" if magic in _HALF_DONE else ""
    return CommandInterruptedError(
        f"`{magic}` was interrupted{half_done}; {describe_group(before, now)}"
    )


def describe_group(before: Life, now: Life) -> str:
    """Return the state of the group and what the user can do next."""
    match now.state:
        case GroupState.OFF if before.state.is_live:
            return (
                "all ranks are stopped and their variables are lost; the next cell starts new "
                "ranks without variables"
            )
        case GroupState.OFF:
            return "there are no ranks; the next cell starts them"
        case GroupState.IDLE if now.attempt > before.attempt:
            return "the ranks were restarted; the next cell works"
        case GroupState.IDLE:
            return "every rank keeps its variables; the next cell works"
        case GroupState.BROKEN:
            gone = format_ranks([each.rank for each in now.ranks if not each.is_alive])
            return f"all variables of {gone} are lost; {way_out(now)}"
        case GroupState.STARTING | GroupState.STOPPING:
            return f"the ranks are {now.state.value}: `%ddp status` shows their progress"
        case GroupState.HEALING:
            return (
                "the group is healing: `%ddp status` shows its progress, `%ddp interrupt` ends it"
            )
        case _:
            return "a cell is running: `%ddp wait` waits for it, `%ddp interrupt` ends it"
