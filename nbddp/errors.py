"""The errors of nbddp.

::

    NbddpError
    ├── RequestError              a request was refused; nothing was started, nothing was lost
    │   └── ArgumentError         ... because of a bad argument; also a ValueError
    ├── StartError                the worker group could not start
    ├── CellFailedError           a cell failed on at least one rank
    │   └── CellInterruptedError  ... because the user interrupted it
    ├── CommandInterruptedError   the user interrupted a magic
    ├── CheckpointError           a checkpoint could not be written or read
    └── WireError                 a message is not one of nbddp's
        ├── SignatureError        its signature is wrong
        └── ReplayError           it was received before
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NbddpError(Exception):
    """The base class of nbddp's errors; nbddp also raises some of Python's, such as TypeError."""


class RequestError(NbddpError):
    """A request was refused; nothing was started and nothing was lost."""


@contextmanager
def as_request_error(failed: str, way_out: str = "") -> Iterator[None]:
    """Raise a RequestError if the system refuses something in the block.

    Args:
        failed: what failed; the system's reason follows.
        way_out: the end of the message.
    """
    try:
        yield
    except OSError as error:
        raise RequestError(f"{failed}: {error.strerror}{way_out}") from None


class ArgumentError(RequestError, ValueError):
    """An argument is not allowed; also a ValueError."""


class StartError(NbddpError):
    """The worker group could not start; ``details`` has the output of the ranks."""

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of the controller's traceback."""
        return [f"StartError: {self}", *self.details.splitlines()]


class CellFailedError(NbddpError):
    """A cell failed on at least one rank.

    Attributes:
        report: the text for the user: the first cause, its traceback, the consequences.
        rank: the rank of the first cause.
        is_shown: whether the report was already shown, such as by a panel. If so, IPython shows
            only one line.
    """

    is_shown = False

    def __init__(self, message: str, *, rank: int, report: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.set_report(report)

    def set_report(self, report: str) -> None:
        """Set the report; in a script, a traceback shows it below the message."""
        self.report = report
        title, _, rest = report.partition("\n")
        note = rest.lstrip("\n") if str(self) in title else report
        if note:
            self.__notes__ = [note]

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of the controller's traceback."""
        return [f"{self} (more above)"] if self.is_shown else self.report.splitlines()


class CellInterruptedError(CellFailedError):
    """A cell ended because the user interrupted it; every living rank keeps its variables."""


class CommandInterruptedError(NbddpError):
    """The user interrupted a magic that ran no cell; the message gives the state of the group."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of the controller's traceback."""
        return [str(self)]


class CheckpointError(NbddpError):
    """A checkpoint could not be written or read; earlier checkpoints are untouched."""


class WireError(NbddpError):
    """A message is not one of nbddp's."""


class SignatureError(WireError):
    """The signature of a message is wrong."""


class ReplayError(WireError):
    """A message has the sequence number of an earlier message."""
