"""How ranks come to be: one small interface, and the implementation for this machine."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from typing import Protocol

import psutil

from nbddp.child_processes import find_processes, kill_all
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
from nbddp.topology import Topology, cores_here
from nbddp.wire.rank_start import RankStart

logger = logging.getLogger(__name__)

LOW_MEMORY = 4 << 30  # bytes: with less, as on Binder, memory is short


class RankHandle(Protocol):
    """A started rank, on this machine or on a node."""

    @property
    def pid(self) -> int | None:
        """Its process id."""

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when it ends."""

    @property
    def exitcode(self) -> int | None:
        """How it ended, None while it runs."""

    @property
    def exit_reason(self) -> str:
        """Why it ended, where that is not its own doing; else empty."""

    def is_stopped(self) -> bool:
        """Return whether somebody sent it SIGSTOP, as far as it is known here."""

    def is_ending(self) -> bool:
        """Return whether it was killed and is not gone yet, as far as it is known here."""

    def cpu_time(self) -> tuple[float, float]:
        """Return a time on its machine, and the CPU seconds that it had used by then."""

    def join(self) -> None:
        """Wait until it has ended, and let go of what was kept for it."""

    def interrupt(self) -> None:
        """Send SIGINT."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


class Launcher:
    """Starts ranks; where nothing else is said, on this machine."""

    @property
    def base_env(self) -> Mapping[str, str]:
        """What a rank's environment begins with, as far as it is known here."""
        return dict(os.environ)

    def world_size(self, asked: int) -> int:
        """Return how many ranks a restart makes of those that were asked for.

        Raises:
            RequestError: too few nodes are here.
        """
        return asked

    def has_free_capacity(self) -> bool:
        """Return whether a restart would make more ranks, because a node has come."""
        return False

    def assign(self, world_size: int) -> None:
        """Choose where the ranks of a new attempt will be.

        Raises:
            RequestError: there is no room for so many.
        """

    def reassign(self, ranks: Sequence[int]) -> None:
        """Find room for new processes of ranks that are gone.

        Raises:
            RequestError: there is none; nothing has changed.
        """

    def topologies(self, world_size: int, *, master_port: int) -> list[Topology]:
        """Return each rank's place in the world, as it was chosen."""
        return Topology.local(world_size, master_port=master_port)

    def nodes(self) -> Mapping[int, str]:
        """Return the name of each rank's machine; empty if all are on this one."""
        return {}

    def clock_offset(self, rank: int) -> tuple[float, float]:
        """Return by how many seconds the clock of a rank's machine is ahead, and the error."""
        del rank
        return 0.0, 0.0

    def cores(self, place: Topology) -> int:
        """Return the cores that the ranks of a rank's machine share."""
        del place
        return cores_here()

    def preload(self) -> None:
        """Prepare, without waiting, so that the first start is quick."""

    def preload_more(self) -> None:
        """Prepare what is not needed at once; waits until it is done."""

    def launch(self, start: RankStart) -> RankHandle:
        """Start one rank."""
        raise NotImplementedError

    def kill_orphans(self, handle: RankHandle) -> None:
        """End what a rank that died left behind."""

    def share(self) -> Launcher:
        """Return a launcher for a second worker group; its close leaves this one as it is."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what starting needed; no rank runs any more."""


class LocalLauncher(Launcher):
    """Ranks on this machine, through multiprocessing.

    ``forkserver`` forks them from a warm helper in milliseconds; ``spawn``, where forking is not
    safe (macOS), imports torch in every rank. Where memory is short no rank is forked before the
    helper has all that DDP needs: the first start takes 0.9 s longer, a rank takes 80 MB less.
    """

    def __init__(self, method: str = "") -> None:
        self.method = method or ("forkserver" if sys.platform == "linux" else "spawn")
        self.forkserver = Forkserver() if self.method == "forkserver" else None

    def preload(self) -> None:
        """Start the helper, which imports torch meanwhile."""
        if self.forkserver is not None:
            self.forkserver.start()

    def preload_more(self) -> None:
        """Have the helper import what DDP needs, and wait."""
        if self.forkserver is not None:
            self.forkserver.preload_more()

    def wait_until_preloaded(self) -> None:
        """Have the helper import torch, and wait; where it cannot, the first rank will tell why."""
        if self.forkserver is not None:
            with suppress(EOFError, OSError):
                self.forkserver.wait_until_ready()

    def launch(self, start: RankStart) -> RankHandle:
        """Start one rank on this machine."""
        name = f"nbddp-rank{start.topology.rank}"
        if self.forkserver is not None:
            if memory_limit() < LOW_MEMORY:
                self.forkserver.preload_more()
            try:
                return self.forkserver.fork(run_rank_process, start, name)
            except CudaUsedError:
                logger.warning(
                    "each rank imports torch itself, which takes seconds: something that Python, "
                    "torch or IPython imports has used CUDA, so no process can be forked that "
                    "could use it, too"
                )
                self.forkserver.close()
                self.forkserver = None
        return _spawn(start, name)

    def kill_orphans(self, handle: RankHandle) -> None:
        """Kill the DataLoader workers and other children of a rank that did not do it itself."""
        orphans = self.forkserver.orphans if self.forkserver is not None else list

        def remaining() -> list[psutil.Process]:
            """Who is in the session that the rank leads, and so descends from it."""
            found = []
            for pid in psutil.pids():
                with suppress(ProcessLookupError, PermissionError):
                    if os.getsid(pid) == handle.pid:
                        found.append(pid)
            return [*find_processes(found), *orphans()]

        kill_all(remaining)

    def share(self) -> Launcher:
        """Return a launcher that forks from the same helper, and leaves it to this one."""
        return SharedLauncher(self)

    def close(self) -> None:
        """End the helper."""
        if self.forkserver is not None:
            self.forkserver.close()


class SharedLauncher(LocalLauncher):
    """Starts ranks by the helper of another launcher."""

    def __init__(self, owner: LocalLauncher) -> None:
        self.method, self.forkserver = owner.method, owner.forkserver

    def close(self) -> None:
        """Leave the helper to its owner."""


class SpawnedRank(LocalRank, SpawnProcess):
    """A rank that is started by ``spawn``: it imports everything itself."""


def _spawn(start: RankStart, name: str) -> RankHandle:
    restore_main_spec()
    process = SpawnedRank(target=run_rank_process, args=(start,), name=name)
    with sigint_blocked():
        start_detached_resource_tracker()
        process.start()
    return process
