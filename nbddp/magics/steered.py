"""The worker group of a notebook: what the magics steer it by, and no script needs."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nbddp.checks.facts import RankFacts
from nbddp.controller.session import Session
from nbddp.controller.spec import GroupSpec
from nbddp.errors import RequestError
from nbddp.group import WorkerGroup, default_colors
from nbddp.group.nodes import Nodes, NodesSpec
from nbddp.group.recovery import Recovery
from nbddp.group.script_ranks import ScriptRanks
from nbddp.group.worker_group import show
from nbddp.interrupts import OneInterrupt, begin, interrupt_held_back
from nbddp.launch.launcher import Launcher
from nbddp.lifecycle.reasons import NO_GROUP
from nbddp.lifecycle.states import GroupState, Life
from nbddp.nodes.joining import Join
from nbddp.nodes.returning import Returned
from nbddp.promise import await_all
from nbddp.record.cell import CellHandle, CellRequest, CellResult, Deed
from nbddp.ui.screen import StreamScreen, View
from nbddp.ui.text.view import TextView
from nbddp.wire.messages import Command, JsonDict
from nbddp.wire.name_messages import Complete, Inspect, Survey


class SteeredGroup(WorkerGroup):
    """A worker group with its session and spec in the open.

    Args:
        launcher: starts the processes; None for one of its own.
        comes_back: whether this process ends to begin anew, so that nodes may wait for it.
        colors: IPython's theme for tracebacks.
        options: as for :class:`nbddp.WorkerGroup`.
    """

    _not_started = NO_GROUP

    def __init__(
        self,
        *,
        launcher: Launcher | None = None,
        colors: str = "",
        comes_back: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._session = Session(launcher, colors=colors or default_colors())
        self._comes_back = comes_back
        self.nodes: Nodes | None = None

    @property
    def session(self) -> Session:
        """Who acts on the ranks."""
        return self._session

    @session.setter
    def session(self, session: Session) -> None:
        self._session = session

    @property
    def scripts(self) -> ScriptRanks:
        """The ranks of the last script."""
        return self._scripts

    @property
    def spec(self) -> GroupSpec:
        """How the next start is to be; of a group that runs, with the ranks that it has."""
        running = self._session.spec if self.is_live else None
        return self._spec if running is None else replace(self._spec, nproc=running.nproc)

    @spec.setter
    def spec(self, spec: GroupSpec) -> None:
        self._spec = spec

    @property
    def life(self) -> Life:
        """What is known of the group right now."""
        return self._session.life

    # ---- life

    def warm_up(self) -> None:
        """Prepare in the background, so that the first start is quick."""
        self.start_helper()
        begin(threading.Thread(target=self._warm_up, name="nbddp-warm-up", daemon=True))

    def _warm_up(self) -> None:
        importlib.import_module("torch.distributed")
        with self._start_lock:  # a start that was asked for meanwhile goes first
            pass
        self._session.launcher.warm_up_more()

    def start_helper(self) -> None:
        """Start the process that ranks are forked from; it imports torch by itself."""
        self._close_at_exit()
        self._session.launcher.warm_up()

    def recover(self) -> None:
        """Restart, to do again what was done, as by :meth:`replay`.

        Faults that have struck do not strike again then, though they are armed anew.

        Raises:
            RequestError: the group cannot be had.
            StartError: a rank could not start.
        """
        self._close_at_exit()
        self._session.restart(self._spec, is_recovery=True)

    # ---- many machines

    def open_nodes(self, spec: NodesSpec, join: Join | None = None) -> Nodes:
        """Have ranks on the machines that come in from here on.

        Raises:
            RequestError: there are ranks, a door is open, or nobody can listen there.
        """
        if self.nodes is not None:
            raise RequestError(
                "the door is open already: `%ddp nodes --local 1` adds a node of this machine, "
                "`%ddp stop` sends all nodes home"
            )
        self._close_at_exit()
        with interrupt_held_back():  # a door that nobody knows of could not be closed
            self.nodes = Nodes(
                self._session, spec, join, remark=lambda text: self._scripts.active.remark(text)
            )
        return self.nodes

    def take_back(self, spec: NodesSpec, join: Join, seconds: float) -> Returned | None:
        """Go on with the nodes and ranks that another notebook has left.

        Args:
            spec: of the door.
            join: of the other notebook's.
            seconds: how long to wait for ranks that are missing.

        Returns:
            The ranks; None if only nodes have come back, which had none.

        Raises:
            RequestError: there are ranks here, a door is open, or nobody has come back. All is
                then as it was before, and so it is after an interrupt: it can be tried again.
        """
        with OneInterrupt() as interrupt:
            nodes = self.open_nodes(spec, join)
            try:
                with interrupt.let_in():
                    returned = nodes.take_back(seconds)
            except BaseException:
                self.nodes = None
                nodes.give_up()
                raise
            if returned is not None:
                self._spec = replace(self._spec, **returned.options)
                with interrupt_held_back(), interrupt.let_in():  # the second stop ends the ranks
                    self._session.start(self._spec, returned)
            return returned

    def stop(self) -> None:
        """End all ranks, and send the nodes home that they were on."""
        super().stop()
        self._close_nodes()

    def close(self) -> None:
        """End all ranks and everything that was started for them."""
        if self.nodes is not None and self._comes_back():
            self.nodes.leave_open()
        elif self.nodes is not None:
            self.stop()
        super().close()

    def _close_nodes(self) -> None:
        with interrupt_held_back():  # what is left open could not be closed any more
            nodes, self.nodes = self.nodes, None
            if nodes is not None:
                nodes.close()

    # ---- cells

    def submit(self, request: CellRequest) -> CellHandle:
        """Hand a cell to the ranks and return at once; somebody must read what the handle says.

        Args:
            request: the source, the ranks, and what is wanted of it.

        Raises:
            RequestError: it cannot run now; nothing was started, nothing lost.
        """
        return self._session.submit(request)

    def show(self, handle: CellHandle, view: View) -> CellResult:
        """Show a cell until it ends; Ctrl-C, or Jupyter's interrupt, interrupts the ranks.

        Args:
            handle: the cell, as :meth:`submit` returned it.
            view: where it is shown.
        """
        return show(self._session, handle, view)

    def recovery(
        self,
        session: Session,
        make_view: Callable[[], View],
        *,
        say: Callable[[str], None],
        note: Callable[[str], None] | None = None,
    ) -> Recovery:
        """What runs a cell again after a failure, each time in a view of its own.

        Args:
            session: whose ranks run the cell.
            make_view: makes the view of one attempt.
            say: tells the user what happens between two attempts.
            note: the same where the next view shows it; None: ``say`` does.
        """
        return self._recovery(session, make_view, say=say, note=note)

    def replay(
        self,
        deeds: Sequence[Deed],
        *,
        say: Callable[[str], None],
        restart: Callable[[], None] = lambda: None,
    ) -> None:
        """Do again what was done on an earlier attempt.

        Args:
            deeds: cells that had gone well and values that were pushed, in their order.
            restart: makes the ranks for it, before.
            say: tells the user how far it got.

        Raises:
            CellFailedError: a cell failed this time.
            CellInterruptedError: it was interrupted; what was done again until then stays.
        """
        quiet = self._recovery(
            self._session, lambda: TextView(StreamScreen(), is_quiet=True), say=say
        )
        failed = quiet.replay(deeds, restart=restart)
        if failed is not None:
            failed.raise_for_failure()

    def complete(self, code: str, cursor: int, *, timeout: float) -> tuple[str, list[str]]:
        """What fits at a place of some code, asked of the lowest rank.

        Args:
            code: Python, or whatever IPython takes.
            cursor: the place, in characters from the beginning.
            timeout: seconds to wait for the answer.

        Returns:
            The text before the cursor that is completed, and what fits there; nothing while the
            rank is busy or does not answer in time.
        """
        payload = self._ask_idle(
            lambda number: Complete(request=number, code=code, cursor=cursor), timeout
        )
        return payload.get("text", ""), payload.get("matches", [])

    def inspect(self, code: str, cursor: int, *, detail: int, timeout: float) -> str:
        """What the name at a place of some code is, asked of the lowest rank.

        Args:
            code: Python, or whatever IPython takes.
            cursor: the place, in characters from the beginning.
            detail: 1 for the source too.
            timeout: seconds to wait for the answer.

        Returns:
            The text that ``name?`` shows; empty if there is no such name, while the rank is busy
            or when it does not answer in time.
        """
        payload = self._ask_idle(
            lambda number: Inspect(request=number, code=code, cursor=cursor, detail=detail), timeout
        )
        return str(payload.get("text", ""))

    def survey(self) -> dict[int, RankFacts]:
        """What every rank says of its names, for checks; nothing while they are busy, or gone."""
        if self.life.state is not GroupState.IDLE or not self.life.alive:
            return {}
        answers = self._asking.ask(self.life.alive, lambda number: Survey(request=number))
        return {rank: RankFacts.read(each.payload) for rank, each in answers.items()}

    def _ask_idle(self, make: Callable[[int], Command], timeout: float) -> JsonDict:
        """What the lowest rank says, if it has the time."""
        if self.life.state is not GroupState.IDLE:
            return {}
        answer = self._session.send(0, make)
        await_all([answer], timeout)
        return answer.result().payload if answer.done() else {}
