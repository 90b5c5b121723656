"""The errors of nbddp, and how a process ended, in words.

::

    NbddpError
    ├── RequestError              what was asked cannot be done; nothing was started, nothing lost
    │   └── ArgumentError         ... because of a bad argument: a ValueError, too
    ├── StartError                the worker group could not start
    ├── CellFailedError           a cell failed on at least one rank
    │   └── CellInterruptedError  ... because the user interrupted it
    ├── CommandInterruptedError   the user interrupted a magic, which says what is so now
    ├── FindingsError             checks have found something, and were asked to be strict
    ├── CheckpointError           a checkpoint could not be written, or does not hold what is asked
    └── WireError                 a message that is not one of ours
        ├── SignatureError        its signature does not hold
        └── ReplayError           it was seen before
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


class NbddpError(Exception):
    """The root of all errors that nbddp raises on purpose."""


class RequestError(NbddpError):
    """What was asked cannot be done; nothing was started and nothing was lost."""


class ArgumentError(RequestError, ValueError):
    """An argument has no meaning here; it is a ValueError, too."""


class StartError(NbddpError):
    """The worker group could not start; keeps what the ranks said."""

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the place of the controller's own traceback."""
        return [f"StartError: {self}", *self.details.splitlines()]


class _RanksReportError(NbddpError):
    """Stands before a failed cell's error, in place of the note that Python 3.10 has not."""


class CellFailedError(NbddpError):
    """A cell failed on at least one rank.

    Attributes:
        report: what the user reads: first cause, its traceback, the consequences.
        rank: the rank that is the first cause.
        is_shown: whether the report was shown already, as a panel does: then one line will do.
    """

    is_shown = False

    def __init__(self, message: str, *, rank: int, report: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.set_report(report)

    def set_report(self, report: str) -> None:
        """Set the report; a script's own traceback shows it below the message."""
        self.report = report
        title, _, rest = report.partition("\n")
        note = rest.lstrip("\n") if str(self) in title else report
        if not note:
            return
        if sys.version_info >= (3, 11):
            self.__notes__ = [note]
        else:
            self.__cause__ = _RanksReportError(f"\n{note}")

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the place of the controller's own traceback."""
        return [f"{self} (more above)"] if self.is_shown else self.report.splitlines()


class CellInterruptedError(CellFailedError):
    """A cell ended because the user interrupted it; every surviving rank keeps its names."""


class CommandInterruptedError(NbddpError):
    """The user interrupted a magic while no cell of it ran; says what is so now."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the place of the controller's own traceback."""
        return [str(self)]


class FindingsError(NbddpError):
    """Checks have found something wrong, and were asked to be strict; keeps what they say."""

    def __init__(self, message: str, *, report: str) -> None:
        super().__init__(message)
        self.report = report

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the place of the controller's own traceback."""
        return self.report.splitlines()


class CheckpointError(NbddpError):
    """A checkpoint could not be written or read; the ones before it are untouched."""


class WireError(NbddpError):
    """A message that is not one of ours."""


class SignatureError(WireError):
    """The signature of a message does not hold."""


class ReplayError(WireError):
    """A message whose sequence number was seen before."""


def describe_exit(exitcode: int | None) -> str:
    """Say in words how a process ended.

    >>> describe_exit(-9)
    'was killed by SIGKILL'
    >>> describe_exit(3)
    'exited with code 3'
    >>> describe_exit(None)
    'disappeared'
    """
    if exitcode is None:
        return "disappeared"
    if exitcode < 0:
        try:
            return f"was killed by {signal.Signals(-exitcode).name}"
        except ValueError:  # a real-time signal has no name
            return f"was killed by signal {-exitcode}"
    return f"exited with code {exitcode}"


def format_place(line: int, file: str = "") -> str:
    """Name a line of the cell, or of a script's file.

    >>> format_place(3), format_place(3, "train.py")
    ('line 3', 'train.py line 3')
    """
    return f"{file} line {line}".lstrip()


def format_ranks(ranks: Sequence[int]) -> str:
    """Name some ranks in one or two words, runs of them folded.

    >>> format_ranks([1]), format_ranks([0, 1, 2, 3]), format_ranks([0, 2, 3])
    ('rank 1', 'ranks 0-3', 'ranks 0,2-3')
    """
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {format_number_ranges(ranks)}"


def format_number_ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, runs of them folded.

    >>> format_number_ranges([3, 1, 2, 7])
    '1-3,7'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
