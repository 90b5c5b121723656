"""The notebook's half of an extension: what it can do there, and when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nbddp.controller.session import Session
from nbddp.extension.guard import Guard, Hooks
from nbddp.extension.installed import command_name, installed
from nbddp.group.display import TextDisplay
from nbddp.group.notebook_events import NotebookEvent
from nbddp.group.rank_group import RankGroup
from nbddp.record.cell import CellHandle, CellRequest, CellResult
from nbddp.ui.report.blocks import Report
from nbddp.wire.frozen import Frozen
from nbddp.wire.group_spec import GroupSpec

T = TypeVar("T", bound=Frozen)


class Notebook(Protocol):
    """What the core does for an extension in the notebook."""

    group: RankGroup  # the ranks of the cells, and those of the last script
    last_request: CellRequest | None  # the last cell or script
    last_succeeded: bool  # whether it succeeded

    @property
    def current_run(self) -> Path | None:
        """The folder of the current run; None if no run is going on."""

    @property
    def last_run(self) -> Path | None:
        """The folder of the last script, if no cell ran since; otherwise of the current run."""

    @property
    def has_record(self) -> bool:
        """Whether the last cell is shown with the reason of its failure, and with its slow rank."""

    def run_on_ranks(self, source: str, ranks: tuple[int, ...] | None, command: str) -> None:
        """Run the code of a command on ranks, all if None, and in a replay too.

        Its failure raises. ``command`` has the options, too; a replay and an export name it.
        """

    def evaluate_on_ranks(self, source: str) -> list[Any]:
        """Run code once on all ranks, in no replay; return the value of each. A failure raises."""

    def follow(self, handle: CellHandle) -> None:
        """Show a cell that this notebook did not start, until it ends."""

    def print_line(self, text: str) -> None:
        """Print a line for the user, between two cells."""

    def tell(self, event: NotebookEvent) -> None:
        """Tell an event to all extensions that hear of its kind."""

    def show(self, report: Report) -> None:
        """Show a report as HTML, as a picture or as text, as the front end supports."""

    def notifier(self) -> Callable[[str], None]:
        """Return a function that shows a sentence in the running or next cell of these ranks.

        Any thread may call it. When the ranks have ended, it prints the sentence at once.
        """


class CellToRun(Frozen):
    """A cell or script before it runs.

    Attributes:
        given: the options of extensions, by their class.
    """

    given: Mapping[type[Frozen], Any]

    def options(self, kind: type[T]) -> T:
        """Return the options of an extension."""
        options: T = self.given.get(kind) or kind()
        return options


class UnstartedCell(CellToRun):
    """A cell before ranks are started for it.

    Attributes:
        spec: the spec of the ranks.
        values: pushed to the ranks before it runs, by name.
        fresh: whether the cell starts with empty namespaces.
        display: shows what runs instead of the cell.
        run: runs a cell on the ranks of a session and shows it; a failure does not raise.
    """

    request: CellRequest
    spec: GroupSpec
    values: Mapping[str, Any]
    fresh: bool
    display: TextDisplay
    run: Callable[[Session, CellRequest], CellResult]


class CellWithResult(CellToRun):
    """A cell or script that has ended, and was shown.

    Attributes:
        session: the session of its ranks, of which some may have died.
    """

    session: Session
    result: CellResult


class NotebookHalf:
    """The half of an extension in the notebook; it overrides the hooks that it needs.

    It is made when a line has its first command or option, or at its first event. Its methods with
    the names of its commands carry them out.
    """

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook

    def before_cell(self, cell: CellToRun) -> Frozen | None:
        """Prepare for a cell or script; its ranks run.

        Return options that replace those of the line, or None.
        """
        del cell
        return None

    def run_cell(self, cell: UnstartedCell) -> bool:
        """Prepare for a cell, or run it in another way; return whether that was done.

        Called before ranks are started for the cell. Its errors are those of the cell, which then
        does not run.
        """
        del cell
        return False

    def before_start(self, spec: GroupSpec, options: Any) -> None:
        """Prepare for the ranks of a cell or of `%ddp start` that has ``start_options``.

        They may run already. Its errors are those of the line, which then starts nothing.
        """

    def after_cell(self, cell: CellWithResult) -> Sequence[Report]:
        """Return reports to show below a cell or script that had options of the extension.

        For a cell in the background, it is called on its thread, and `%ddp wait` shows them again.
        """
        del cell
        return ()

    def on_event(self, event: NotebookEvent) -> None:
        """Hear of an event, on the thread that caused it; after an interrupt, on another."""


class NotebookHalves:
    """The halves of all extensions in one notebook."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        guard = Guard(lambda text: notebook.notifier()(text), lambda: notebook.group.life.attempt)
        self._hooks: Hooks[NotebookHalf] = Hooks("notebook", guard, notebook)

    def command(self, name: str) -> Callable[[Any], Any]:
        """Return the method that carries out a command."""
        [owner] = (
            extension.name
            for extension in installed().values()
            if name in map(command_name, extension.commands)
        )
        method: Callable[[Any], Any] = getattr(self._hooks.load(owner), name.replace("-", "_"))
        return method

    def before_cell(self, cell: CellToRun) -> Mapping[type[Frozen], Any]:
        """Call the hook of each extension that is in use, or whose options the cell has.

        Return the options that the cell then has.
        """
        found = self._hooks.call(
            "before_cell", lambda _, half: half.before_cell(cell), self._used(cell)
        )
        return {**cell.given, **{type(options): options for options in found.values()}}

    def after_cell(
        self, request: CellRequest, session: Session, result: CellResult
    ) -> list[Report]:
        """Show the reports of the extensions whose options the cell had, and return them.

        The user waits for these reports, so there is no limit of time.
        """
        cell = CellWithResult(given=request.given, session=session, result=result)

        def call(_: str, half: NotebookHalf) -> Sequence[Report]:
            reports = half.after_cell(cell)
            for report in reports:
                self._notebook.show(report)  # an error in a report belongs to the hook
            return reports

        names = self._with_options(cell)
        found = self._hooks.call("after_cell", call, names, slow=names)
        return [report for reports in found.values() for report in reports]

    def run_cell(self, cell: UnstartedCell) -> bool:
        """Let the extensions that are in use, or whose options the cell has, run it otherwise."""
        return any(self._hooks.load(name).run_cell(cell) for name in self._used(cell))

    def before_start(self, spec: GroupSpec, given: Mapping[type[Frozen], Any]) -> None:
        """Call the hook of each extension whose ``start_options`` the line has."""
        for name in self._hooks.names:
            kind = installed()[name].start_options
            if kind is not None and kind in given:
                self._hooks.load(name).before_start(spec, given[kind])

    def tell(self, event: NotebookEvent, *, is_urgent: bool = False) -> None:
        """Call the hook of each extension that hears of such events.

        ``is_urgent``: the cell of the event was interrupted.
        """
        names = [name for name in self._hooks.names if type(event) in installed()[name].events]
        self._hooks.call(
            "on_event", lambda _, half: half.on_event(event), names, is_urgent=is_urgent
        )

    def _used(self, cell: CellToRun) -> list[str]:
        """Return the extensions that are in use, or whose options a cell has."""
        used = {*self._hooks.made, *self._with_options(cell)}
        return [name for name in self._hooks.names if name in used]

    def _with_options(self, cell: CellToRun) -> list[str]:
        """Return the extensions whose options a cell has."""
        kinds = {name: installed()[name] for name in self._hooks.names}
        return [
            name
            for name, kind in kinds.items()
            if kind.options in cell.given or kind.cell_options in cell.given
        ]


def options_for_ranks(given: Mapping[type[Frozen], Any]) -> dict[str, dict[str, Any]]:
    """Return the options of extensions that ranks obey, by extension and name."""
    with_rank = {kind.options: name for name, kind in installed().items() if kind.rank}
    return {
        with_rank[kind]: asdict(options) for kind, options in given.items() if kind in with_rank
    }
