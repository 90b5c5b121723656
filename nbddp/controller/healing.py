"""Heals a worker group: new ranks are forked, given a living one's names, and all meet again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nbddp.controller.asking import noting
from nbddp.errors import RequestError, say_ranks
from nbddp.interrupts import OneInterrupt
from nbddp.promise import Promise, await_all, kept
from nbddp.record.deeds import cell_that_made
from nbddp.record.healed import SHOWN_PLACES, SHOWN_VALUES, Healed
from nbddp.record.rank_values import OwnValues
from nbddp.wire.heal_messages import Give, Meet
from nbddp.wire.messages import Answer, Command, JsonDict

if TYPE_CHECKING:
    from nbddp.controller.session import Session

COMING_BACK = 30.0  # seconds that a rank has to say that it met in vain


@dataclass(frozen=True, slots=True)
class _Said:
    """What the new ranks changed after they got the donor's names.

    Attributes:
        places: the places at which they replaced the donor's rank by their own.
        own: the paths of the values that they restored as the dead ranks had them.
        unlike: the paths of the values that differ from those of the dead ranks.
    """

    places: list[str]
    own: list[str]
    unlike: list[str]

    def add(self, payload: JsonDict) -> None:
        """Add the answer of one rank."""
        for known, new in ((self.places, "places"), (self.own, "taken"), (self.unlike, "unlike")):
            known += [path for path in payload.get(new, ()) if path not in known]


def heal(session: Session, ranks: Sequence[int] = (), donor: int | None = None) -> Healed:
    """Put new processes in the places of dead ranks, while the others live on.

    Args:
        session: of the group.
        ranks: which; all that are gone if empty.
        donor: whose names they get; the lowest rank that lives if None.

    Raises:
        RequestError: it cannot be done; the group is as it was before.
    """
    life = session.life
    chosen = tuple(sorted({*ranks})) or life.gone
    source = min(life.alive, default=0) if donor is None else donor
    began = time.monotonic()
    with OneInterrupt() as interrupt:  # a heal that nobody ends would last for ever
        revived = _begin(session, chosen, source)
        try:
            with interrupt.let_in():
                # whoever chose a donor knows that its names are the right ones
                healed = _go_on(session, revived, chosen, source, began, checks=donor is None)
        except BaseException as error:
            session.end_heal(str(error) or "it was interrupted")
            raise
    session.time_line.record(
        "healed",
        ranks=healed.ranks,
        donor=source,
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
    return healed


def _begin(session: Session, chosen: Sequence[int], source: int) -> Promise[None]:
    try:
        return session.begin_heal(chosen, source)
    except RequestError:  # it was refused, where another one may go on
        raise
    except BaseException as error:
        session.end_heal(str(error) or "it was interrupted")
        raise


def _go_on(
    session: Session,
    revived: Promise[None],
    chosen: Sequence[int],
    source: int,
    began: float,
    *,
    checks: bool,
) -> Healed:
    """Give the new ones the names, and have all meet; ``checks``: see that they are the right ones.

    Raises:
        RequestError: one of them could not.
    """
    give = partial(_give, session, source, chosen if checks else ())
    given = give([])
    kept(revived)
    forked = time.monotonic()
    left: dict[str, str] = {}
    answer = given()
    carried = time.monotonic()
    values = _own_values(session, chosen, source)
    said = _Said([], [], [])
    while unopened := _hand_over(session, answer, source, values, len(left), said):
        left |= unopened  # the next one may be another
        answer = give([*left])()
    session.end_heal()
    session.whereabouts.values.note_healed(chosen)
    left |= answer.payload["left"]
    left = {name: why for name, why in left.items() if name not in said.own}
    unknown = [path for each in values.values() for path in each.unknown]
    size = answer.payload["bytes"] + sum(size for size, _ in answer.payload["storages"])
    return Healed(
        ranks=tuple(chosen),
        donor=source,
        names=len(answer.payload["names"]),
        left=left,
        more=answer.payload["more"],
        places=tuple(said.places),
        own=tuple(said.own),
        unknown=tuple(path for path in dict.fromkeys([*unknown, *said.unlike]) if path not in left),
        cells={name: cell_that_made(name, session.deeds) for name in left},
        size=size,
        fork=forked - began,
        carry=carried - forked,
        meet=time.monotonic() - carried,
    )


def _own_values(session: Session, newcomers: Sequence[int], donor: int) -> dict[int, OwnValues]:
    """Find the values that the new ranks must have instead of the donor's."""
    alive = [rank for rank in session.life.alive if rank not in newcomers]
    port = session.require_link().free_port
    places = session.launcher.places(len(session.life.ranks), master_port=port)
    return {
        rank: session.whereabouts.values.of_replacement(rank, donor, alive, places)
        for rank in newcomers
    }


def _give(
    session: Session, donor: int, newcomers: Sequence[int], leave: list[str]
) -> Callable[[], Answer]:
    """Ask the donor for all its names but these; to be waited for."""
    news = list(newcomers)

    def make(number: int) -> Command:
        return Give(request=number, leave=leave, newcomers=news)

    asked = {donor: session.send(donor, make)}

    def given() -> Answer:
        said = _answers(asked)
        _check(said)
        return said[donor]

    return given


def _hand_over(
    session: Session,
    answer: Answer,
    donor: int,
    values: Mapping[int, OwnValues],
    turn: int,
    said: _Said,
) -> dict[str, str]:
    """Form the group and hand the names to the new ranks; add what these changed to ``said``.

    Returns:
        Why not, for a name that could not be made there: then they have none, and have not met.

    Raises:
        RequestError: they could not.
    """

    def meet(rank: int, number: int) -> Meet:
        return Meet(
            request=number,
            generation=session.life.generation,
            turn=turn,
            donor=donor,
            newcomers=list(values),
            parcel=answer.parcel,
            storages=answer.payload["storages"],
            own=dict(values[rank].own) if rank in values else {},
        )

    try:
        answers = _let_meet(session, meet)
    finally:
        session.require_link().discard(answer.parcel)
    unopened: dict[str, str] = {}
    for each in answers.values():
        unopened |= each.payload.get("unopened", {})
        said.add(each.payload)
    if not unopened:
        _check(answers)
    return unopened


def _let_meet(session: Session, make: Callable[[int, int], Command]) -> dict[int, Answer]:
    """Have all meet; if one of them cannot, the others do not wait for it any longer.

    Raises:
        RequestError: one of them died, or does not come back.
    """
    numbers: dict[int, int] = {}
    asked: dict[int, Promise[Answer]] = {}
    try:
        for rank in session.life.alive:
            asked[rank] = session.send(rank, noting(numbers, rank, partial(make, rank)))
        await_all(asked.values(), until=_has_failed)
    finally:
        for rank, answer in asked.items():
            if not answer.done():
                session.drop(rank, numbers[rank])
    await_all(asked.values(), COMING_BACK)
    late = [rank for rank, answer in asked.items() if not answer.done()]
    if late:
        raise RequestError(
            f"{say_ranks(late)} still tried to form the process group after {COMING_BACK:.0f} s; "
            f"run `%ddp kill {late[0]}`, then `%ddp heal` again"
        )
    return _answers(asked)


def _has_failed(answer: Promise[Answer]) -> bool:
    return answer.exception() is not None or bool(answer.result().error)


def _answers(asked: Mapping[int, Promise[Answer]]) -> dict[int, Answer]:
    """What all of them say.

    Raises:
        RequestError: one of them died.
    """
    await_all(asked.values())
    for future in asked.values():  # what one died of is why the others could not
        if died := future.exception():
            raise died
    return {rank: future.result() for rank, future in asked.items()}


def _check(said: Mapping[int, Answer]) -> None:
    """See that all could do it.

    Raises:
        RequestError: why one could not; not, of one that it has left.
    """
    failed = [(rank, answer) for rank, answer in said.items() if answer.error]
    first = sorted(failed, key=lambda each: each[1].payload.get("was_left", False))
    for rank, answer in first[:1]:
        raise RequestError(f"rank {rank}: {answer.error}")
