"""How long collectives took on the GPU, where NCCL measures that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nbddp.wire.timing_messages import Arrivals

MOST_KINDS = 200  # of which something is kept


@dataclass(slots=True)
class Durations:
    """Of each kind of collective, on each rank: how many were measured, and their seconds.

    A kernel of NCCL's begins when its own rank comes, and waits on the GPU for the others: the rank
    on which it is shortest is the one that came last.
    """

    kinds: dict[str, dict[int, tuple[int, float]]] = field(default_factory=dict)

    def note(self, rank: int, letter: Arrivals) -> None:
        """A rank has told how long some of its collectives took."""
        it = iter(letter.durations)
        for microseconds, kind in zip(it, it, strict=True):
            name, shape, group = letter.kinds[kind][:3]
            of = f"of group {group}" if group else ""
            title = " ".join(filter(None, (name, shape, of)))
            if title not in self.kinds and len(self.kinds) >= MOST_KINDS:
                continue
            count, seconds = self.kinds.setdefault(title, {}).get(rank, (0, 0.0))
            self.kinds[title][rank] = count + 1, seconds + microseconds / 1e6

    def averages(self) -> Mapping[str, Mapping[int, float]]:
        """Seconds of one collective of each kind, on each rank; the dearest kind first."""
        found = {
            title: {rank: seconds / count for rank, (count, seconds) in sorted(ranks.items())}
            for title, ranks in self.kinds.items()
        }
        whole = {
            title: max(seconds for _, seconds in ranks.values())
            for title, ranks in self.kinds.items()
        }
        return {title: found[title] for title in sorted(found, key=lambda it: -whole[it])}

    def copy(self) -> Durations:
        """The same, which does not change any more."""
        return Durations({title: dict(ranks) for title, ranks in self.kinds.items()})
