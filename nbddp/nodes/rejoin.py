"""Ranks that live on nodes though their notebook is gone: what another one must know of them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError
from nbddp.launch.local_launcher import RankHandle
from nbddp.lifecycle.events import RejoinAsked
from nbddp.topology import Topology


@dataclass(frozen=True, slots=True)
class SurvivingRank:
    """A rank's process, and what it was told at its start."""

    handle: RankHandle
    start: Mapping[str, Any]

    @property
    def incarnation(self) -> int:
        """Which process of its rank it is."""
        return int(self.start["incarnation"])

    @property
    def attempt(self) -> int:
        """The attempt that it is of."""
        return int(self.start["attempt"])

    @property
    def topology(self) -> Topology:
        """Its place in the world."""
        return Topology(**self.start["topology"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivingGroup:
    """All of one attempt.

    Attributes:
        ranks: those that are back.
        set_store_port: lets them find the store at this port of this machine.
        attempt: which start of their group it was.
        world_size: how many ranks there were.
        secret: what their messages are signed with.
        folder: where their run is recorded.
        options: how they were started, as far as they know.
    """

    ranks: Mapping[int, SurvivingRank]
    set_store_port: Callable[[int], None]
    attempt: int
    world_size: int
    secret: bytes
    folder: Path
    options: dict[str, Any]

    @classmethod
    def newest(
        cls, survivors: Sequence[SurvivingRank], set_store_port: Callable[[int], None]
    ) -> SurvivingGroup:
        """The newest attempt of these.

        Raises:
            RequestError: there are none.
        """
        if not survivors:
            raise RequestError("no rank has come back: `%ddp nodes` lists the nodes that have")
        newest = max(survivors, key=lambda each: each.attempt)
        start, world_size = newest.start, newest.topology.world_size
        known = {name: start[name] for name in ("backend", "timeout", "joins_group")}
        env = {name: text for name, text in start["env"].items() if name != "NBDDP_STRUCK"}
        return cls(
            ranks={
                each.topology.rank: each for each in survivors if each.attempt == newest.attempt
            },
            set_store_port=set_store_port,
            attempt=newest.attempt,
            world_size=world_size,
            secret=base64.b64decode(start["secret"]),
            folder=run_folder_of(start),
            options=known | {"nproc": world_size, "env": env},
        )

    def rejoin_event(self) -> RejoinAsked:
        """What the lifecycle must know of it."""
        survivors = tuple((rank, each.incarnation) for rank, each in self.ranks.items())
        return RejoinAsked(attempt=self.attempt, world_size=self.world_size, survivors=survivors)


def run_folder_of(start: Mapping[str, Any]) -> Path:
    """The run's folder, which is the notebook's."""
    return Path(start["cwd"]) / ".nbddp" / "runs" / Path(start["run_id"]).name
