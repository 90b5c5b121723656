"""Why ranks wait for each other in vain: who called what, and who called nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nbddp.errors import say_ranks
from nbddp.wire.collective import Collective
from nbddp.wire.messages import Pulse

# those to which every rank must give the same type and sizes
_EVEN = ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter")


def why(cell: int, running: Mapping[int, Pulse], ended: Mapping[int, Pulse]) -> str:
    """Who called what and who did not, in one line.

    Args:
        cell: the cell that runs.
        running: what the ranks that are in it said last; one at least waits for others.
        ended: the same of those that are through with it.

    >>> def at(name):
    ...     return Pulse(cell=1, line=1, function="", collective=Collective(name, 1))
    >>> why(1, {0: at("all_reduce"), 1: at("broadcast")}, {})
    'rank 0 called all_reduce #1, rank 1 broadcast #1'
    """
    calls = {rank: pulse.collective for rank, pulse in running.items() if pulse.collective}
    others = {rank: pulse for rank, pulse in {**running, **ended}.items() if rank not in calls}
    calls |= _other_calls(cell, others, set(calls.values()))
    told = [_say_calls(calls)]
    absent = [rank for rank in running if rank not in calls]
    gone = [rank for rank in ended if rank not in calls]
    if absent:
        told.append(f"{say_ranks(absent)} never came")
    if gone:
        told.append(f"{say_ranks(gone)} {_is(gone)} done with the cell")
    return ", ".join(told)


def _other_calls(
    cell: int, pulses: Mapping[int, Pulse], waited_in: set[Collective]
) -> dict[int, Collective]:
    """Who has made another call in the place of one that is waited in, and went on."""
    found: dict[int, Collective] = {}
    for rank, pulse in pulses.items():
        call = pulse.last if pulse.last_cell == cell else None
        if call is None:
            continue
        rivals = [each for each in waited_in if each.place == call.place]
        if any(each.name != call.name or _is_uneven([each, call]) for each in rivals):
            found[rank] = call
    return found


def _is_uneven(calls: Iterable[Collective]) -> bool:
    """Whether one call was given different sizes, and must not be."""
    known = set(calls)
    titles, shapes = {each.title for each in known}, {each.shape for each in known}
    is_one = len(titles) == 1 and all(each.name.strip("_").startswith(_EVEN) for each in known)
    return is_one and len(shapes) > 1


def _say_calls(calls: Mapping[int, Collective]) -> str:
    is_uneven = _is_uneven(calls.values())
    groups: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        groups.setdefault(call.shape if is_uneven else call.title, []).append(rank)
    if is_uneven:
        told = [f"{say_ranks(ranks)} with {shape}" for shape, ranks in groups.items()]
        title = next(iter(calls.values())).title
        return "sizes differ: " + ", ".join(told).replace(" with", f" called {title} with", 1)
    told = [f"{say_ranks(ranks)} {title}" for title, ranks in groups.items()]
    first = next(iter(groups.values()))
    return f"{say_ranks(first)} called" + ", ".join(told).removeprefix(say_ranks(first))


def _is(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
