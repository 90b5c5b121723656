"""Carry out a heal: start replacements, send requests to the ranks, collect their answers.

:meth:`HealRequests.perform` tells the whole heal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from nbddp.controller.rank_processes import FailedRanks, try_each
from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import HealLife
from nbddp.lifecycle.heal_steps import KILLED
from nbddp.record import run_events
from nbddp.record.heal.heal_report import MAX_SHOWN_PLACES, MAX_SHOWN_VALUES, Healed, HealFacts
from nbddp.record.heal.rank_values import OwnValues
from nbddp.record.replay_log import cell_that_assigned, root_name
from nbddp.sigint import Future
from nbddp.wire.messages import CancelRequest
from nbddp.wire.request_messages import (
    Answer,
    JoinedGroup,
    JoinGroup,
    PickledNames,
    PickleNamespace,
)

if TYPE_CHECKING:
    from nbddp.controller.actor_state import ActorState


class HealRequests:
    """Carries out the steps of one heal, as a part of the actor and on its thread.

    Args:
        state: the state of the actor, which gets the events for the lifecycle.
        heal: names the donor and the ranks that get a replacement.
        start_processes: starts a process for each of these ranks, and does not wait.
        end_waits: ends the waits for a dead rank.
    """

    def __init__(
        self,
        state: ActorState,
        heal: HealLife,
        start_processes: Callable[[Sequence[int]], None],
        end_waits: Callable[[int, int | None], None],
    ) -> None:
        self._state = state
        self._start_processes = start_processes
        self._end_waits = end_waits
        self._ranks = heal.replacements
        # now: a new process has no faults when it is ready
        armed = [state.armed_faults.get(rank, ()) for rank in heal.replacements]
        self._armed = (*chain.from_iterable(armed),)
        self._donor = heal.donor
        self._join_requests: dict[int, int] = {}  # the number of the newest request to each rank
        self._names: PickledNames | None = None
        self._is_closed = False
        self._own_values: dict[int, OwnValues] = {}
        self._joined: list[JoinedGroup] = []  # the answers of all ranks
        self._started_at = self._ready_at = self._join_asked_at = time.monotonic()

    def perform(self, action: ev.Action) -> FailedRanks:  # noqa: C901 - one case for each step
        """Carry out a step of the heal. Return the ranks on which it failed.

        The cases tell the heal from top to bottom. They are separate calls, because this thread
        must not wait: between two of them, it handles messages, deaths and interrupts. A rank's
        answer becomes an event, and :mod:`nbddp.lifecycle.heal_steps` decides the next case. The
        executor handles the ranks that are returned: it fails the heal, or kills them.
        """
        state, link = self._state, self._state.runtime.link
        match action:
            # New processes. The launch thread starts one for each dead rank, under the rank's next
            # incarnation, so that late messages of the dead process are ignored. A replacement
            # gets a shell, joins no group yet, and sends Ready within START_TIMEOUT. The dead
            # processes are forgotten first: if the start fails, they must not be taken for
            # replacements that have died.
            case ev.StartReplacements(ranks=dead):
                state.ranks.forget(dead)
                self._start_processes(dead)

            # Ask the donor to pickle, while the replacements start. It is the lowest living rank,
            # or the one that the user named. It puts the pickle into the controller's store; the
            # tensors stay in its memory until the join (HealHandler.pickle_namespace). It refuses
            # if its variables cannot replace those of the dead ranks. Its answer becomes
            # NamespacePickled. If a replacement cannot load a variable in the join, all ranks leave
            # the join, and this step and the join are repeated without the variable.
            case ev.RequestNamespace(generation=generation):

                def ask_donor(donor: int) -> None:
                    self._discard()
                    request = PickleNamespace(
                        request=next(state.numbers),
                        exclude={name: self._not_loaded()[name] for name in action.exclude},
                        replacements=[*action.replacements],
                        checks=action.checks,
                    )
                    answer = state.request(donor, request)
                    answer.add_done_callback(partial(self._on_pickled, generation))

                return try_each([self._donor], ask_donor)

            # Note the time: all replacements have sent Ready. The lifecycle asks the ranks to join
            # as soon as the donor has pickled its variables, too.
            case ev.NoteReplacementsReady():
                self._ready_at = self._join_asked_at = time.monotonic()

            # Ask all ranks to join. They carry this out together (HealHandler.join_group).
            # Regrouper.connect gives the groups new connections, or forms a new group if the old
            # groups cannot live on. Then the donor sends its tensors, and the replacements load the
            # variables, and the values of their own rank, which the dead processes had reported.
            # Last, Regrouper.move_models makes the models equal on all ranks. Each answer becomes
            # GroupJoined.
            case ev.RequestJoin(ranks=ranks, generation=generation):
                if self._names is None:
                    raise RuntimeError("ranks were asked to join before the names were pickled")
                names = self._names
                if not self._own_values:
                    self._find_own_values()

                def ask_to_join(rank: int) -> None:
                    own_values = self._own_values.get(rank)
                    request = JoinGroup(
                        request=next(state.numbers),
                        generation=generation,
                        donor=self._donor,
                        replacements=[*self._ranks],
                        payload=names.payload,
                        storages=names.storages,
                        shards=names.shards,
                        own_values=dict(own_values.texts) if own_values is not None else {},
                    )
                    self._join_requests[rank] = request.request
                    answer = state.request(rank, request)
                    answer.add_done_callback(partial(self._on_joined, generation, rank))

                return try_each(ranks, ask_to_join)

            # A rank could not join, could not load a variable or has died, or the user has
            # interrupted the heal. Other ranks may wait for it in a collective that cannot end, so
            # their requests are cancelled (CellInterrupter.cancel). They still answer, within
            # CANCEL_TIMEOUT. Then the heal fails, or is repeated without the variable. If nobody
            # was asked to join yet, the heal fails at once.
            case ev.CancelJoin(ranks=ranks):
                return try_each(
                    ranks,
                    lambda rank: link.send(rank, CancelRequest(request=self._join_requests[rank])),
                )

            # Report. All ranks have joined. The future gets its result even if the report cannot be
            # recorded, because Session.heal waits for it.
            case ev.HealFinished():
                healed = self._build_report()
                try:
                    self.close()
                    self._record(healed)
                finally:
                    state.futures.resolve("heal", value=healed)

            # Or the heal has failed. The lifecycle has killed the replacements, and counts them as
            # dead at once, so nothing will happen when their processes exit. So the waits for their
            # answers end here. The living ranks keep their variables. The user's error comes last:
            # the user may heal again at once.
            case ev.HealFailed(reason=reason, is_refused=is_refused):
                state.event_log.record(run_events.HealFailed(reason=reason))
                self.close()
                for rank in self._ranks:
                    self._end_waits(rank, KILLED)
                state.reject_heal(reason, is_refused=is_refused)
        return {}

    def _find_own_values(self) -> None:
        """Find the values that the replacements must have instead of the donor's."""
        self._join_asked_at = time.monotonic()
        state = self._state
        alive = [rank for rank in state.life.alive if rank not in self._ranks]
        port = state.runtime.link.reserved_port
        places = state.launcher.topologies(len(state.life.ranks), master_port=port)
        self._own_values = {
            rank: state.rank_monitor.values.of_replacement(rank, self._donor, alive, places)
            for rank in self._ranks
        }

    def _on_pickled(self, generation: int, future: Future[Answer]) -> None:
        if future.exception() is not None:
            return  # the donor died, and the lifecycle knows it
        answer = future.result()
        self._names = None if answer.error else PickledNames(**answer.content)
        if self._is_closed:  # the heal failed before this answer: nothing else deletes the payload
            self._discard()
        reason = f"rank {self._donor}: {answer.error}" if answer.error else ""
        attempt = self._state.life.attempt
        self._state.step(ev.NamespacePickled(attempt=attempt, generation=generation, reason=reason))

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
            is_refused=joined.is_refused,
            not_loaded=tuple(joined.not_loaded),
        )
        self._state.step(event)

    def _not_loaded(self) -> dict[str, str]:
        """Return the variables that a replacement could not load, and why."""
        return {name: why for each in self._joined for name, why in each.not_loaded.items()}

    def close(self) -> None:
        """End the heal, also before its last step, and delete the pickled variables."""
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
        state.rank_monitor.values.clear_deaths(self._ranks)
        own_values = _paths(each.own_values for each in joined)
        reasons = self._not_loaded() | sent.not_pickled
        reasons = {name: why for name, why in reasons.items() if name not in own_values}
        may_differ = [each.unknown for each in self._own_values.values()]
        unknown = _paths([*may_differ, *(each.differing for each in joined)])
        for path in unknown:
            if path.isidentifier() and path not in sent.names:
                reasons.setdefault(path, f"rank {self._donor} does not have it")
        state.replay_log.not_carried = {**state.replay_log.not_carried, **reasons}
        return Healed(
            ranks=self._ranks,
            donor=self._donor,
            names=len(sent.names),
            left=reasons,
            more={"": sent.more} if sent.more else {},
            places=_paths(each.places for each in joined),
            own=own_values,
            unknown=tuple(path for path in unknown if {path, root_name(path)}.isdisjoint(reasons)),
            cells={path: cell_that_assigned(path, state.replay_log.entries) for path in reasons},
            size=sent.size + sum(size for size, _ in sent.storages),
            fork=self._ready_at - self._started_at,
            carry=self._join_asked_at - self._ready_at,
            meet=time.monotonic() - self._join_asked_at,
            disarmed=self._armed,
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
