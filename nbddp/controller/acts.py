"""What becomes of an act that failed, in words and for those who wait for it."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict

from nbddp.errors import StartError
from nbddp.wire.messages import CellEnded, Failure

logger = logging.getLogger(__name__)


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


def not_begun(cell: int, error: Exception) -> CellEnded:
    """What a rank would say of a cell that could not be sent to it, if it knew."""
    text = f"the cell could not be sent: {plain(error)}"
    failure = Failure(name="RequestError", text=text, traceback=text, at=time.time())
    return CellEnded(cell=cell, seconds=0.0, in_group=True, failure=asdict(failure))
