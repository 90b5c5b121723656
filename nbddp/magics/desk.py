"""What the magics share: the group, the auto mode, and the cell that runs in the background."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from enum import Enum
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbddp.controller.recoverer import Recoverer
from nbddp.controller.spec import GroupSpec
from nbddp.errors import CellFailedError, RequestError
from nbddp.magics.auto import AutoMode
from nbddp.magics.options import check_unchanged
from nbddp.magics.steered import SteeredGroup
from nbddp.record.cell import CellRequest, CellResult, Deed
from nbddp.ui.frontend import shows_widgets
from nbddp.ui.screen import PAGE_PACE, IPythonScreen, View, shows_color
from nbddp.ui.text.status import status
from nbddp.ui.text.view import TextView


class ViewChoice(Enum):
    """How cells are shown."""

    AUTO = "auto"
    PANEL = "panel"
    TEXT = "text"


class Desk:
    """One per IPython shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.auto = AutoMode()
        self.group = SteeredGroup(colors=str(shell.colors))
        self.view = ViewChoice.AUTO
        self._background: tuple[Future[CellResult], threading.Thread] | None = None
        self._last_view: View | None = None

    def make_ready(self, spec: GroupSpec, *, fresh: bool, is_recovery: bool = False) -> None:
        """See to it that the group runs as asked: start it, restart it, or find it so."""
        if not fresh:
            self.group.session.settle()
        if self.group.is_live and not fresh:
            check_unchanged(spec, self.group.spec)
            return
        before, self.group.spec = self.group.spec, spec
        try:
            if is_recovery:
                self.group.recover()
            elif self.group.is_live:
                self.group.restart()
            else:
                self.group.start()
        except RequestError:
            self.group.spec = before
            raise

    def run(self, request: CellRequest, *, quiet: bool, max_restarts: int = 0) -> CellResult:
        """Run a cell, show it, and raise what it raised."""
        result = self._recoverer(quiet=quiet).run(request, max_restarts=max_restarts)
        self._raise_for_failure(result)
        return result

    def _recoverer(self, *, quiet: bool) -> Recoverer:
        return self.group.recoverer(lambda: self._view(quiet=quiet), say=self._remark)

    def _remark(self, text: str) -> None:
        self.say(f"nbddp: {text}")

    def _raise_for_failure(self, result: CellResult) -> None:
        try:
            result.raise_for_failure()
        except CellFailedError as error:
            error.is_shown = self._has_record
            raise

    @property
    def _has_record(self) -> bool:
        """Whether the last cell's view has told already why it failed."""
        return self._last_view is not None and self._last_view.has_record

    def run_in_background(
        self, request: CellRequest, *, quiet: bool, max_restarts: int = 0
    ) -> None:
        """Run a cell; show it on a thread whose output stays in this notebook cell.

        Raises:
            RequestError: it cannot run now.
        """
        outcome: Future[CellResult] = Future()
        recoverer = self._recoverer(quiet=quiet)
        handle = recoverer.begin(request)

        def run() -> None:
            try:
                result = recoverer.follow(handle, max_restarts=max_restarts)
                if result.verdict is not None and not self._has_record:
                    self.say(result.verdict.report())
                outcome.set_result(result)
            except BaseException as error:  # noqa: BLE001 - it is raised in `%ddp wait`
                outcome.set_exception(error)

        thread = threading.Thread(
            target=copy_context().run, args=(run,), name="nbddp-view", daemon=True
        )
        thread.start()
        self._background = outcome, thread

    def wait(self) -> None:
        """Wait for the cell in the background; raises what it raised."""
        if self._background is None:
            return
        outcome, thread = self._background
        with self.group.session.taking_interrupts():
            thread.join()
        self._background = None
        self._raise_for_failure(outcome.result())

    def arm(self, kind: str, *, rank: int, step: int, factor: float) -> None:
        """Tell a rank to let something go wrong at a step.

        Raises:
            RequestError: there is no such kind, or no such rank.
        """
        from nbddp.train.faults import Fault  # loads torch

        Fault(kind=kind, rank=rank, step=step, factor=factor)
        options = f"step={step}, rank={rank}, kind={kind!r}, factor={factor}, again=True"
        request = CellRequest(source=f"nbddp.faults.at({options})", ranks=(rank,))
        self._raise_for_failure(self._recoverer(quiet=True).run(request, max_restarts=0))

    def replay(self, deeds: Sequence[Deed]) -> None:
        """Do again what was done before a restart."""
        self.group.replay(deeds, say=self._remark)

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """Names of the notebook, with their values.

        Raises:
            UsageError: one does not exist.
        """
        for name in names:
            if name not in self.shell.user_ns:
                raise UsageError(f"there is no {name!r} in the notebook to push")
        return {name: self.shell.user_ns[name] for name in names}

    def check_syntax(self, cell: str, first_line: int) -> None:
        """Find out before anything is started.

        Raises:
            UsageError: with the line and what is wrong in it.
        """
        if not cell.strip():
            raise UsageError("the cell is empty: nothing to run")
        source = "\n" * (first_line - 1) + self.shell.transform_cell(cell)
        try:
            compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        except SyntaxError as error:
            raise UsageError(_explain(error)) from None

    def with_init(self, spec: GroupSpec, *, init: bool) -> GroupSpec:
        """The spec for a start by a cell that does, or does not, want a process group."""
        return replace(spec, joins_group=init)

    def say(self, text: str) -> None:
        """Tell the user something."""
        screen = IPythonScreen()
        screen.write(f"{text}\n")
        screen.flush()

    def close(self) -> None:
        """End the group."""
        self.group.close()

    def show_status(self) -> None:
        """Show the group and the output of the last cell as they are right now."""
        snapshot = self.group.session.snapshot()
        text = status(snapshot)
        if not (snapshot.state.is_live and self._wants_panel()):
            self.say(text)
            return
        from nbddp.ui.panel.view import PanelView, display_status

        last = self._last_view if isinstance(self._last_view, PanelView) else None
        display_status(self.group.session, snapshot, last, text=text)

    def _view(self, *, quiet: bool) -> View:
        self._last_view = view = self._new_view(quiet=quiet)
        return view

    def _new_view(self, *, quiet: bool) -> View:
        has_color = shows_color(self.shell)
        if quiet or not self._wants_panel():
            screen = IPythonScreen()
            return TextView(screen, is_quiet=quiet, has_color=has_color, pace=PAGE_PACE)
        from nbddp.ui.buttons.live import LiveComms  # they load widgets, which no terminal needs
        from nbddp.ui.panel.view import PanelView

        live = LiveComms.of(self.shell)
        return PanelView(self.group.session, live, IPythonScreen(), has_color=has_color)

    def _wants_panel(self) -> bool:
        if self.view is ViewChoice.AUTO:
            return shows_widgets(self.shell)
        return self.view is ViewChoice.PANEL and hasattr(self.shell, "kernel")


def _explain(error: SyntaxError) -> str:
    text = (error.text or "").rstrip("\n")
    pointer = " " * max(0, (error.offset or 1) - 1) + "^"
    return f"syntax error in line {error.lineno}: {error.msg}\n    {text}\n    {pointer}"
