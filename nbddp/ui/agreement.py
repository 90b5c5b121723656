"""The last expression's value of every rank: shown once for ranks that agree."""

from __future__ import annotations

from collections.abc import Mapping

from nbddp.ui.tails import Line
from nbddp.wire.messages import JsonDict


def agreeing(results: Mapping[int, JsonDict]) -> list[tuple[list[int], JsonDict]]:
    """Group ranks by what they show, in order of the lowest rank.

    >>> one, two = {"data": {"text/plain": "1"}}, {"data": {"text/plain": "2"}}
    >>> [ranks for ranks, _ in agreeing({0: one, 1: two, 2: one})]
    [[0, 2], [1]]
    """
    groups: list[tuple[list[int], JsonDict]] = []
    for rank, bundle in results.items():
        for ranks, known in groups:
            if known == bundle:
                ranks.append(rank)
                break
        else:
            groups.append(([rank], bundle))
    return groups


def parted(results: Mapping[int, JsonDict]) -> tuple[list[Line], list[tuple[list[int], JsonDict]]]:
    """Values that are text, as lines of the log, and those that want a display of their own."""
    lines: list[Line] = []
    rich: list[tuple[list[int], JsonDict]] = []
    for ranks, bundle in agreeing(results):
        if set(bundle["data"]) == {"text/plain"}:
            lines.append(Line(tuple(ranks), str(bundle["data"]["text/plain"]), mark="Out"))
        elif bundle["data"]:
            rich.append((ranks, bundle))
    return lines, rich
