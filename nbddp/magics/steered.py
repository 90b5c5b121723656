"""The worker group of a notebook: what the magics steer it by, and no script needs."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbddp.checks.facts import RankFacts
from nbddp.controller.asking import Asking
from nbddp.controller.session import Session
from nbddp.controller.spec import GroupSpec
from nbddp.errors import RequestError
from nbddp.group import WorkerGroup, default_colors
from nbddp.group.nodes import Nodes, NodesSpec
from nbddp.group.script_ranks import ScriptRanks
from nbddp.interrupts import begin, interrupt_held_back
from nbddp.launch.launcher import Launcher
from nbddp.lifecycle.reasons import NO_GROUP
from nbddp.lifecycle.states import GroupState, Life
from nbddp.nodes.joining import Join
from nbddp.nodes.returning import Returned
from nbddp.wire.name_messages import Survey


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
        """Restart the ranks for a replay.

        The replay arms faults again; those that have struck do not strike a second time.

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
            self.nodes = Nodes(self._session, spec, join, active=lambda: self._scripts.active)
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
        with interrupt_held_back(raises_second=False) as held:
            nodes = self.open_nodes(spec, join)
            try:
                returned = nodes.take_back(seconds, lambda: held.times > 0)
            except BaseException:
                self.nodes = None
                nodes.give_up()
                raise
            if returned is not None:
                held.raises_second = True  # it ends the ranks
                self._spec = replace(self._spec, **returned.options)
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

    def survey(self) -> dict[int, RankFacts]:
        """What every rank says of its names, for checks; nothing while they are busy, or gone."""
        if self.life.state is not GroupState.IDLE or not self.life.alive:
            return {}
        asking = Asking(self._session)
        answers = asking.ask(self.life.alive, lambda number: Survey(request=number))
        return {rank: RankFacts.read(each.payload) for rank, each in answers.items()}
