"""The magics of a notebook without ranks: mocks start ranks, and run cells and scripts."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from fakes import FakeLauncher, FakeLink, fake_session
from IPython.core.interactiveshell import InteractiveShell

from nbddp.controller.session import Session
from nbddp.group.rank_group import RankGroup
from nbddp.group.recovery import Recovery
from nbddp.lifecycle.retries import Retries
from nbddp.magics.cell_magic import run_cell
from nbddp.magics.line_magic import run_command
from nbddp.magics.notebook_state import NotebookState
from nbddp.record.cell import CellRequest, CellResult
from nbddp.wire.group_spec import GroupSpec

WENT_WELL = Mock(spec=CellResult, is_ok=True, verdict=None, ranks=(0,), prompt=1)


class Typed:
    """A notebook's magics, without ranks: mocks start ranks, and run cells and scripts."""

    def __init__(self, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launcher, self.link = FakeLauncher(), FakeLink()
        self.notebook = NotebookState(shell)
        group = RankGroup(GroupSpec(), fake_session(self.launcher, self.link))
        self.notebook.group = self.notebook.ranks.group = group
        self.start, self.run = Mock(), Mock(return_value=WENT_WELL)
        monkeypatch.setattr(Session, "start", self.start)
        monkeypatch.setattr(Recovery, "run", self.run)
        Path("train.py").write_text("x = 1\n")

    def asked(self) -> tuple[CellRequest, Retries]:
        """The cell or script that was to run since the last time, and how often again."""
        self.run.assert_called_once()
        request, retries, begun = self.run.call_args.args
        assert begun is None
        self.run.reset_mock()
        return request, retries

    def line(self, line: str) -> None:
        run_command(self.notebook, line)

    def cell(self, line: str) -> None:
        run_cell(self.notebook, line, "x = 1")


Run = Callable[[Typed, str], object]
RUNS: dict[str, Run] = {
    "%%ddp": Typed.cell,
    "%ddp run": lambda typed, options: typed.line(f"run {options} train.py"),
}
