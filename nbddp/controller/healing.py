"""Heals a worker group: new ranks are forked, given a living one's names, and all meet again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nbddp.controller.asking import noting
from nbddp.controller.promises import await_all, await_all_or_a_failure, kept
from nbddp.errors import RequestError
from nbddp.record.deeds import cell_that_made
from nbddp.record.healed import Healed
from nbddp.wire.heal_messages import Give, Meet
from nbddp.wire.messages import Answer, Command

if TYPE_CHECKING:
    from concurrent.futures import Future

    from nbddp.controller.session import Session


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
    chosen = tuple(ranks) or life.gone
    source = min(life.alive, default=0) if donor is None else donor
    began = time.monotonic()
    revived = session.begin_heal(chosen, source)
    with _given_up_if_it_fails(session):
        given = {source: session.send(source, lambda number: Give(request=number))}
        kept(revived)
        forked = time.monotonic()
        [answer] = _answers(given)
        carried = time.monotonic()
        parcel, storages = answer.parcel, answer.payload["storages"]
        generation = session.life.generation + 1

        def meet(number: int) -> Meet:
            return Meet(
                request=number,
                generation=generation,
                donor=source,
                newcomers=list(chosen),
                parcel=parcel,
                storages=storages,
            )

        try:
            _let_meet(session, meet)
        finally:
            session.require_link().discard(parcel)
        session.end_heal()
    size = answer.payload["bytes"] + sum(size for size, _ in storages)
    healed = Healed(
        ranks=chosen,
        donor=source,
        names=len(answer.payload["names"]),
        left=answer.payload["left"],
        cells={name: cell_that_made(name, session.deeds) for name in answer.payload["left"]},
        size=size,
        fork=forked - began,
        carry=carried - forked,
        meet=time.monotonic() - carried,
    )
    session.time_line.record(
        "healed",
        ranks=healed.ranks,
        donor=source,
        names=healed.names,
        left=dict(healed.left),
        bytes=size,
        fork=round(healed.fork, 3),
        carry=round(healed.carry, 3),
        meet=round(healed.meet, 3),
    )
    return healed


@contextmanager
def _given_up_if_it_fails(session: Session) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        session.end_heal(str(error) or "it was interrupted")
        raise


def _let_meet(session: Session, make: Callable[[int], Command]) -> None:
    """Have all meet; if one of them cannot, the others do not wait for it any longer.

    Raises:
        RequestError: they could not.
    """
    numbers: dict[int, int] = {}
    asked: dict[int, Future[Answer]] = {}
    try:
        for rank in session.life.alive:
            asked[rank] = session.send(rank, noting(numbers, rank, make))
        await_all_or_a_failure(asked.values())
    finally:
        for rank, answer in asked.items():
            if not answer.done():
                session.drop(rank, numbers[rank])
    _answers(asked)


def _answers(asked: Mapping[int, Future[Answer]]) -> list[Answer]:
    """What all of them say.

    Raises:
        RequestError: one of them could not do it.
    """
    await_all(asked.values())
    for future in asked.values():  # what one died of is why the others could not
        if died := future.exception():
            raise died
    for rank, future in asked.items():
        if error := future.result().error:
            raise RequestError(f"rank {rank}: {error}")
    return [future.result() for future in asked.values()]
