"""Store each rank's plain values after each cell, and find the values of a replacement."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from nbddp.accelerator import ACCELERATORS
from nbddp.record.heal.assignments import Device, evaluate_assignments
from nbddp.record.replay_log import SET_IN_EACH_RANK
from nbddp.topology import Topology
from nbddp.wire.value_texts import DEVICE, plain_text, read_plain

Rule = Callable[[Topology], object]
_TextsOfRanks = Mapping[int, Mapping[str, str]]  # texts of values by rank and path
_LAST_NAME = re.compile(r"(\w+)\W*$")
_RANK = re.compile(r"(?i)_?((ddp|dp|dist|my|global|world)_)?rank|(global_)?process_(index|id)")
_LOCAL_RANK = re.compile(
    r"(?i)_?((ddp|dist|my)_)?local_(rank|process_index)|gpu(_id|_index)?|device_(id|index)"
)
_IS_MAIN = re.compile(r"(?i)(\w+_)?(main|master|primary|chief|leader|rank_?(0|zero))(_\w+)?")
_DEVICE = re.compile(r"(?i)(\w+_)?(device|dev)")


@dataclass(frozen=True, slots=True)
class OwnValues:
    """The values of a replacement.

    Attributes:
        texts: for each path, the text of the donor's value and the text of its own value. It keeps
            the donor's value if its own text is a fingerprint.
        unknown: paths at which it keeps the donor's value, because its own value is unknown.
    """

    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unknown: Sequence[str] = ()


class _KnownValue(NamedTuple):
    """A value that a rank reported.

    Attributes:
        text: the text of the value; see :mod:`nbddp.wire.value_texts`.
        since: the cell that first reported it.
        is_late: whether an earlier cell may have set it without time to report it.
    """

    text: str
    since: int
    is_late: bool = False


class RankValues:
    """Stores the texts of all ranks' values by path.

    A path is an expression such as ``trainer.rank``.
    """

    def __init__(self) -> None:
        self._by_rank: dict[int, dict[str, _KnownValue]] = {}
        self._deaths: dict[int, tuple[int, str]] = {}  # the cell a rank died in, and its source

    def clear(self) -> None:
        """Remove all values, because all ranks are new."""
        self._by_rank.clear()
        self._deaths.clear()

    def add(self, rank: int, cell: int, changes: Mapping[str, Any] | None) -> None:
        """Add the changes that a rank reports, such as at the end of a cell."""
        if not changes:
            return
        before = self._by_rank.get(rank, {})
        now = self._by_rank[rank] = {} if changes.get("is_all") else before
        for path in changes.get("gone", ()):
            now.pop(path, None)
        for path, text in changes["new"].items():
            last = before.get(path)
            if last is None or last.text != text:
                last = _KnownValue(text, cell, path in changes.get("late", ()))
            now[path] = last

    def add_death(self, rank: int, cell: int, source: str) -> None:
        """Add that a rank died in a cell. The values that it set there are lost."""
        self._deaths[rank] = (cell, source)

    def clear_deaths(self, ranks: Sequence[int]) -> None:
        """Remove the deaths of these ranks, because they have replacements."""
        for rank in ranks:
            self._deaths.pop(rank, None)

    def of_replacement(
        self, rank: int, donor: int, alive: Sequence[int], topologies: Sequence[Topology]
    ) -> OwnValues:
        """Find the values that the replacement of a rank must have instead of the donor's.

        Args:
            rank: the dead rank.
            donor: the rank that gives its variables to the replacement.
            alive: the ranks that did not die.
            topologies: of all ranks.
        """
        cell, source = self._deaths.get(rank, (0, ""))
        known_of_rank, known_of_donor = self._by_rank.get(rank, {}), self._known_before(donor, cell)
        living = {each: _texts(self._known_before(each, cell)) for each in {*alive, donor}}
        before = living | {rank: _texts(known_of_rank)}
        by_code = {
            other: _evaluated_texts(source, topologies[other], texts)
            for other, texts in before.items()
        }
        own_values: dict[str, tuple[str, str]] = {}
        unknown: list[str] = []
        missing = [
            path for path in known_of_rank if path not in known_of_donor and path.isidentifier()
        ]
        values = known_of_donor | dict.fromkeys(missing, _KnownValue("", 0))
        for path, (text, since, _) in values.items():
            is_reset = bool(cell) and since >= cell
            former = "" if is_reset or path not in known_of_rank else known_of_rank[path].text
            former = former or _derive(path, rank, living, by_code, topologies)
            may_differ = former != text if former else is_reset and _may_differ(path, living)
            is_preset = path in SET_IN_EACH_RANK
            if former and (may_differ or is_preset):
                own_values[path] = text, former
            elif may_differ and not is_preset:
                unknown.append(path)
        return OwnValues(own_values, unknown)

    def _known_before(self, rank: int, cell: int) -> dict[str, _KnownValue]:
        """Return the known values of a rank before a cell.

        Leave out a value that was first reported in this cell or later if an earlier cell may have
        set it: it is unknown which cell did.
        """
        values = self._by_rank.get(rank, {})
        late = {path for path, value in values.items() if value.is_late and 0 < cell <= value.since}
        return {path: value for path, value in values.items() if path not in late}


def _texts(values: Mapping[str, _KnownValue]) -> dict[str, str]:
    return {path: value.text for path, value in values.items()}


def _derive(
    path: str, rank: int, living: _TextsOfRanks, by_code: _TextsOfRanks, places: Sequence[Topology]
) -> str:
    """Derive the text of a dead rank's own value; empty if more than one is possible.

    Args:
        path: the path of the value.
        rank: the dead rank.
        living: texts of the living ranks' values.
        by_code: texts of the values that the cell assigns in which the rank died, on each rank.
        places: of all ranks.
    """
    texts = {each: values[path] for each, values in living.items() if path in values}
    if len(texts) < len(living):
        return ""
    if all(by_code[each].get(path) == text for each, text in texts.items()):
        return by_code[rank].get(path, "")
    candidates = {
        _text_of(rule(places[rank]))
        for rule in _rules(path)
        if all(_text_of(rule(places[each])) == text for each, text in texts.items())
    }
    return candidates.pop() if len(candidates) == 1 else ""


def _may_differ(path: str, living: _TextsOfRanks) -> bool:
    """Return whether the dead rank's own value may differ from the donor's.

    If two living ranks have the same value, all ranks are assumed to have it. A bool is the
    exception: it may be true only on the dead rank.
    """
    texts = {values.get(path, "") for values in living.values()}
    is_alone = len(living) == 1 and path.isidentifier()
    return is_alone or len(texts) > 1 or texts <= {"True", "False"}


def _rules(path: str) -> list[Rule]:
    """Return the rules for a name, such as ``rank == 0`` for ``is_main``."""
    match = _LAST_NAME.search(path)
    name = match[1] if match else ""
    if _LOCAL_RANK.fullmatch(name):
        return [lambda topology: topology.local_rank, *_device_rules]
    if _RANK.fullmatch(name):
        return [lambda topology: topology.rank]
    if _IS_MAIN.fullmatch(name):
        if "local" in name.lower():
            return [lambda topology: topology.local_rank == 0]
        return [lambda topology: topology.rank == 0]
    return _device_rules if _DEVICE.fullmatch(name) else []


def _own_device(device_type: str, make: Callable[[str], str], topology: Topology) -> object:
    return make(f"{device_type}:{topology.local_rank}")


_device_rules: list[Rule] = [
    partial(_own_device, kind.device_type, make) for kind in ACCELERATORS for make in (str, Device)
]


def _evaluated_texts(source: str, topology: Topology, texts: Mapping[str, str]) -> dict[str, str]:
    names = {path: _value_of(text) for path, text in texts.items() if path.isidentifier()}
    plain = {name: value for name, value in names.items() if value is not Ellipsis}
    values = evaluate_assignments(source, topology, plain)
    return {name: _text_of(value) for name, value in values.items()}


def _text_of(value: object) -> str:
    return f"{DEVICE}{value}" if isinstance(value, Device) else plain_text(value)


def _value_of(text: str) -> object:
    """Return the value of a text; an ellipsis if it is mutable or unknown."""
    if text.startswith(DEVICE):
        return Device(text.removeprefix(DEVICE))
    try:
        value = read_plain(text)
        hash(value)
    except (TypeError, ValueError):
        return ...
    return value
