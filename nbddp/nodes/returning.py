"""Ranks that live on nodes though their notebook is gone: what another one must know of them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError
from nbddp.launch.launcher import RankHandle
from nbddp.lifecycle.events import ReturnAsked
from nbddp.topology import Topology


@dataclass(frozen=True, slots=True)
class Living:
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
    def place(self) -> Topology:
        """Its place in the world."""
        return Topology(**self.start["topology"])


@dataclass(frozen=True, slots=True)
class Returned:
    """All of one attempt.

    Attributes:
        ranks: those that are back.
        serve: lets them find the store at this port of this machine.
    """

    ranks: Mapping[int, Living]
    serve: Callable[[int], None]

    @classmethod
    def of(cls, living: Sequence[Living], serve: Callable[[int], None]) -> Returned:
        """The newest attempt of these.

        Raises:
            RequestError: there are none.
        """
        if not living:
            raise RequestError("no rank has come back: `%ddp nodes` lists the nodes that have")
        newest = max(each.attempt for each in living)
        ranks = {each.place.rank: each for each in living if each.attempt == newest}
        return cls(ranks, serve)

    @property
    def _any(self) -> Living:
        return next(iter(self.ranks.values()))

    @property
    def attempt(self) -> int:
        """Which start of their group it was."""
        return self._any.attempt

    @property
    def world_size(self) -> int:
        """How many ranks there were."""
        return self._any.place.world_size

    @property
    def secret(self) -> bytes:
        """What their messages are signed with."""
        return base64.b64decode(self._any.start["secret"])

    @property
    def folder(self) -> Path:
        """Where their run is recorded."""
        return folder_of(self._any.start)

    @property
    def options(self) -> dict[str, Any]:
        """How they were started, as far as they know."""
        known = {name: self._any.start[name] for name in ("backend", "timeout", "joins_group")}
        env = {
            name: text for name, text in self._any.start["env"].items() if name != "NBDDP_STRUCK"
        }
        return known | {"nproc": self.world_size, "env": env}

    def event(self) -> ReturnAsked:
        """What the lifecycle must know of it."""
        living = tuple((rank, each.incarnation) for rank, each in self.ranks.items())
        return ReturnAsked(attempt=self.attempt, world_size=self.world_size, living=living)


def folder_of(start: Mapping[str, Any]) -> Path:
    """The run's folder, which is the notebook's."""
    return Path(start["cwd"]) / ".nbddp" / "runs" / Path(start["run_id"]).name
