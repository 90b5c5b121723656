"""Start ranks: the launcher interface, and the implementation for this machine."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

import psutil

from nbddp.child_processes import find_processes, kill_all
from nbddp.errors import StartError
from nbddp.launch.file_limit import raise_file_limit
from nbddp.launch.forkserver import (
    CudaUsedError,
    Forkserver,
    LocalRank,
    restore_main_spec,
    run_rank_process,
    sigint_blocked,
    start_detached_resource_tracker,
)
from nbddp.launch.memory import memory_limit
from nbddp.launch.start_variables import POOL_VARIABLES, read_at_start, start_variables
from nbddp.topology import Topology, cores_here
from nbddp.wire.rank_start import RankStart

logger = logging.getLogger(__name__)

_main_lock = threading.Lock()
LOW_MEMORY = 4 << 30  # bytes; a machine or container with less, as on Binder, is low on memory


class RankHandle(Protocol):
    """A started rank, on this machine or on a node."""

    @property
    def pid(self) -> int | None:
        """The process id."""

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process ends."""

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while the process runs."""

    @property
    def exit_reason(self) -> str:
        """Why the process ended, if the rank did not cause it; else empty."""

    def is_stopped(self) -> bool:
        """Return whether the process is known to be stopped by SIGSTOP."""

    def is_ending(self) -> bool:
        """Return whether the process was killed but is known to still exist."""

    def busy_time(self) -> tuple[float, float]:
        """Return a time on the rank's machine, and the seconds for which it was busy."""

    def join(self) -> None:
        """Wait until the process has ended, and release its resources."""

    def interrupt(self) -> None:
        """Send SIGINT."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


class Launcher:
    """Starts ranks, by default on this machine.

    Attributes:
        is_local: whether the ranks run on this machine.
    """

    is_local = True

    @property
    def base_env(self) -> Mapping[str, str]:
        """The environment that ranks start with, as far as this process knows it."""
        return dict(os.environ)

    def world_size(self, asked: int) -> int:
        """Return the number of ranks that a restart would start, given the requested number.

        Raises:
            RequestError: there are not enough nodes.
        """
        return asked

    def has_free_capacity(self) -> bool:
        """Return whether a restart would start more ranks, because a node has joined."""
        return False

    def assign(self, world_size: int) -> None:
        """Assign machines to the ranks of a new attempt.

        Raises:
            RequestError: there is no capacity for so many ranks.
        """

    def reassign(self, ranks: Sequence[int]) -> None:
        """Assign machines to new processes of ranks that have died.

        Raises:
            RequestError: there is no capacity. Nothing has changed.
        """

    def topologies(self, world_size: int, *, master_port: int) -> list[Topology]:
        """Return the topology of each rank, as assigned."""
        return Topology.local(world_size, master_port=master_port)

    def nodes(self) -> Mapping[int, str]:
        """Return the name of each rank's machine; empty if all ranks are on this machine."""
        return {}

    def clock_offset(self, rank: int) -> tuple[float, float]:
        """Return by how many seconds the clock of a rank's machine is ahead, and the error."""
        del rank
        return 0.0, 0.0

    def cores(self, place: Topology) -> int:
        """Return the number of cores that the ranks on this rank's machine share."""
        del place
        return cores_here()

    def preload(self) -> None:
        """Start preparations for the first start, without waiting."""

    def preload_more(self) -> None:
        """Prepare what the first start does not need, and wait until it is done."""

    def prepare(self, env: Mapping[str, str]) -> None:
        """Start the processes that a rank with this environment needs, before others are ended.

        Raises:
            StartError: a rank with this environment cannot start.
        """

    def launch(self, start: RankStart) -> RankHandle:
        """Start one rank."""
        raise NotImplementedError

    def kill_orphans(self, handle: RankHandle) -> None:
        """Kill the processes that a dead rank has left behind."""

    def share(self) -> Launcher:
        """Return a launcher for a second worker group, which does not close it."""
        return self

    def close(self) -> None:
        """Release all resources. Called when no rank runs any more."""


class LocalLauncher(Launcher):
    """Starts ranks on this machine, with multiprocessing.

    ``forkserver`` forks ranks from a warm process in milliseconds. ``spawn`` imports torch in every
    rank; it is used where forking is not safe (macOS). When memory is low, or if the forkserver is
    not the first one, ranks are forked only after it has imported all that DDP needs. Then the
    first start takes 0.9 s longer, and each rank needs 80 MB less.

    Attributes:
        forkserver: the forkserver of the newest start; None with ``spawn``.
    """

    def __init__(self, method: str = "") -> None:
        self.method = method or ("forkserver" if sys.platform == "linux" else "spawn")
        self.forkserver = Forkserver() if self.method == "forkserver" else None
        # of each set of start variables; the first one first
        self._forkservers = [] if self.forkserver is None else [self.forkserver]
        self._lock = threading.Lock()  # the ranks of cells and of scripts start on two threads

    def preload(self) -> None:
        """Start the forkserver, which imports torch in the background."""
        if self.forkserver is not None:
            self.forkserver.start()

    def preload_more(self) -> None:
        """Make the forkserver import what DDP needs, and wait."""
        if self.forkserver is not None:
            self.forkserver.preload_more()

    def wait_until_preloaded(self) -> None:
        """Wait until the forkserver has imported torch.

        If that fails, the first rank reports it.
        """
        if self.forkserver is not None:
            with suppress(EOFError, OSError, StartError):
                self.forkserver.wait_until_ready()

    def prepare(self, env: Mapping[str, str]) -> None:
        """Start a forkserver for this environment, unless it is the first or ranks were forked."""
        before, server = self.forkserver, self._select_forkserver(read_at_start(env))
        if server is None or server is self._forkservers[0] or server.has_served:
            return
        try:
            server.wait_until_ready()
        except EOFError:
            raise StartError("stopped while it started") from None
        except StartError:
            self.forkserver = before
            raise
        except CudaUsedError:
            return  # the first rank reports it

    def assign(self, world_size: int) -> None:
        """Allow as many open files as the ranks need."""
        raise_file_limit(world_size, self.forkserver.pid if self.forkserver else None)

    def launch(self, start: RankStart) -> RankHandle:
        """Start one rank on this machine."""
        name = f"nbddp-rank{start.topology.rank}"
        server = self._select_forkserver(read_at_start(start.env))
        if server is not None:
            server.start()
            is_first = self._forkservers[:1] == [server] and not server.is_replacement
            if memory_limit() < LOW_MEMORY or not is_first:
                server.preload_more()
            try:
                return server.fork(run_rank_process, start, name)
            except CudaUsedError:
                logger.warning(
                    "each rank imports torch itself, which takes seconds: a module that Python, "
                    "torch or IPython imports has used CUDA, and processes forked after that "
                    "cannot use it"
                )
                server.close()
                self._forkservers.remove(server)
                self.forkserver = None
        return _spawn(start, name)

    def _select_forkserver(self, variables: dict[str, str]) -> Forkserver | None:
        """Return the forkserver that has started with these variables, or a new one.

        Ranks of the other forkservers may still run. Of those without ranks, only the first is
        kept: each needs 200 MB.
        """
        with self._lock:
            current, servers = self.forkserver, self._forkservers
            if current is None:
                return None
            if current.variables is None:
                current.variables = variables
            first = servers[0].variables or {}
            server = next((each for each in servers if each.variables == variables), None)
            if server is None:
                for idle in [each for each in servers[1:] if not each.rank_pids]:
                    servers.remove(idle)
                    idle.close()
                changed = {name for name, _ in variables.items() ^ first.items()}
                server = Forkserver(variables, dict(sorted(variables.items() - first.items())))
                servers.append(server)
                logger.warning(
                    "%s: Python, torch and NumPy read such variables only when they start, so "
                    "ranks start from a new process, which takes seconds once",
                    ", ".join(sorted(changed)),
                )
            self.forkserver = server
            return server

    def kill_orphans(self, handle: RankHandle) -> None:
        """Kill the DataLoader workers and other children that a dead rank has left running."""

        def remaining() -> list[psutil.Process]:
            """Return the processes in the rank's session, and the forkserver's orphans."""
            found = []
            for pid in psutil.pids():
                with suppress(ProcessLookupError, PermissionError):
                    if os.getsid(pid) == handle.pid:
                        found.append(pid)
            orphans = [orphan for server in self._forkservers for orphan in server.orphans()]
            return [*find_processes(found), *orphans]

        kill_all(remaining)

    def close(self) -> None:
        """Close the forkservers."""
        for server in self._forkservers:
            server.close()
        self._forkservers.clear()
        if self.forkserver is not None:
            self.forkserver = Forkserver()  # for a later start
            self._forkservers.append(self.forkserver)


class SpawnedRank(LocalRank, SpawnProcess):
    """A rank started by ``spawn``: it imports everything itself."""

    # for children of the rank: on Linux, DataLoader workers see its cells
    _start_method = "fork" if sys.platform == "linux" else "spawn"


def _spawn(start: RankStart, name: str) -> RankHandle:
    restore_main_spec()
    process = SpawnedRank(target=run_rank_process, args=(start,), name=name)
    threads = str(start.spec.threads)
    pools = {name: start.env.get(name, threads) for name in POOL_VARIABLES}
    with sigint_blocked(), _hidden_main():
        start_detached_resource_tracker()
        with start_variables(read_at_start(start.env) | pools | {"OMP_NUM_THREADS": threads}):
            process.start()
    return process


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide the user's script, so that a spawned rank does not run it again as ``__mp_main__``."""
    main = sys.modules["__main__"]
    with _main_lock:
        names = ("__file__", "__spec__")
        hidden: dict[str, Any] = {each: vars(main)[each] for each in names if each in vars(main)}
        main.__spec__ = None
        vars(main).pop("__file__", None)
        try:
            yield
        finally:
            vars(main).update(hidden)
