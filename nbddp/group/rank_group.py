"""The ranks of a notebook or a script: their session, their nodes, and the ranks of scripts."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from nbddp.controller.rank_requests import check_ranks
from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.group import push_pull
from nbddp.group.script_ranks import ScriptRanks
from nbddp.lifecycle.group_state import Life
from nbddp.record.heal.heal_report import Healed
from nbddp.sigint import sigint_deferred, start_thread
from nbddp.wire.group_spec import GroupSpec

WRONG_PROCESS = (
    "this worker group belongs to process {}, which created it; a forked process can create its own"
)


class Nodes(Protocol):
    """The nodes of an extension, on which ranks run."""

    def fit(self, spec: GroupSpec) -> GroupSpec:
        """Return the spec with the number of ranks that the joined nodes can hold.

        Raises:
            RequestError: too few nodes have joined.
        """

    @property
    def is_kept(self) -> bool:
        """Whether the nodes and their ranks wait after each end of the notebook."""

    def detach(self) -> None:
        """Leave the nodes and their ranks to the next notebook."""

    def close(self) -> None:
        """Release all nodes. Later ranks run on this machine again."""


class RankGroup:
    """Starts and ends the ranks of one notebook or script, and sends requests to them.

    Args:
        spec: the spec of the next start.
        session: the session to use; None for a new one.
        colors: IPython's theme for tracebacks; empty to choose one that fits stderr.
        will_return: returns whether this process is about to restart, so that nodes may wait for
            it.
        is_ending: returns whether this process is about to end or to restart.

    Attributes:
        nodes: the nodes of the ranks; None if the ranks run on this machine.
    """

    def __init__(
        self,
        spec: GroupSpec,
        session: Session | None = None,
        *,
        colors: str = "",
        will_return: Callable[[], bool] = lambda: False,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self.nodes: Nodes | None = None
        self._spec = spec
        self._session = session or Session(colors=colors or _default_colors())
        self._scripts = ScriptRanks(self._session)
        self._will_return = will_return
        self._session.leaves_ranks = lambda: self._keeps_ranks and is_ending()
        self._pid = os.getpid()
        self._start_lock = threading.Lock()

    @property
    def session(self) -> Session:
        """The session of the cells' ranks. A forked process cannot use it: it lacks its threads."""
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
        """Whether the ranks of the cells are running."""
        return self.life.state.is_live

    @property
    def spec(self) -> GroupSpec:
        """The spec of the next start; while ranks run, with their number."""
        running = self.session.spec if self.is_live else None
        return self._spec if running is None else replace(self._spec, nproc=running.nproc)

    @spec.setter
    def spec(self, spec: GroupSpec) -> None:
        self._spec = spec

    @property
    def _keeps_ranks(self) -> bool:
        """Whether the ranks wait for the next notebook, whenever this one ends."""
        return self.nodes is not None and self.nodes.is_kept

    # ---- life

    def preload(self) -> None:
        """Prepare in the background, so that the first start is quick."""
        self.start_forkserver()
        start_thread(threading.Thread(target=self._preload_rest, name="nbddp-warm-up", daemon=True))

    def _preload_rest(self) -> None:
        # On the nbddp-warm-up thread.
        importlib.import_module("torch.distributed")
        with self._start_lock:  # a start that was requested in the meantime goes first
            pass
        self._session.launcher.preload_more()

    def start_forkserver(self) -> None:
        """Start the forkserver of the ranks; it imports torch in the background."""
        self.close_at_exit()
        self.session.launcher.preload()

    def start(self) -> None:
        """Start the ranks and wait until all are ready.

        Raises:
            RequestError: the ranks already run, or cannot be started now.
            StartError: a rank failed to start.
        """
        session = self.session
        self.close_at_exit()
        with self._start_lock:
            session.start(self._spec)

    def restart(self, *, is_recovery: bool = False) -> None:
        """Stop all ranks, even in a running cell, and start new ones; their variables are lost.

        The replay of a recovery arms faults again, except faults that have already fired.

        Raises:
            RequestError: the ranks cannot be started now.
            StartError: a rank failed to start.
        """
        self.close_at_exit()
        self.scripts.close()
        self.session.restart(self._spec, is_recovery=is_recovery)

    def stop(self) -> None:
        """End all ranks and release their nodes; the next start is still quick."""
        self.scripts.close()
        self.session.stop()
        with sigint_deferred():  # an interrupt here would leave nodes that nothing could close
            nodes, self.nodes = self.nodes, None
            if nodes is not None:
                nodes.close()

    def close(self) -> None:
        """End all ranks and every process that was started for them."""
        session = self.session
        if self.nodes is not None and self.is_live and (self._will_return() or self._keeps_ranks):
            session.call(session.event_log.close, is_over=False)  # the next notebook continues it
            self.nodes.detach()
        elif self.nodes is not None:
            self.stop()
        atexit.unregister(self.close_in_own_process)
        self.scripts.close()
        session.close()

    def close_in_own_process(self) -> None:
        """Close the group; do nothing in a forked process, which owns no ranks."""
        if os.getpid() == self._pid:
            self.close()

    def close_at_exit(self) -> None:
        """Close before multiprocessing's own exit hook, which would wait for the ranks to end."""
        atexit.unregister(self.close_in_own_process)
        atexit.register(self.close_in_own_process)

    # ---- requests to the ranks

    def interrupt(self) -> None:
        """Interrupt the cell, and keep variables. The second time, kill unresponsive ranks."""
        self.scripts.active_session.interrupt()

    def kill(self, rank: int) -> None:
        """Kill one rank, as if it had run out of memory. A running cell fails.

        Raises:
            ArgumentError: the rank does not exist.
            RequestError: the rank is already gone, or there is no group.
        """
        session = self.scripts.active_session
        check_ranks(session, [rank])
        session.kill(rank)

    def heal(
        self, ranks: Sequence[int] = (), *, donor: int | None = None, rerun: bool = False
    ) -> Healed:
        """Replace dead ranks. New ranks get the variables of a donor; see :class:`HealAsked`.

        With ``rerun``, return the last heal if all ranks are alive: only its cells remain to be run
        again.

        Raises:
            RequestError: the group cannot be healed; it has not changed.
        """
        session = self.session
        if rerun and self.is_live and session.last_healed is not None and not session.life.gone:
            return session.last_healed
        return session.heal(ranks, donor)

    def push(self, values: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Put values into the namespaces of some ranks, or of all; see :class:`WorkerGroup`."""
        push_pull.push(self.session, values, ranks)

    def pull(self, expression: str, *, rank: int | None = None) -> Any:
        """Return the value of an expression on a rank, or a list of the values on all ranks."""
        values = push_pull.pull(self.session, expression, None if rank is None else [rank])
        return values if rank is None else values[0]


def _default_colors() -> str:
    """Return IPython's theme for tracebacks: no colors if stderr does not render them."""
    return "" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else "nocolor"
