"""The ranks of a notebook or a script: their session, their nodes and the ranks of scripts."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nbddp.checks.facts import RankFacts
from nbddp.controller.group_spec import GroupSpec
from nbddp.controller.rank_requests import RankRequests
from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.group import push_pull
from nbddp.group.node_pool import NodePool, NodesSpec
from nbddp.group.script_ranks import ScriptRanks
from nbddp.group.timeline import timeline_of
from nbddp.lifecycle.group_state import GroupState, Life
from nbddp.lifecycle.refusals import NO_GROUP
from nbddp.nodes.join_file import JoinFile
from nbddp.record.heal.heal_report import Healed
from nbddp.record.waiting.collective_timeline import Timeline
from nbddp.sigint import sigint_deferred, start_thread
from nbddp.wire.request_messages import CollectFacts

WRONG_PROCESS = (
    "this worker group belongs to process {}, which made it; a forked process can make its own"
)


class RankGroup:
    """Starts, ends and asks the ranks of one notebook or script.

    Args:
        spec: of the next start.
        session: None for one of its own.
        colors: IPython's theme for tracebacks; empty for the one that fits stderr.
        not_started: the error of a request that needs ranks, while there are none.
        will_return: whether this process ends to begin anew, so that nodes may wait for it.

    Attributes:
        nodes: where the ranks run; None for this machine.
    """

    def __init__(
        self,
        spec: GroupSpec,
        session: Session | None = None,
        *,
        colors: str = "",
        not_started: str = NO_GROUP,
        will_return: Callable[[], bool] = lambda: False,
    ) -> None:
        self.nodes: NodePool | None = None
        self._spec = spec
        self._session = session or Session(colors=colors or _default_colors())
        self._scripts = ScriptRanks(self._session)
        self._not_started = not_started
        self._will_return = will_return
        self._pid = os.getpid()
        self._start_lock = threading.Lock()

    @property
    def session(self) -> Session:
        """The session of the cells' ranks; a forked process does not have its threads."""
        self._check_process()
        return self._session

    @property
    def scripts(self) -> ScriptRanks:
        """The ranks of the last script."""
        self._check_process()
        return self._scripts

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RequestError(WRONG_PROCESS.format(self._pid))

    @property
    def life(self) -> Life:
        """The state of the cells' ranks."""
        return self.session.life

    @property
    def is_live(self) -> bool:
        """Whether there are ranks for cells."""
        return self.life.state.is_live

    @property
    def spec(self) -> GroupSpec:
        """The spec of the next start; while ranks run, with their number."""
        running = self.session.spec if self.is_live else None
        return self._spec if running is None else replace(self._spec, nproc=running.nproc)

    @spec.setter
    def spec(self, spec: GroupSpec) -> None:
        self._spec = spec

    # ---- life

    def preload(self) -> None:
        """Prepare in the background, so that the first start is quick."""
        self.start_forkserver()
        start_thread(threading.Thread(target=self._preload_rest, name="nbddp-warm-up", daemon=True))

    def _preload_rest(self) -> None:
        importlib.import_module("torch.distributed")
        with self._start_lock:  # a start that was asked for meanwhile goes first
            pass
        self._session.launcher.preload_more()

    def start_forkserver(self) -> None:
        """Start the process that ranks are forked from; it imports torch by itself."""
        self.close_at_exit()
        self.session.launcher.preload()

    def start(self) -> None:
        """Start the ranks and wait until all are ready.

        Raises:
            RequestError: they run already, or the group cannot be had.
            StartError: a rank could not start.
        """
        session = self.session
        self.close_at_exit()
        with self._start_lock:
            session.start(self._spec)

    def restart(self, *, is_recovery: bool = False) -> None:
        """Stop all ranks, even in a running cell, and start new ones; their names are lost.

        The replay of a recovery arms faults again, except those that have struck.

        Raises:
            RequestError: the group cannot be had.
            StartError: a rank could not start.
        """
        self.close_at_exit()
        self.scripts.close()
        self.session.restart(self._spec, is_recovery=is_recovery)

    def stop(self) -> None:
        """End all ranks, and send their nodes home; the next start is still quick."""
        self.scripts.close()
        self.session.stop()
        with sigint_deferred():  # what is left open could not be closed any more
            nodes, self.nodes = self.nodes, None
            if nodes is not None:
                nodes.close()

    def close(self) -> None:
        """End all ranks and everything that was started for them."""
        session = self.session
        if self.nodes is not None and self._will_return():
            self.nodes.detach()
        elif self.nodes is not None:
            self.stop()
        atexit.unregister(self.close_in_own_process)
        self.scripts.close()
        session.close()

    def close_in_own_process(self) -> None:
        """Close; do nothing in a forked process, which has nothing to close."""
        if os.getpid() == self._pid:
            self.close()

    def close_at_exit(self) -> None:
        """Close before multiprocessing's own hook, which would wait for the ranks to end."""
        atexit.unregister(self.close_in_own_process)
        atexit.register(self.close_in_own_process)

    # ---- many machines

    def open_nodes(self, spec: NodesSpec, join: JoinFile | None = None) -> NodePool:
        """Listen for nodes; the next ranks run on those that join.

        Raises:
            RequestError: there are ranks, a door is open, or nobody can listen there.
        """
        if self.nodes is not None:
            raise RequestError(
                "the door is open already: `%ddp nodes --local 1` adds a node of this machine, "
                "`%ddp stop` sends all nodes home"
            )
        self.close_at_exit()
        with sigint_deferred():  # a door that nobody knows of could not be closed
            self.nodes = NodePool(
                self.session, spec, join, active=lambda: self.scripts.active_session
            )
        return self.nodes

    def rejoin(self, spec: NodesSpec, join: JoinFile, seconds: float) -> str:
        """Go on with the nodes and ranks that another notebook has left.

        Args:
            spec: of the door.
            join: of the other notebook's.
            seconds: how long to wait for ranks that are missing.

        Returns:
            Which ranks and nodes are back, in one line.

        Raises:
            RequestError: there are ranks here, a door is open, or nobody has come back. All is
                then as it was before, and so it is after an interrupt: it can be tried again.
        """
        with sigint_deferred(raises_second=False) as held:
            nodes = self.open_nodes(spec, join)
            try:
                returned = nodes.rejoin(seconds, lambda: held.count > 0)
            except BaseException:
                self.nodes = None
                nodes.abandon()
                raise
            if returned is not None:
                held.raises_second = True  # it ends the ranks
                self._spec = replace(self._spec, **returned.options)
                self.session.start(self._spec, returned)
            return nodes.describe_rejoined(returned)

    # ---- what is asked of the ranks

    def check_started(self) -> None:
        """Refuse a request that needs ranks.

        Raises:
            RequestError: there are none.
        """
        if not self.is_live:
            raise RequestError(self._not_started)

    def interrupt(self) -> None:
        """End the running cell and keep every name; a second time, kill what does not answer."""
        self.scripts.active_session.interrupt()

    def kill(self, rank: int) -> None:
        """Kill one rank, as if it had run out of memory; a cell that runs fails on it.

        Raises:
            ArgumentError: there is no such rank.
            RequestError: it is gone already, or there is no group.
        """
        session = self.scripts.active_session
        if not session.life.state.is_live:
            raise RequestError(self._not_started)
        RankRequests(session).check_ranks([rank])
        session.kill(rank)

    def heal(self, ranks: Sequence[int] = (), *, donor: int | None = None) -> Healed:
        """Replace ranks that are gone by new ones with a donor's names (the lowest that lives).

        Raises:
            RequestError: it cannot be done; the group is as it was before.
        """
        self.check_started()
        return self.session.heal(ranks, donor)

    def push(self, values: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Put values into the namespaces of these ranks, or of all; see :class:`WorkerGroup`."""
        self.check_started()
        push_pull.push(self.session, values, ranks)

    def pull(self, expression: str, *, rank: int | None = None) -> Any:
        """Return the value of an expression on a rank, or of all ranks as a list."""
        self.check_started()
        values = push_pull.pull(self.session, expression, None if rank is None else [rank])
        return values if rank is None else values[0]

    def timeline(self, last: int | None = None) -> Timeline:
        """Return who waited for whom in the last cell, or in its last so many steps."""
        return timeline_of(self.scripts.last_session, last)

    def collect_facts(self) -> dict[int, RankFacts]:
        """What every rank says of its names, for checks; nothing while they are busy, or gone."""
        if self.life.state is not GroupState.IDLE or not self.life.alive:
            return {}
        requests = RankRequests(self.session)
        answers = requests.request(self.life.alive, lambda number: CollectFacts(request=number))
        return {rank: RankFacts.from_json(each.content) for rank, each in answers.items()}


def _default_colors() -> str:
    """IPython's theme for tracebacks: none where escape sequences would be read as they are."""
    return "" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else "nocolor"
