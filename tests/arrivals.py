"""Status messages of ranks in an invented cell: one message per rank and second."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nbddp.record.collectives.collective_matcher import CollectiveMatcher
from nbddp.wire.collective_arrivals import CollectiveArrivals

BASE = 1e9  # the time.time() at which the cell begins
KIND = ["all_reduce", "float [72]", "", True, 0]


def arrival_messages(
    came: list[float], *, cell: int = 1, first: int = 1, kind: list[Any] = KIND, **more: Any
) -> Iterator[CollectiveArrivals]:
    """Return a rank's messages, one per second with a collective; the last ends the cell.

    ``came`` are seconds since the cell began.
    """
    seconds: dict[int, list[int]] = {}
    for number, at in enumerate(came, first):
        seconds.setdefault(int(at), []).extend((number, round(at * 1e6), 0))
    end = round((came[-1] + 0.15) * 1e6)  # by then the last one is there, too
    for second, rows in seconds.items():
        until = min(end, round(1e6 * (second + 1)))
        yield CollectiveArrivals(
            cell=cell, base=BASE, kinds=[kind], rows=rows, sent_at=until, **more
        )
    yield CollectiveArrivals(cell=cell, base=BASE, sent_at=end, is_over=True)


def matcher_with(*messages_of_ranks: Iterable[CollectiveArrivals]) -> CollectiveMatcher:
    matcher = CollectiveMatcher()
    matcher.reset_for_cell(range(len(messages_of_ranks)))
    for rank, messages in enumerate(messages_of_ranks):
        for message in messages:
            matcher.add(rank, message, 0.0)
    return matcher


def matcher_of(
    work: Callable[[int, int], float],
    *,
    ranks: int = 3,
    steps: int = 40,
    ahead: Callable[[int], float] = lambda _rank: 0.0,
) -> CollectiveMatcher:
    """Return the messages of ranks that work, enter a collective, and continue together."""
    came: list[list[float]] = [[] for _ in range(ranks)]
    now = 0.0
    for step in range(steps):
        ends = [now + work(rank, step) for rank in range(ranks)]
        for rank, end in enumerate(ends):
            came[rank].append(end)
        now = max(ends) + 1e-4
    waiting = CollectiveMatcher()
    waiting.reset_for_cell(range(ranks))
    for rank in range(ranks):
        for message in arrival_messages([at + ahead(rank) for at in came[rank]]):
            waiting.add(rank, message, now, ahead=ahead(rank), error=abs(ahead(rank)) / 100)
    return waiting
