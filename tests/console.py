"""Run ``%ddp`` lines in a console without ranks, and return the output or the error."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from IPython.core.error import UsageError
from refusals import refusal

from nbddp.group.notebook_half import NotebookHalves
from nbddp.magics.line_magic import run_command
from nbddp.magics.presenter import Presenter


def ddp(line: str, **state: Any) -> str:
    """Run a ``%ddp`` line and return its output; ``state`` is the state of the notebook."""
    lines: list[str] = []
    presenter = Presenter(Mock(spec=[]))
    presenter.print_line = lines.append  # type: ignore[assignment, method-assign]
    notebook = SimpleNamespace(
        presenter=presenter,
        print_line=presenter.print_line,
        show=presenter.show,
        notifier=lambda: presenter.print_line,
        current_run=None,
        last_run=None,
        shell=None,
        group=Mock(),
        show_messages=lambda: None,
    )
    notebook.extensions = NotebookHalves(notebook)
    vars(notebook).update(state)
    run_command(notebook, line)  # type: ignore[arg-type]
    return "\n".join(lines)


def refused(line: str, **state: Any) -> str:
    return refusal(UsageError, ddp, line, **state)
