"""Send the requests of a heal to the ranks, and collect their answers."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Protocol

from nbddp.controller.rank_processes import Told, try_each
from nbddp.lifecycle import events as ev
from nbddp.record.heal.heal_report import SHOWN_PLACES, SHOWN_VALUES, Healed
from nbddp.record.replay_log import cell_that_assigned
from nbddp.wire.messages import CancelRequest
from nbddp.wire.request_messages import Answer, JoinGroup, SendNamespace

if TYPE_CHECKING:
    from nbddp.controller.promises import Promises
    from nbddp.controller.threads import Runtime
    from nbddp.launch.local_launcher import Launcher
    from nbddp.lifecycle.group_state import HealLife, Life
    from nbddp.record.event_log import EventLog
    from nbddp.record.heal.rank_values import OwnValues
    from nbddp.record.rank_monitor import RankMonitor
    from nbddp.record.replay_log import ReplayLog


class HealExecutor(Protocol):
    """The part of the executor that a heal uses."""

    life: Life
    launcher: Launcher
    event_log: EventLog
    rank_monitor: RankMonitor
    deeds: ReplayLog
    promises: Promises
    numbers: itertools.count[int]

    @property
    def runtime_now(self) -> Runtime:
        """What the ranks are reached by."""


class HealRequests:
    """Sends the requests of one heal; used on the session's thread.

    Args:
        executor: of the session.
        heal: names the ranks that get a new process, and the donor.
    """

    def __init__(self, executor: HealExecutor, heal: HealLife) -> None:
        self._do = executor
        self.ranks = heal.replacements
        self._donor = heal.donor
        self._gives: dict[int, int] = {}  # the generation, by the request's number
        self._meets: dict[int, tuple[int, int]] = {}  # the rank and the generation
        self._given: Answer | None = None
        self._is_over = False
        self._unmade: dict[str, str] = {}
        self._own: dict[int, OwnValues] = {}
        self._changed: dict[str, list[str]] = {"places": [], "taken": [], "unlike": []}
        self._began = self._forked = self._packed = time.monotonic()

    def perform(self, action: ev.Action) -> Told:
        """Do the next step of the heal. Return the ranks that could not be told, and why."""
        match action:
            case ev.ReplacementsReady():
                self._forked = self._packed = time.monotonic()
            case ev.RequestNamespace(donor=donor):
                return try_each([donor], lambda _donor: self._give(action))
            case ev.RequestJoin(ranks=ranks):
                return try_each(ranks, lambda rank: self._meet(action, rank))
            case ev.CancelJoin(ranks=ranks):
                return try_each(ranks, self._drop)
            case ev.HealFinished():
                healed = self._report()
                try:
                    self.close()
                    self._record(healed)
                finally:
                    self._do.promises.keep("heal", value=healed)
        return {}

    def _give(self, action: ev.RequestNamespace) -> None:
        self._discard()
        number = next(self._do.numbers)
        self._gives[number] = action.generation
        leave, replacements = [*action.exclude], [*action.replacements]
        command = SendNamespace(request=number, exclude=leave, replacements=replacements)
        self._do.runtime_now.link.send(action.donor, command)

    def _meet(self, action: ev.RequestJoin, rank: int) -> None:
        if self._given is None:
            raise RuntimeError("ranks were to meet before the names were packed")
        if not self._own:
            self._find_own_values()
        number = next(self._do.numbers)
        self._meets[number] = rank, action.generation
        command = JoinGroup(
            request=number,
            generation=action.generation,
            donor=self._donor,
            replacements=[*self.ranks],
            payload=self._given.payload,
            storages=self._given.content["storages"],
            own_values=dict(self._own[rank].own) if rank in self._own else {},
        )
        self._do.runtime_now.link.send(rank, command)

    def _drop(self, rank: int) -> None:
        for number, (asked, _) in self._meets.items():
            if asked == rank:
                self._do.runtime_now.link.send(rank, CancelRequest(request=number))

    def _find_own_values(self) -> None:
        """Find the values that the new ranks must have instead of the donor's."""
        self._packed = time.monotonic()
        do = self._do
        alive = [rank for rank in do.life.alive if rank not in self.ranks]
        port = do.runtime_now.link.free_port
        places = do.launcher.topologies(len(do.life.ranks), master_port=port)
        self._own = {
            rank: do.rank_monitor.values.of_replacement(rank, self._donor, alive, places)
            for rank in self.ranks
        }

    def event_of(self, answer: Answer) -> ev.NamespaceSent | ev.GroupJoined | None:
        """Return the event that an answer causes; None if the answer is to another request."""
        attempt = self._do.life.attempt
        if (given := self._gives.pop(answer.request, None)) is not None:
            self._given = None if answer.error else answer
            if self._is_over:
                self._discard()
            reason = f"rank {self._donor}: {answer.error}" if answer.error else ""
            return ev.NamespaceSent(attempt=attempt, generation=given, reason=reason)
        if (met := self._meets.pop(answer.request, None)) is None:
            return None
        (rank, generation), content = met, answer.content
        for kind, known in self._changed.items():
            known += [path for path in content.get(kind, ()) if path not in known]
        unmade = content.get("unopened", {})
        self._unmade |= unmade
        return ev.GroupJoined(
            attempt=attempt,
            generation=generation,
            rank=rank,
            reason=f"rank {rank}: {answer.error}" if answer.error else "",
            is_consequence=content.get("was_left", False),
            not_loaded=tuple(unmade),
        )

    def close(self) -> None:
        """End the heal, and delete the packed names."""
        self._is_over = True
        self._discard()

    def _discard(self) -> None:
        given, self._given = self._given, None
        if given is not None:
            self._do.runtime_now.link.discard(given.payload)

    def _report(self) -> Healed:
        if self._given is None:
            raise RuntimeError("a heal has ended without names")
        given, do = self._given, self._do
        do.rank_monitor.values.note_healed(self.ranks)
        own = self._changed["taken"]
        left = self._unmade | given.content["left"]
        left = {name: why for name, why in left.items() if name not in own}
        unknown = [path for each in self._own.values() for path in each.unknown]
        unknown = list(dict.fromkeys([*unknown, *self._changed["unlike"]]))
        lost = [
            path for path in unknown if path.isidentifier() and path not in given.content["names"]
        ]
        left |= {name: f"rank {self._donor} does not have it" for name in lost if name not in left}
        return Healed(
            ranks=self.ranks,
            donor=self._donor,
            names=len(given.content["names"]),
            left=left,
            more=given.content["more"],
            places=tuple(self._changed["places"]),
            own=tuple(own),
            unknown=tuple(path for path in unknown if path not in left),
            cells={name: cell_that_assigned(name, do.deeds.entries) for name in left},
            size=given.content["bytes"] + sum(size for size, _ in given.content["storages"]),
            fork=self._forked - self._began,
            carry=self._packed - self._forked,
            meet=time.monotonic() - self._packed,
        )

    def _record(self, healed: Healed) -> None:
        self._do.event_log.record(
            "healed",
            ranks=healed.ranks,
            donor=healed.donor,
            names=healed.names,
            left=dict(healed.left),
            more=dict(healed.more),
            places=[*healed.places[:SHOWN_PLACES]],
            more_places=max(0, len(healed.places) - SHOWN_PLACES),
            own=[*healed.own[:SHOWN_VALUES]],
            unknown=[*healed.unknown[:SHOWN_VALUES]],
            bytes=healed.size,
            fork=round(healed.fork, 3),
            carry=round(healed.carry, 3),
            meet=round(healed.meet, 3),
        )
