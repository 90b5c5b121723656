"""Start, restart, replay and heal the ranks of a notebook, and say what changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from nbddp.errors import RequestError, StartError
from nbddp.formatting import plural, unknown_rank
from nbddp.group.rank_group import RankGroup
from nbddp.group.recovery import Recovery
from nbddp.lifecycle.refusals import with_way_out
from nbddp.magics.presenter import NotebookDisplay, Presenter
from nbddp.magics.run_arguments import GroupArguments, RunArguments, check_unchanged
from nbddp.record.heal.heal_report import Healed, describe_disarmed
from nbddp.record.run_folder import folder_name
from nbddp.wire.group_spec import GroupSpec

NOTHING_TO_REPLAY = "nothing to replay: no cell had succeeded since the ranks started"


class NotebookRanks:
    """The ranks of a notebook.

    Args:
        group: the ranks of the cells, and of scripts.
        presenter: shows what changes.
    """

    def __init__(self, group: RankGroup, presenter: Presenter) -> None:
        self.group = group
        self.presenter = presenter

    def requested_spec(self, args: GroupArguments) -> GroupSpec:
        """Return the spec of the group with the options of the line.

        Raises:
            RequestError: the spec needs more nodes than have joined.
        """
        spec, nodes = args.spec(self.group.spec), self.group.nodes
        is_new = not self.group.is_live or not isinstance(args, RunArguments) or args.fresh
        if nodes is None or "nproc" in args.start or not is_new:
            return spec
        return nodes.fit(spec)

    def check_ranks(self, args: RunArguments) -> None:
        """Check that the named ranks exist.

        Raises:
            RequestError: a rank does not exist.
        """
        world_size = args.start.get("nproc") or len(self.group.life.ranks) or self.group.spec.nproc
        for rank in (*(args.ranks or ()), *args.break_ranks):
            if rank >= world_size:
                raise RequestError(unknown_rank(rank, world_size))

    def ensure_started(
        self, spec: GroupSpec, *, fresh: bool, is_recovery: bool = False, new_run: bool = False
    ) -> None:
        """Start or restart the group if necessary, so that it runs as requested.

        Fresh ranks continue the run as its next attempt, or, with ``new_run``, start a new run.
        """
        if fresh:
            self.group.session.prepare(spec)  # before anything is ended
        self.group.scripts.end_previous(by_force=fresh)
        if not fresh:
            self.group.session.wait_for_pending_start()
        if self.group.is_live and not fresh:
            gone = [each.rank for each in self.group.life.ranks if not each.is_alive]
            check_unchanged(spec, self.group.spec, gone=gone)
            if spec.name != self.group.spec.name:  # the folder of the current run keeps its name
                self.group.spec = replace(self.group.spec, name=spec.name)
                name = folder_name(spec.name)
                used = f"be named {name}" if name else "have no name"
                message = f"nbddp: the current run keeps its name; the next run will {used}"
                self.presenter.print_line(message)
            return
        if fresh and not is_recovery and self.group.session.replay_log.pending:
            self.group.session.set_pending(())
        disarmed = () if is_recovery else self.group.session.armed_now
        before, self.group.spec = self.group.spec, spec
        try:
            if new_run and self.group.is_live:
                self.group.session.stop()
            if is_recovery or self.group.is_live:
                self.group.restart(is_recovery=is_recovery)
            else:
                self.group.start()
        except (RequestError, StartError, KeyboardInterrupt):
            started = self.group.session.spec if self.group.is_live else None
            self.group.spec = started or before
            raise
        self.presenter.hide_heal_button()
        if disarmed:
            self.presenter.print_line(f"nbddp: {describe_disarmed(disarmed)}")

    @contextmanager
    def started_for_cell(self, spec: GroupSpec, args: RunArguments) -> Iterator[None]:
        """Ensure that the ranks run; until the block ends, show in the cell that they start.

        Args:
            spec: the spec of the group.
            args: the options of the cell.
        """
        is_live = self.group.is_live
        text = f"{'restarting' if is_live else 'starting'} {plural(spec.nproc, 'rank')} ..."
        is_quiet = args.quiet or (is_live and not args.fresh)
        with self.presenter.showing_start(text, self.group.session, quiet=is_quiet):
            self.ensure_started(spec, fresh=args.fresh, new_run="name" in args.start)
            yield

    def restart(self) -> str:
        self.ensure_started(self.group.spec, fresh=True)
        return f"the ranks were restarted: attempt {self.group.life.run_attempt}"

    def restart_and_replay(self, spec: GroupSpec, *, new_run: bool = False) -> None:
        """Restart the ranks and replay all entries, also those that an earlier replay left out."""
        recovery = Recovery(self.group.session, NotebookDisplay(self.presenter, quiet=True))
        restart = partial(self.ensure_started, spec, fresh=True, is_recovery=True, new_run=new_run)
        log = self.group.session.replay_log
        entries, is_rejoined = log.all_entries, log.is_rejoined
        failed = recovery.replay(entries, restart=restart)
        if not entries and not is_rejoined:
            self.presenter.print_line(NOTHING_TO_REPLAY)
        if failed is not None:
            failed.raise_for_failure()

    def heal(
        self, ranks: Sequence[int] = (), *, donor: int | None = None, rerun: bool = False
    ) -> Healed:
        """Heal the group. If that is refused, the error also says what to do instead."""
        try:
            healed = self.group.heal(ranks, donor=donor, rerun=rerun)
        except RequestError as error:
            raise RequestError(with_way_out(str(error), self.group.life)) from None
        if not self.group.life.gone:
            self.presenter.hide_heal_button()
        return healed

    def rerun_after_heal(self) -> None:
        """Run the cells that make trainers again, on all ranks."""
        display = NotebookDisplay(self.presenter, quiet=True)
        failed = Recovery(self.group.session, display).rerun()
        if failed is not None:
            failed.raise_for_failure()
