"""Send requests to ranks and wait for all answers, or for the error of each rank without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from nbddp.controller.session import Session
from nbddp.errors import ArgumentError, RequestError
from nbddp.formatting import format_ranks, unknown_rank
from nbddp.lifecycle.refusals import NO_GROUP
from nbddp.sigint import Future, wait_for_all
from nbddp.wire.request_messages import Answer, Request

ALL_GONE = "all ranks are dead; `%ddp restart` restarts them"


def resolve_ranks(session: Session, ranks: Sequence[int] | None) -> list[int]:
    """Return the ranks of a request; None means all that are alive.

    Raises:
        ArgumentError: no rank was chosen, or there is no such rank.
        RequestError: there are no ranks, or all are dead.
    """
    life = session.life
    if not life.state.is_live:
        raise RequestError(NO_GROUP)
    if ranks is not None and not ranks:
        raise ArgumentError("choose at least one rank to send values to")
    check_ranks(session, ranks)
    chosen = life.alive if ranks is None else list(ranks)
    if not chosen:
        raise RequestError(ALL_GONE)
    return chosen


def check_ranks(session: Session, ranks: Sequence[int] | None) -> None:
    """Refuse rank numbers that this group does not have.

    Raises:
        ArgumentError: there is no such rank.
    """
    world_size = len(session.life.ranks)
    for rank in (ranks or ()) if world_size else ():
        if not 0 <= rank < world_size:
            raise ArgumentError(unknown_rank(rank, world_size))


def ask_all(
    session: Session, ranks: Sequence[int], request: Request, *, what: str = ""
) -> dict[int, Answer]:
    """Send a request to each rank, and return the answers.

    Args:
        session: the session of the ranks.
        ranks: the ranks to ask. If one of them dies, the others still get the request.
        request: the request.
        what: the value that the ranks receive, for the error if only some of them received it.

    Raises:
        RequestError: a rank could not answer, or its answer is an error.
    """
    outcomes = ask_each(session, dict.fromkeys(ranks, request))
    answers = {rank: each for rank, each in outcomes.items() if isinstance(each, Answer)}
    failed = [each for each in outcomes.values() if isinstance(each, RequestError)]
    if not failed:
        return answers
    for answer in answers.values():
        session.require_link().discard_payload(answer.payload)
    where = f"{what} reached {format_ranks([*answers])} only: " if what and answers else ""
    raise RequestError(f"{where}{failed[0]}")


def ask_each(session: Session, requests: Mapping[int, Request]) -> dict[int, Answer | RequestError]:
    """Send each rank its own request. Return its answer, or the error if there is none."""
    futures: dict[int, Future[Answer]] = {}
    numbers: dict[int, int] = {}
    try:
        for rank, request in requests.items():
            numbered = session.numbered(request)
            numbers[rank] = numbered.request
            try:
                futures[rank] = session.send_request(rank, numbered)
            except RequestError as error:
                futures[rank] = Future()
                futures[rank].set_exception(error)
        wait_for_all(futures.values())
    except BaseException:
        for rank, number in numbers.items():  # the answers are not needed any more
            if rank not in futures or not futures[rank].done():
                session.cancel_request(rank, number)
        for future in futures.values():  # also an answer that is not here yet
            future.add_done_callback(partial(_discard_answer, session))
        raise
    return {rank: _answer_or_error(rank, future) for rank, future in futures.items()}


def _discard_answer(session: Session, future: Future[Answer]) -> None:
    if future.exception() is None:
        session.require_link().discard_payload(future.result().payload)


def _answer_or_error(rank: int, future: Future[Answer]) -> Answer | RequestError:
    error = future.exception()
    if error is not None:
        return error if isinstance(error, RequestError) else RequestError(str(error))
    answer = future.result()
    return RequestError(f"rank {rank}: {answer.error}") if answer.error else answer
