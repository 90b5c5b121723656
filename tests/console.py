"""Run ``%ddp`` lines in a console without ranks, and return the output or the error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from IPython.core.error import UsageError
from refusals import refusal

from nbddp.magics.line_magic import run_command
from nbddp.magics.presenter import Presenter


def ddp(line: str, **state: Any) -> str:
    """Run a ``%ddp`` line and return its output; ``state`` is the state of the notebook."""
    lines: list[str] = []
    presenter = Presenter(Mock(spec=[]))
    presenter.print_line = lines.append  # type: ignore[assignment, method-assign]
    notebook = {
        "presenter": presenter,
        "current_run": None,
        "last_run": None,
        "shell": None,
        "group": Mock(),
        "show_messages": lambda: None,
        **state,
    }
    run_command(SimpleNamespace(**notebook), line)  # type: ignore[arg-type]
    return "\n".join(lines)


def refused(line: str, **state: Any) -> str:
    return refusal(UsageError, ddp, line, **state)
