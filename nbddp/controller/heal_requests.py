"""Send the requests of a heal to the ranks, and collect their answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from nbddp.controller.rank_processes import FailedRanks, try_each
from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import HealLife
from nbddp.record import run_events
from nbddp.record.heal.heal_report import MAX_SHOWN_PLACES, MAX_SHOWN_VALUES, Healed, HealFacts
from nbddp.record.heal.rank_values import OwnValues
from nbddp.record.replay_log import cell_that_assigned, root_name
from nbddp.sigint import Future
from nbddp.wire.messages import CancelRequest
from nbddp.wire.request_messages import Answer, JoinedGroup, JoinGroup, NamesSent, SendNamespace

if TYPE_CHECKING:
    from nbddp.controller.actor_state import ActorState


class HealRequests:
    """Sends the requests of one heal, as a part of the actor and on its thread.

    Args:
        state: the state of the actor, which gets the events for the lifecycle.
        heal: names the donor and the ranks that get a replacement.
    """

    def __init__(self, state: ActorState, heal: HealLife) -> None:
        self._state = state
        self.ranks = heal.replacements
        self._donor = heal.donor
        self._join_requests: dict[int, int] = {}  # the number of the newest request to each rank
        self._names: NamesSent | None = None
        self._is_closed = False
        self._own_values: dict[int, OwnValues] = {}
        self._joined: list[JoinedGroup] = []  # the answers of all ranks
        self._started_at = self._forked_at = self._pickled_at = time.monotonic()

    def perform(self, action: ev.Action) -> FailedRanks:
        """Carry out the next action of the heal. Return the ranks on which it failed."""
        match action:
            case ev.ReplacementsReady():
                self._forked_at = self._pickled_at = time.monotonic()
            case ev.RequestNamespace():
                return try_each([self._donor], lambda _donor: self._request_namespace(action))
            case ev.RequestJoin(ranks=ranks):
                return try_each(ranks, lambda rank: self._request_join(action, rank))
            case ev.CancelJoin(ranks=ranks):
                return try_each(ranks, self._cancel_join)
            case ev.HealFinished():
                healed = self._build_report()
                try:
                    self.close()
                    self._record(healed)
                finally:
                    self._state.futures.resolve("heal", value=healed)
        return {}

    def _request_namespace(self, action: ev.RequestNamespace) -> None:
        self._discard()
        request = SendNamespace(
            request=next(self._state.numbers),
            exclude=[*action.exclude],
            replacements=[*action.replacements],
            checks=action.checks,
        )
        answer = self._state.request(self._donor, request)
        answer.add_done_callback(partial(self._on_pickled, action.generation))

    def _request_join(self, action: ev.RequestJoin, rank: int) -> None:
        if self._names is None:
            raise RuntimeError("ranks were asked to join before the names were pickled")
        if not self._own_values:
            self._find_own_values()
        request = JoinGroup(
            request=next(self._state.numbers),
            generation=action.generation,
            donor=self._donor,
            replacements=[*self.ranks],
            payload=self._names.payload,
            storages=self._names.storages,
            shards=self._names.shards,
            own_values=dict(self._own_values[rank].texts) if rank in self._own_values else {},
        )
        self._join_requests[rank] = request.request
        answer = self._state.request(rank, request)
        answer.add_done_callback(partial(self._on_joined, action.generation, rank))

    def _cancel_join(self, rank: int) -> None:
        cancel = CancelRequest(request=self._join_requests[rank])
        self._state.runtime.link.send(rank, cancel)

    def _find_own_values(self) -> None:
        """Find the values that the replacements must have instead of the donor's."""
        self._pickled_at = time.monotonic()
        state = self._state
        alive = [rank for rank in state.life.alive if rank not in self.ranks]
        port = state.runtime.link.reserved_port
        places = state.launcher.topologies(len(state.life.ranks), master_port=port)
        self._own_values = {
            rank: state.rank_monitor.values.of_replacement(rank, self._donor, alive, places)
            for rank in self.ranks
        }

    def _on_pickled(self, generation: int, future: Future[Answer]) -> None:
        if future.exception() is not None:
            return  # the donor died, and the lifecycle knows it
        answer = future.result()
        self._names = None if answer.error else NamesSent(**answer.content)
        if self._is_closed:
            self._discard()
        reason = f"rank {self._donor}: {answer.error}" if answer.error else ""
        attempt = self._state.life.attempt
        self._state.step(ev.NamespaceSent(attempt=attempt, generation=generation, reason=reason))

    def _on_joined(self, generation: int, rank: int, future: Future[Answer]) -> None:
        if future.exception() is not None:
            return  # this rank died, and the lifecycle knows it
        answer = future.result()
        joined = JoinedGroup(**answer.content)
        self._joined.append(joined)
        event = ev.GroupJoined(
            attempt=self._state.life.attempt,
            generation=generation,
            rank=rank,
            reason=f"rank {rank}: {answer.error}" if answer.error else "",
            is_consequence=joined.is_consequence,
            not_loaded=tuple(joined.not_loaded),
        )
        self._state.step(event)

    def close(self) -> None:
        """End the heal, and delete the pickled variables."""
        self._is_closed = True
        self._discard()

    def _discard(self) -> None:
        names, self._names = self._names, None
        if names is not None:
            self._state.runtime.link.discard_payload(names.payload)

    def _build_report(self) -> Healed:
        if self._names is None:
            raise RuntimeError("a heal finished without pickled names")
        sent, joined, state = self._names, self._joined, self._state
        state.rank_monitor.values.clear_deaths(self.ranks)
        own_values = _paths(each.own_values for each in joined)
        reasons = {name: why for each in joined for name, why in each.not_loaded.items()}
        reasons |= sent.not_sent
        reasons = {name: why for name, why in reasons.items() if name not in own_values}
        may_differ = [each.unknown for each in self._own_values.values()]
        unknown = _paths([*may_differ, *(each.differing for each in joined)])
        for path in unknown:
            if path.isidentifier() and path not in sent.names:
                reasons.setdefault(path, f"rank {self._donor} does not have it")
        state.replay_log.not_carried = {**state.replay_log.not_carried, **reasons}
        return Healed(
            ranks=self.ranks,
            donor=self._donor,
            names=len(sent.names),
            left=reasons,
            more={"": sent.more} if sent.more else {},
            places=_paths(each.places for each in joined),
            own=own_values,
            unknown=tuple(path for path in unknown if {path, root_name(path)}.isdisjoint(reasons)),
            cells={path: cell_that_assigned(path, state.replay_log.entries) for path in reasons},
            size=sent.size + sum(size for size, _ in sent.storages),
            fork=self._forked_at - self._started_at,
            carry=self._pickled_at - self._forked_at,
            meet=time.monotonic() - self._pickled_at,
        )

    def _record(self, healed: Healed) -> None:
        facts = {name: getattr(healed, name) for name in HealFacts.__dataclass_fields__}
        limits = {"places": MAX_SHOWN_PLACES, "own": MAX_SHOWN_VALUES, "unknown": MAX_SHOWN_VALUES}
        facts |= {name: facts[name][:most] for name, most in limits.items()}
        facts |= {name: round(facts[name], 3) for name in ("fork", "carry", "meet")}
        more = max(0, len(healed.places) - MAX_SHOWN_PLACES)
        event = run_events.RanksHealed(bytes=healed.size, more_places=more, **facts)
        self._state.event_log.record(event)


def _paths(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(lists)))
