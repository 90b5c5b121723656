"""What becomes of an act that failed, in words and for those who wait for it."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict

from nbddp.errors import StartError
from nbddp.lifecycle import events as ev
from nbddp.lifecycle.states import Life
from nbddp.record.timeline import TimeLine
from nbddp.wire.messages import CellEnded, Failure

logger = logging.getLogger(__name__)


def for_all(action: ev.Action, error: Exception) -> dict[int, Exception]:
    """An action failed as a whole: so it did for each rank that waits for it."""
    if not isinstance(error, StartError | OSError):
        logger.error("nbddp could not do %s", type(action).__name__, exc_info=error)
    if isinstance(action, ev.Spawn):
        return dict.fromkeys(range(action.world_size), error)
    return dict.fromkeys(getattr(action, "ranks", ()), error)


def plain(error: Exception) -> str:
    """An error in a few words.

    >>> plain(OSError(28, "No space left on device", "/runs")), plain(EOFError())
    ('No space left on device: /runs', 'EOFError')
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def unable(who: str, error: Exception) -> StartError:
    """Why there is no group."""
    if isinstance(error, StartError):
        return error
    return StartError(f"{who} could not be started: {plain(error)}")


def start_failure(life: Life, reason: str, details: str, time_line: TimeLine) -> StartError:
    """Why a start did not come to its end, with what was said or written last."""
    gone = [each.rank for each in life.ranks if not each.is_alive]
    return StartError(reason, details=details or time_line.last_words(gone))


def complaint(action: ev.Action, rank: int, error: Exception) -> str:
    """What the user is told of a rank that is there and could not be told, or ended."""
    if isinstance(action, ev.Kill):
        return f"rank {rank} cannot be killed: given up ({plain(error)})"
    return f"rank {rank} cannot be told anything: killed ({plain(error)})"


def not_begun(cell: int, error: Exception) -> CellEnded:
    """What a rank would say of a cell that could not be sent to it, if it knew."""
    text = f"the cell could not be sent: {plain(error)}"
    failure = Failure(name="RequestError", text=text, traceback=text, at=time.time())
    return CellEnded(cell=cell, seconds=0.0, in_group=True, failure=asdict(failure))
