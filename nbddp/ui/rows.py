"""A time line's ranks as rows: which of them, and in letters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nbddp.record.spent import Timeline

MAX_ROWS = 32
COMPUTE = "."
LETTERS = {"gone": " ", "wait": "#", "data": "d"}


def shown_ranks(line: Timeline) -> Sequence[int]:
    """All that fit; of more, those that are waited for most or wait most."""
    if len(line.ranks) <= MAX_ROWS:
        return line.ranks
    said = dict.fromkeys(line.ranks, 0.0)
    for (waiter, awaited), seconds in line.waits.items():
        said[waiter] += seconds / len(line.ranks)
        said[awaited] += seconds
    return sorted(sorted(said, key=lambda rank: -said[rank])[:MAX_ROWS])


def said_rows(line: Timeline, columns: int = 72) -> Iterator[tuple[int, str]]:
    """Each rank with its row of letters: what it did most of the time that a letter stands for.

    >>> line = Timeline(cell=1, ranks=(0,), span=(0.0, 8.0), loads={0: [(2.0, 4.0)]})
    >>> list(said_rows(line, 8))
    [(0, '..dd....')]
    """
    for rank in shown_ranks(line):
        parts = {kind: [0.0] * columns for kind in LETTERS}
        for kind, began, end in line.pieces(rank):
            _fill(parts[kind], line, began, end)
        letters = (
            dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)
        )
        yield rank, "".join(map(_letter, letters))


def _fill(part: list[float], line: Timeline, began: float, end: float) -> None:
    """Add to each letter's time how much of it a piece takes."""
    columns, seconds = len(part), max(line.seconds, 1e-9)
    a, b = ((at - line.span[0]) / seconds * columns for at in (began, end))
    for place in range(max(0, int(a)), min(columns, int(b) + 1)):
        part[place] += max(0.0, min(b, place + 1) - max(a, place))


def _letter(parts: Mapping[str, float]) -> str:
    """What it did for most of the time; a rank that is gone does nothing, not even wait."""
    if sum(parts.values()) < 0.5:
        return COMPUTE
    return LETTERS[max(parts, key=lambda kind: parts[kind])]
