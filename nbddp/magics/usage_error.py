"""The error of a refused magic, which is visible in `%%capture` too."""

from __future__ import annotations

import sys
from io import StringIO

from IPython.core.error import UsageError


class CapturedUsageError(UsageError):
    """A usage error that IPython does not print to standard error, as it does a plain one."""

    def _render_traceback_(self) -> list[str]:
        return [f"UsageError: {self}"]


def usage_error(reason: Exception) -> UsageError:
    """Return the error that gives the reason in one line, also if standard error is captured."""
    kind = CapturedUsageError if isinstance(sys.stderr, StringIO) else UsageError
    return kind(str(reason))
