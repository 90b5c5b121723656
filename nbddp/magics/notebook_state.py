"""The state that all magics of a notebook share: the group, its presentation, a background cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbddp.controller.session import Session
from nbddp.errors import CellFailedError, RequestError
from nbddp.formatting import plural
from nbddp.group.notebook_events import CellLeftOut, CellShown, NotebookEvent, PushAsked
from nbddp.group.notebook_half import CellToRun, NotebookHalves, options_for_ranks
from nbddp.group.push_pull import check_names
from nbddp.group.rank_group import RankGroup
from nbddp.group.recovery import Recovery
from nbddp.magics.auto_mode import AutoMode
from nbddp.magics.notebook_names import describe_name
from nbddp.magics.notebook_ranks import NotebookRanks
from nbddp.magics.presenter import NotebookDisplay, Presenter
from nbddp.magics.run_arguments import RunArguments
from nbddp.record.cell import CellHandle, CellRequest, CellResult, is_interrupted
from nbddp.record.verdict import Verdict
from nbddp.sigint import Future, run_in_thread, sigint_deferred, wait_for_all
from nbddp.ui.frontend import is_restarting, is_shutting_down
from nbddp.ui.report.blocks import Block, Report
from nbddp.ui.report.render import text_lines
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.options.option_values import ALL_RANKS

Outcome = tuple[CellResult, Sequence[Report]]


class NotebookState:
    """The state of the magics in one IPython shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.auto = AutoMode()
        self.group = RankGroup(
            GroupSpec(),
            colors=str(shell.colors),
            will_return=partial(is_restarting, shell),
            is_ending=partial(is_shutting_down, shell),
        )
        self.group.session.describe_name = partial(describe_name, shell.user_ns)
        self.presenter = Presenter(shell)
        self.ranks = NotebookRanks(self.group, self.presenter)
        self.extensions = NotebookHalves(self)
        self.presenter.remarks = self._remarks
        self.last_request: CellRequest | None = None
        self.last_succeeded = False
        self._background: Future[Outcome] | None = None
        self._last_failure: Verdict | None = None
        self._failed_attempt: tuple[Session, int] | None = None  # the session and its attempt

    @property
    def current_run(self) -> Path | None:
        """The folder of the current run; None if no run is going on."""
        session = self.group.scripts.active_session
        return session.event_log.folder if session.life.state.is_live else None

    @property
    def last_run(self) -> Path | None:
        """The folder of the last script, if no cell ran since; otherwise of the current run."""
        session = self.group.scripts.last_session
        path = session.event_log.path
        is_of_script = session is not self.group.session and path is not None and path.exists()
        return path if is_of_script else self.current_run

    @property
    def has_record(self) -> bool:
        """Whether the last cell is shown with the reason of its failure, and with its slow rank."""
        return self.presenter.has_record

    @property
    def prompt_number(self) -> int:
        """The number in the prompt of the running cell.

        In newer versions IPython's own counter is one ahead of it; its display hook has the number.
        """
        return int(self.shell.displayhook.prompt_count)

    def run_script(self, request: CellRequest, args: RunArguments) -> None:
        """Run a script on its own ranks. Its options do not apply to later scripts or cells.

        Raises:
            RequestError: a cell or another script is running, or the ranks cannot be started.
        """
        spec = self.ranks.requested_spec(args)
        session = self.group.scripts.open()
        number = spec.nproc if args.ranks is None else len(args.ranks)
        text = f"starting {plural(number, 'rank')} ..."
        with self.presenter.showing_start(text, session, quiet=args.quiet):
            spec = replace(spec, ranks=args.ranks, name=args.start.get("name", ""))
            self.group.scripts.start(spec, request.script)
            self.run(request, args, session)

    def run(
        self, request: CellRequest, args: RunArguments, session: Session | None = None
    ) -> CellResult | None:
        """Run a cell or a script with its options; return None if it runs in the background.

        Args:
            request: the cell or script.
            args: its options.
            session: the session of the ranks; None for the session of the cells.
        """
        session = session or self.group.session
        recovery = Recovery(session, NotebookDisplay(self.presenter, quiet=args.quiet))
        request, retries = self._apply_options(request, args, session), args.retries

        def follow(handle: CellHandle | None = None) -> Outcome:
            result = recovery.run(request, retries, handle)
            reports = self._finish_cell(result, session, request)
            if handle is not None:
                self._print_failure(result)
            return result, reports

        if not args.no_wait:
            result, _ = follow()
            self._raise_for_failure(result)
            return result
        with sigint_deferred():  # an interrupt here would leave a cell without its follower
            handle = recovery.submit(request, retries)
            # in this context, the output of the thread stays in this notebook cell
            work = partial(copy_context().run, follow, handle)
            self._background = run_in_thread("nbddp-view", work)
        return None

    def run_trial(
        self, session: Session, request: CellRequest, args: RunArguments, display: NotebookDisplay
    ) -> CellResult:
        """Run a cell on the ranks of a trial and show it.

        A failure does not raise, as more trials may follow.
        """
        request = self._apply_options(request, args, session)
        result = Recovery(session, display).run(request, args.retries)
        self.last_succeeded = result.is_ok
        self._print_failure(result)
        return result

    def _print_failure(self, result: CellResult) -> None:
        """Print why a cell failed, unless its view has shown it; the error is not raised here."""
        if result.verdict is not None and not self.presenter.has_record:
            self.presenter.print_line(result.verdict.report())

    def _apply_options(
        self, request: CellRequest, args: RunArguments, session: Session
    ) -> CellRequest:
        options = args.for_ranks()
        if args.break_ranks == ALL_RANKS:
            options["break_ranks"] = tuple(session.life.all_ranks)
        given = self.extensions.before_cell(CellToRun(given=args.extensions))
        request = replace(request, **options, given=given, options=options_for_ranks(given))
        self.last_request, self.last_succeeded = request, False
        return request

    def _finish_cell(
        self, result: CellResult, session: Session, request: CellRequest
    ) -> Sequence[Report]:
        """After a cell, show and return reports; after a failure, show the retry buttons."""
        self.last_succeeded = result.is_ok
        if request.once or not result.is_ok:
            reason = "it is marked --once" if request.once else "it failed"
            left_out = CellLeftOut(request=request, reason=reason)
            self.extensions.tell(left_out, is_urgent=is_interrupted(result))
        reports = self.extensions.after_cell(request, session, result)

        verdict, life = result.verdict, session.life
        if verdict is not None and not verdict.first.is_quit:
            self._last_failure, self._failed_attempt = verdict, (session, life.attempt)
        if request.has_own_ranks:  # a heal or a restart cannot restore a script's ranks
            self.group.scripts.end(session, result)
        elif verdict is not None and not verdict.is_interrupt and not verdict.ended_by:
            can_heal = life.gone and life.alive
            self.presenter.show_retry_buttons(
                restart=self.ranks.restart,
                heal=(lambda: str(self.ranks.heal())) if can_heal else None,
            )
        return reports

    def debug(self, rank: int | None, commands: Sequence[str] = ()) -> None:
        """Debug the last failure, on its first cause if no rank is named.

        Raises:
            RequestError: no cell has failed.
        """
        session = self.group.scripts.active_session
        if rank is None:
            if not self._last_failure or self._failed_attempt != (session, session.life.attempt):
                raise RequestError("no cell of these ranks has failed: there is nothing to debug")
            rank = self._last_failure.first.rank
        request = CellRequest(
            source="%debug",
            ranks=(rank,),
            execution_count=self.prompt_number,
            needs_group=None,
            once=True,
            answers=tuple(commands),
        )
        self._run_and_raise(request, session, quiet=False)

    def _run_and_raise(self, request: CellRequest, session: Session, *, quiet: bool) -> CellResult:
        display = NotebookDisplay(self.presenter, quiet=quiet)
        result = Recovery(session, display).run(request)
        self._raise_for_failure(result)
        return result

    def _raise_for_failure(self, result: CellResult, *, is_shown: bool = False) -> None:
        try:
            result.raise_for_failure()
        except CellFailedError as error:
            error.is_shown = is_shown or self.presenter.has_record
            raise

    def wait(self) -> None:
        """Wait for the running cell, and raise its failure.

        The reports below a background cell are shown here again.
        """
        background = self._background
        if background is None:
            self._follow_cell_without_view()
            return
        with self.group.scripts.active_session.forward_interrupts():
            wait_for_all([background])
        self._background = None
        result, reports = background.result()
        for report in reports:  # the cell may be far above, or no longer shown
            self.presenter.show(report)
        # a terminal has no cells: it has shown the report where this error appears
        self._raise_for_failure(result, is_shown=not hasattr(self.shell, "kernel"))

    def _follow_cell_without_view(self) -> None:
        """Show a running cell whose view ended before it, such as after an error in nbddp."""
        session = self.group.scripts.active_session
        handle = session.cell
        if handle is None or handle.is_finished:
            return
        if handle.notice_queue.has_reader and not handle.is_rejoined:
            return
        handle.notice_queue.attach_reader()
        self.follow(handle)

    def follow(self, handle: CellHandle) -> None:
        """Show a cell that this notebook did not start, until it ends."""
        session = self.group.scripts.active_session
        display = NotebookDisplay(self.presenter, quiet=False)
        result = Recovery(session, display).run(handle.request, handle=handle)
        self._finish_cell(result, session, handle.request)
        self._raise_for_failure(result)

    def run_on_ranks(self, source: str, ranks: tuple[int, ...] | None, command: str) -> None:
        """Run the code of a command on ranks, all if None, and in a replay too."""
        request = CellRequest(
            source=source, ranks=ranks, execution_count=self.prompt_number, command=command
        )
        self._run_and_raise(request, self.group.session, quiet=True)

    def evaluate_on_ranks(self, source: str) -> list[Any]:
        """Run code once on all ranks, in no replay; return the value of each."""
        request = CellRequest(
            source=source, execution_count=self.prompt_number, wants_value=True, once=True
        )
        return self._run_and_raise(request, self.group.session, quiet=True).values()

    def print_line(self, text: str) -> None:
        """Print a line for the user."""
        self.presenter.print_line(text)

    def show(self, report: Report) -> None:
        """Show a report."""
        self.presenter.show(report)

    def tell(self, event: NotebookEvent) -> None:
        """Tell an event to all extensions that hear of its kind."""
        self.extensions.tell(event)

    def _remarks(self, session: Session, handle: CellHandle) -> list[Block]:
        """Return what extensions say below a cell."""
        shown: list[Block] = []

        def add(blocks: Sequence[Block]) -> None:
            list(text_lines(blocks))  # an error in a block is one of the hook that adds it
            shown.extend(blocks)

        event = CellShown(session=session, handle=handle, add=add)
        self.extensions.tell(event, is_urgent=is_interrupted(handle.result))
        return shown

    def notifier(self) -> Callable[[str], None]:
        """Return a function that shows a sentence in the running or next cell of these ranks."""
        return partial(self._notify, self.group.scripts.active_session)

    def _notify(self, session: Session, text: str) -> None:
        # On any thread.
        with suppress(RequestError):
            session.call(session.event_log.notify, text)
            return
        self.presenter.print_line(f"nbddp: {text}")

    def show_messages(self) -> None:
        """Print the messages that would otherwise appear in the next cell."""
        for text in self.group.session.router.pending.take_messages():
            self.presenter.print_line(f"nbddp: {text}")

    def notebook_values(self, names: Sequence[str]) -> dict[str, Any]:
        """Return variables of the notebook with their values.

        Raises:
            UsageError: a name does not exist.
            ArgumentError: a name is refused.
        """
        check_names(names)
        for name in names:
            if name not in self.shell.user_ns:
                raise UsageError(f"there is no {name!r} in the notebook to push")
        self.extensions.tell(PushAsked(names=self.shell.user_ns))
        return {name: self.shell.user_ns[name] for name in names}
