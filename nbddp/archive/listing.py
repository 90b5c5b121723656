"""Which runs there are: those that fit what was asked for, in the order that was asked for."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nbddp.archive.summary import COLUMNS, Summary, is_number, number_of, summarize
from nbddp.errors import ArgumentError, RequestError
from nbddp.record.runs import SHOWN

Sign = Callable[[Any, Any], bool]

SIGNS: dict[str, Sign] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_CONDITION = re.compile(r"(?P<name>[^=<>!]+)(?P<sign><=|>=|!=|==|=|<|>)(?P<value>.*)", re.DOTALL)
_SIGN_BEGINS, _SIGN_ENDS = re.compile(r"[=<>!]"), re.compile(r"[=<>!]\s*$")
MANY = 6  # settings that have a column of their own
FEW = 3  # metrics that have one
NAMED = 12  # settings and metrics in a message


@dataclass(frozen=True, slots=True)
class Listing:
    """The runs of a folder.

    Attributes:
        runs: those that were asked for, in their order.
        left_out: what is damaged, half-written or somebody else's, by name, and what is wrong.
        total: how many runs there are, and ``size`` how many bytes all of them take.
    """

    runs: tuple[Summary, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    total: int = 0
    size: int = 0

    @property
    def settings(self) -> list[str]:
        """In what the runs that are listed differ, of ``nbddp.config``; the first few."""
        names = dict.fromkeys(name for run in self.runs for name in run.config)
        return [name for name in names if _differ(run.config.get(name) for run in self.runs)][:MANY]

    @property
    def metrics(self) -> list[str]:
        """The metrics of most of them; the first few."""
        counts: dict[str, int] = {}
        for name in (name for run in self.runs for name in run.last):
            counts[name] = counts.get(name, 0) + 1
        return sorted(counts, key=lambda name: -counts[name])[:FEW]


def conditions(words: Sequence[str]) -> list[str]:
    """The conditions of a line, be they written with spaces or without.

    Raises:
        ArgumentError: a sign has nothing before or behind it, or there is no such sign.

    >>> conditions(["loss", "<", "5", "digits", "lr=", "0.1", "seed", "!=3"])
    ['loss<5', 'digits', 'lr=0.1', 'seed!=3']
    """
    found: list[str] = []
    for word in words:
        is_open = bool(found) and _SIGN_ENDS.search(found[-1])
        begins = bool(found) and _SIGN_BEGINS.match(word) and not _SIGN_BEGINS.search(found[-1])
        if is_open or begins:
            found[-1] += word
        else:
            found.append(word)
    for each in found:
        parts = _CONDITION.fullmatch(each)
        is_whole = parts is not None and not _SIGN_BEGINS.match(parts["value"].strip() or "=")
        if _SIGN_BEGINS.search(each) and not is_whole:
            allowed = ", ".join(SIGNS)
            raise ArgumentError(f"expected a condition like loss<5 (with {allowed}), got {each!r}")
    return found


def _differ(values: Iterable[Any]) -> bool:
    return len(set(map(repr, values))) > 1


def list_runs(
    base: Path,
    asked: Sequence[str] = (),
    *,
    sort: str = "",
    is_down: bool = False,
    current: Path | None = None,
) -> Listing:
    """The runs that were started in a folder, the newest first.

    Args:
        base: the folder.
        asked: conditions, all of which a run meets: ``lr=0.1``, ``loss<0.5``, ``outcome=ok``, or a
            word that its name or note has in it.
        sort: a setting, a metric or a column to sort by. Runs that have none come last.
        is_down: from the highest to the lowest.
        current: the run of this kernel that goes on.

    Raises:
        ArgumentError: no run has what is asked for, or to be sorted by.
    """
    known, left_out = _all(base, current)
    asked = conditions(asked)
    for name in filter(None, [*map(_name_in, asked), sort]):
        _check(name, known)
    runs = [run for run in known if all(fits(run, each) for each in asked)]
    if sort:
        runs = _sorted(runs, sort, is_down=is_down)
    return Listing(tuple(runs), left_out, len(known), sum(run.size for run in known))


def _all(base: Path, current: Path | None) -> tuple[list[Summary], dict[str, str]]:
    folder, runs, left_out = base / ".nbddp" / "runs", list[Summary](), dict[str, str]()
    inside = folder.iterdir() if folder.is_dir() else ()
    paths = [each for each in inside if each.is_dir() and not each.name.startswith(".")]
    known = {each.resolve() for each in paths}
    if current is not None and current.resolve() not in known:
        paths.append(current)  # where the folder could not be written, or the user took it away
    for path in paths:
        try:
            runs.append(summarize(path, current=current))
        except RequestError as error:
            left_out[path.name] = str(error)
    runs.sort(key=lambda run: (run.name[:15], run.began, run.name), reverse=True)
    return runs, dict(sorted(left_out.items()))


def _sorted(runs: Sequence[Summary], name: str, *, is_down: bool) -> list[Summary]:
    """Numbers before words, and both before nothing."""
    numbers = [run for run in runs if is_number(number_of(run, name))]
    rest = [run for run in runs if not is_number(number_of(run, name))]
    words = [run for run in rest if isinstance(number_of(run, name), str)]
    others = [run for run in rest if not isinstance(number_of(run, name), str)]
    for some in (numbers, words):
        some.sort(key=lambda run: number_of(run, name), reverse=is_down)
    return [*numbers, *words, *others]


def _name_in(condition: str) -> str:
    found = _CONDITION.fullmatch(condition)
    return found["name"].strip() if found else ""


def _check(name: str, runs: Sequence[Summary]) -> None:
    known = dict.fromkeys(name for run in runs for name in (*run.config, *run.last))
    if runs and name not in known and name not in (*COLUMNS, "when", "steps/s", "disk"):
        shown = [*[*known][:NAMED], *(["..."] if len(known) > NAMED else [])]
        there = ", ".join([*shown, *sorted(COLUMNS)])
        raise ArgumentError(f"no run has {name!r}; there is: {there}")


def fits(run: Summary, condition: str) -> bool:
    """Whether a run meets a condition.

    >>> run = Summary(path=Path("digits"), config={"lr": 0.1, "model": "resnet18"})
    >>> [fits(run, each) for each in ("lr=1e-1", "lr<0.1", "model=res*", "seed!=3", "digi", "odd")]
    [True, False, True, True, True, False]
    """
    found = _CONDITION.fullmatch(condition)
    if found is None:
        return condition in run.name or condition in run.note
    there = number_of(run, found["name"].strip())
    return _meets(there, SIGNS[found["sign"]], found["value"].strip())


def _meets(there: Any, sign: Sign, wanted: str) -> bool:
    number = _number(wanted)
    if is_number(there) and number is not None and not isinstance(there, bool):
        return sign(there, number)
    if sign is operator.eq:
        return there is not None and fnmatchcase(str(there), wanted)
    if sign is operator.ne:
        return there is None or not fnmatchcase(str(there), wanted)
    return isinstance(there, str) and sign(there, wanted)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def say_left_out(left_out: Mapping[str, str]) -> str:
    """Which folders are not listed, and why; empty if there are none.

    >>> say_left_out({"x": "it has no events.jsonl"})
    'left out: x (it has no events.jsonl)'
    """
    shown = [f"{name} ({why})" for name, why in [*left_out.items()][:SHOWN]]
    more = [f"{len(left_out) - SHOWN} more"] if len(left_out) > SHOWN else []
    return f"left out: {', '.join([*shown, *more])}" if left_out else ""
