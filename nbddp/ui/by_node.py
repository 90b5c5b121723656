"""Ranks put together by node: what is alike is said once, and who differs stands below."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.words import say_rate

T = TypeVar("T", bound=Hashable)
STILL = 5.0  # seconds without any move, from which on it matters where a rank is
_NUMBERED = re.compile(r"(\S+) #(\d+)")  # a collective


@dataclass(frozen=True, slots=True)
class NodeOfRanks:
    """A node, and what its ranks do.

    Attributes:
        number: the node rank.
        name: what the node is called.
        ranks: all that are on it.
        usual: those that do what most of it do.
        others: those that differ; a row each tells of them.
        is_odd: whether the usual ones do something else than most ranks of all nodes.
    """

    number: int
    name: str
    ranks: tuple[RankSnapshot, ...]
    usual: tuple[RankSnapshot, ...]
    others: tuple[RankSnapshot, ...]
    is_odd: bool

    @property
    def title(self) -> str:
        """Which one it is: ``node 2 (gpu-07)``."""
        return f"node {self.number} ({self.name})"

    @property
    def state(self) -> str:
        """What most of its ranks do; between two steps one waits while another one runs."""
        states = {each.state for each in self.usual}
        if "running" in states and all(each.is_well for each in self.usual):
            return "running"
        return _commonest(each.state for each in self.usual)

    @property
    def place(self) -> str:
        """The line that they are on, if it is the same."""
        places = {each.place for each in self.usual if each.line}
        return places.pop() if len(places) == 1 else ""

    @property
    def seconds(self) -> float:
        """For how long they have not moved; 0 if any of them does."""
        return min(each.seconds for each in self.usual)

    @property
    def collective(self) -> str:
        """Their newest ones: ``all_reduce #40``, ``all_reduce #39-40``."""
        found = [match for each in self.usual if (match := _NUMBERED.match(each.collective))]
        if not found:
            return ""
        name = _commonest(match[1] for match in found)
        numbers = [int(match[2]) for match in found if match[1] == name]
        return f"{name} #{_span(min(numbers), max(numbers))}"

    @property
    def step(self) -> str:
        """The steps that they are at, and how fast they are on average."""
        known = [each for each in self.usual if each.step is not None]
        if not known:
            return ""
        steps = [float(each.step or 0) for each in known]
        rate = say_rate(sum(each.steps_per_second for each in known) / len(known))
        return _span(min(steps), max(steps)) + (f" · {rate}" if rate else "")

    @property
    def cpu(self) -> str:
        """The share of a core that all its ranks take together."""
        known = [each.cpu for each in self.ranks if each.is_alive and each.memory and each.cpu >= 0]
        return f"{sum(known):.0f} %" if known else ""

    @property
    def memory(self) -> int:
        """Bytes of all its ranks together."""
        return sum(each.memory for each in self.ranks if each.is_alive)


def by_node(ranks: Sequence[RankSnapshot]) -> list[NodeOfRanks]:
    """Put ranks together; nothing unless they are on several nodes.

    A rank differs from its node if something went wrong with it, if it is slow, or if it does not
    move and is elsewhere than most; while all go on, it does not matter where each just is.
    """
    found: dict[str, list[RankSnapshot]] = {}
    for each in ranks:
        found.setdefault(each.node, []).append(each)
    if len(found) < 2 or "" in found:
        return []
    usual = _commonest(map(_kind, ranks))
    return [_node(number, name, found[name], usual) for number, name in enumerate(found)]


def _node(number: int, name: str, there: Sequence[RankSnapshot], usual: Hashable) -> NodeOfRanks:
    kinds = [usual if _where(each) == usual else _kind(each) for each in there]
    here = _commonest(kinds)
    known = list(zip(there, kinds, strict=True))
    return NodeOfRanks(
        number=number,
        name=name,
        ranks=tuple(there),
        usual=tuple(each for each, kind in known if kind == here),
        others=tuple(each for each, kind in known if kind != here),
        is_odd=here != usual,
    )


def _kind(each: RankSnapshot) -> Hashable:
    """What ranks have in common that are alike."""
    if not each.is_well or not each.is_alive or each.state == "done":
        return each.state, each.is_cause
    if each.lag is not None:
        return "slow", each.rank
    if each.seconds >= STILL:
        return _where(each)
    return "goes on" if each.line or each.state == "waiting" else each.state


def _where(each: RankSnapshot) -> Hashable:
    """Where a rank is; one that has come there a moment ago is not elsewhere than the others."""
    match = _NUMBERED.match(each.collective)
    return each.state, each.place, match and match.group()


def _commonest(values: Iterable[T]) -> T:
    return Counter(values).most_common(1)[0][0]


def _span(low: float, high: float) -> str:
    return f"{low:.0f}" if low == high else f"{low:.0f}-{high:.0f}"
