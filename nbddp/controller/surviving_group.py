"""Ranks on nodes that have survived their notebook, and how the next notebook takes them over."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError
from nbddp.launch.local_launcher import RankHandle
from nbddp.lifecycle.events import RejoinAsked
from nbddp.record.cell import CellHandle, CellRequest, Purpose
from nbddp.record.event_log import read_unfinished_cell
from nbddp.record.run_events import CellStarted
from nbddp.topology import Topology
from nbddp.wire.messages import JsonDict


@dataclass(frozen=True, slots=True)
class SurvivingRank:
    """A rank's process, and the parameters of its start."""

    handle: RankHandle
    start: Mapping[str, Any]

    @property
    def incarnation(self) -> int:
        """The number of earlier processes of this rank in the attempt."""
        return int(self.start["incarnation"])

    @property
    def attempt(self) -> int:
        """The attempt of the process."""
        return int(self.start["attempt"])

    @property
    def topology(self) -> Topology:
        """The topology of the rank."""
        return Topology(**self.start["topology"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivingGroup:
    """All surviving ranks of one attempt.

    Attributes:
        ranks: the ranks whose node has rejoined.
        set_store_port: tells the listener the port of this notebook's store.
        attempt: the attempt of the group.
        world_size: how many ranks the group had.
        secret: signs their messages.
        folder: the run folder.
        options: the options of their start, as far as they are known.
        attempts_before_run: the attempts of earlier runs.
        cell: the cell that they run, or that has ended since their notebook has; None for none.
    """

    ranks: Mapping[int, SurvivingRank]
    set_store_port: Callable[[int], None]
    attempt: int
    world_size: int
    secret: bytes
    folder: Path
    options: dict[str, Any]
    attempts_before_run: int = 0
    cell: CellStarted | None = None

    @classmethod
    def newest(
        cls, survivors: Sequence[SurvivingRank], set_store_port: Callable[[int], None]
    ) -> SurvivingGroup:
        """Return the ranks of the newest attempt.

        Raises:
            RequestError: there are none.
        """
        if not survivors:
            raise RequestError("no rank has rejoined: `%ddp nodes` lists the nodes that have")
        newest = max(survivors, key=lambda each: each.attempt)
        start, world_size = newest.start, newest.topology.world_size
        options = {name: start["spec"][name] for name in ("backend", "timeout", "joins_group")}
        env = {name: text for name, text in start["env"].items() if name != "NBDDP_STRUCK"}
        return cls(
            ranks={
                survivor.topology.rank: survivor
                for survivor in survivors
                if survivor.attempt == newest.attempt
            },
            set_store_port=set_store_port,
            attempt=newest.attempt,
            attempts_before_run=newest.attempt - int(start["run_attempt"]),
            world_size=world_size,
            secret=base64.b64decode(start["secret"]),
            folder=run_folder_of(start),
            options=options | {"nproc": world_size, "env": env},
            cell=read_unfinished_cell(run_folder_of(start)),
        )

    def rejoin_event(self) -> RejoinAsked:
        """Return the lifecycle's event for a rejoin."""
        survivors = tuple((rank, each.incarnation) for rank, each in self.ranks.items())
        return RejoinAsked(
            attempt=self.attempt,
            attempts_before_run=self.attempts_before_run,
            world_size=self.world_size,
            survivors=survivors,
            cell=self.cell.id or 0 if self.cell else 0,
            cell_ranks=tuple(self.cell.ranks) if self.cell else (),
        )

    def cell_handle(self, fetch: Callable[[JsonDict], Any]) -> CellHandle | None:
        """Return the handle of their cell; ``fetch`` loads a value that a rank sends."""
        cell = self.cell
        if cell is None or cell.id is None:
            return None
        request = CellRequest(
            source=cell.source,
            ranks=tuple(cell.ranks),
            execution_count=cell.number,
            once=True,  # the cells before it cannot be replayed
            purpose=Purpose.REPLAY if cell.replay else Purpose.USER,
        )
        handle = CellHandle(
            cell.id,
            request,
            tuple(cell.ranks),
            fetch,
            attempt=self.attempt,
            run_attempt=self.attempt - self.attempts_before_run,
            began_at=cell.began or cell.time,
            is_rejoined=True,
        )
        for rank in set(cell.ranks) - set(self.ranks):
            handle.add_exit(rank, None, hint="it ended while no notebook was connected")
        return handle


def run_folder_of(start: Mapping[str, Any]) -> Path:
    """Return the run folder of a rank, on the notebook's machine."""
    if "log_path" in start:
        return Path(start["log_path"]).parent
    return Path(start["cwd"]) / ".nbddp" / "runs" / Path(start["run_id"]).name
