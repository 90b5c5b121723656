"""List runs by conditions, remove runs, and write notes about them."""

from __future__ import annotations

import json
import operator
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from nbddp.errors import ArgumentError, RequestError, as_request_error
from nbddp.extensions.runs.find import is_in_name
from nbddp.extensions.runs.summary import (
    COLUMNS,
    NOTE_FILE,
    SHORT_COLUMNS,
    Summary,
    is_number,
    summarize,
    value_of,
)
from nbddp.formatting import list_some
from nbddp.record.metrics import Pairs
from nbddp.record.run_folder import write_atomic

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_CONDITION = re.compile(r"([^=<>!]+)(<=|>=|!=|==?|<|>)(\s*[^\s=<>!].*)", re.DOTALL)
# metrics that tell how a training goes on, and not how good the model is
_NO_RESULT = re.compile(r"(?:^|/)(?:learning_rate|lr|grad_norm|epoch)$|_per_second$")
MAX_SETTING_COLUMNS = 6  # columns of settings
MAX_METRIC_COLUMNS = 3  # columns of metrics
MAX_NAMED = 12  # settings and metrics in a message


@dataclass(frozen=True)
class Listing:
    """The runs of a folder.

    Attributes:
        runs: the requested runs, in the requested order.
        left_out: for each damaged or incomplete folder, the reason.
        total: number of all runs.
        size: bytes that all runs take.
    """

    runs: tuple[Summary, ...]
    left_out: tuple[str, ...] = ()
    total: int = 0
    size: int = 0

    @cached_property
    def settings(self) -> list[str]:
        """The settings of ``nbddp.config`` in which the listed runs differ; the first few."""
        names = dict.fromkeys(name for run in self.runs for name in run.config)
        differing = [name for name in names if _differ(run.config.get(name) for run in self.runs)]
        return differing[:MAX_SETTING_COLUMNS]

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics that most of the listed runs have; the first few, results before the rest."""
        counts = Counter(name for run in self.runs for name in run.last)
        names = [name for name, _ in counts.most_common()]
        return sorted(names, key=lambda name: bool(_NO_RESULT.search(name)))[:MAX_METRIC_COLUMNS]

    @cached_property
    def titles(self) -> list[str]:
        """The column titles of settings and metrics; marked if a name is both."""
        settings, metrics = self.settings, self.metrics
        return [
            *(f"{name} (config)" if name in metrics else name for name in settings),
            *(f"{name} (last)" if name in settings else name for name in metrics),
        ]

    @cached_property
    def has_several_programs(self) -> bool:
        """Whether several notebooks or scripts started the listed runs."""
        return _differ(run.started_by for run in self.runs)

    @cached_property
    def curve_name(self) -> str:
        """The metric that most of the listed runs show as a curve; empty if none has a curve."""
        names = Counter(name for run in self.runs if (name := self.curve_of(run)[0]))
        return max(names, key=names.__getitem__, default="")

    def curve_of(self, run: Summary) -> tuple[str, Pairs]:
        """Return the name and the curve of the run's first metric with more than one point.

        The metrics with a column come first, then losses.
        """
        losses = [name for name in run.curves if "loss" in name]
        names = [*filter(run.curves.__contains__, self.metrics), *losses, *run.curves, ""]
        name = max(names, key=lambda metric: min(2, len(run.curves.get(metric, ()))))
        return name, run.curves.get(name, ())


@dataclass(frozen=True, slots=True)
class Condition:
    """A word of ``%ddp runs``: a comparison or, without one, a part of a name or note.

    >>> run = Summary(path=Path("digits"), config={"lr": 0.1, "model": "resnet18"})
    >>> words = ("lr=1e-1", "lr<0.1", "model=res*", "seed!=3", "digi", "odd")
    >>> [Condition.parse(word).fits(run) for word in words]
    [True, False, True, True, True, False]
    """

    name: str
    comparison: str = ""
    value: str = ""

    @classmethod
    def parse(cls, word: str) -> Condition:
        """Parse a word.

        Raises:
            ArgumentError: the comparison is incomplete or unknown.
        """
        if not re.search(r"[=<>!]", word):
            return cls(word)
        match = _CONDITION.fullmatch(word)
        if match is None:
            allowed = ", ".join(COMPARISONS)
            raise ArgumentError(
                f"expected a condition in one word, like loss<5 (with {allowed}), got {word!r}"
            )
        return cls(match[1].strip(), match[2], match[3].strip())

    def fits(self, run: Summary) -> bool:
        """Return whether a run meets the condition."""
        if not self.comparison:
            return is_in_name(self.name, run.name) or self.name in run.note
        value, compare, wanted = value_of(run, self.name), COMPARISONS[self.comparison], None
        with suppress(ValueError):
            wanted = float(self.value)
        if is_number(value) and wanted is not None and not isinstance(value, bool):
            return compare(value, wanted)
        if compare is operator.eq:
            return value is not None and fnmatchcase(str(value), self.value)
        if compare is operator.ne:
            return value is None or not fnmatchcase(str(value), self.value)
        return isinstance(value, str) and compare(value, self.value)


def list_runs(
    base: Path,
    words: Sequence[str] = (),
    *,
    sort: str = "",
    is_down: bool = False,
    current: Path | None = None,
) -> Listing:
    """List the runs that were started in a folder, newest first.

    Args:
        base: the folder.
        words: conditions that a run must meet: ``lr=0.1``, ``loss<0.5``, ``outcome=ok``, or a part
            of its name or note.
        sort: a setting, a metric or a column to sort by. Runs without it come last.
        is_down: sort from the highest to the lowest.
        current: the folder of this kernel's running run.

    Raises:
        ArgumentError: no run has a setting or metric of that name, or a word is no condition.
    """
    conditions = [*map(Condition.parse, words)]
    all_runs, left_out = _read_all(base, current)
    names = dict.fromkeys(name for run in all_runs for name in (*run.config, *run.last))
    compared = [condition.name for condition in conditions if condition.comparison]
    for name in filter(None, [*compared, sort]):
        if all_runs and name not in names and name not in (*COLUMNS, *SHORT_COLUMNS):
            available = list_some([*sorted(COLUMNS), *names], len(COLUMNS) + MAX_NAMED)
            raise ArgumentError(f"no run has {name!r}; the known names are: {available}")
    runs = [run for run in all_runs if all(condition.fits(run) for condition in conditions)]
    if sort:
        runs = _sorted(runs, sort, is_down=is_down)
    return Listing(tuple(runs), left_out, len(all_runs), sum(run.size for run in all_runs))


def write_note(path: Path, note: str) -> None:
    """Write the user's note about a run; an empty note removes it.

    Raises:
        RequestError: the note cannot be written.
    """
    with as_request_error(f"{path / NOTE_FILE} cannot be written"):
        write_atomic(path / NOTE_FILE, json.dumps({"note": note}) + "\n")


def remove(path: Path, *, current: Path | None) -> None:
    """Remove the folder of a run. The run may be damaged.

    Raises:
        RequestError: the run is still running, or the folder cannot be removed. Then the run stays
            in the list.
    """
    if path.is_symlink():
        raise RequestError(
            f"run {path.name} is a link: delete its folder {path.resolve()} and the link yourself"
        )
    is_live = current is not None and path.resolve() == current.resolve()
    with suppress(RequestError):  # a damaged run is not running
        is_live = is_live or summarize(path).is_live
    if is_live:
        raise RequestError(f"run {path.name} is still running: `%ddp stop` ends it")
    renamed = path.with_name(f".{path.name}.gone")  # a partly removed folder is no run
    try:
        path.rename(renamed)
        shutil.rmtree(renamed)
    except OSError as error:
        with suppress(OSError):
            renamed.rename(path)  # a hidden folder could not be deleted by a second try
        raise RequestError(f"run {path.name} cannot be deleted: {error.strerror}") from None


def _read_all(base: Path, current: Path | None) -> tuple[list[Summary], tuple[str, ...]]:
    folder, runs, left_out = base / ".nbddp" / "runs", list[Summary](), list[str]()
    inside = folder.iterdir() if folder.is_dir() else ()
    paths = [each for each in inside if each.is_dir() and not each.name.startswith(".")]
    resolved = {each.resolve() for each in paths}
    if current is not None and current.resolve() not in resolved:
        paths.append(current)  # it is elsewhere if the folder is read-only, or the user removed it
    for path in paths:
        try:
            runs.append(summarize(path, current=current))
        except RequestError as error:
            left_out.append(str(error))
    runs.sort(key=lambda run: (run.name[:15], run.began, run.name), reverse=True)
    return runs, tuple(sorted(left_out))


def _differ(values: Iterable[Any]) -> bool:
    return len(set(map(repr, values))) > 1


def _sorted(runs: Sequence[Summary], name: str, *, is_down: bool) -> list[Summary]:
    """Sort numbers before text. Runs without a value come last in both directions."""
    values = [(value_of(run, name), run) for run in runs]
    ordered = [(isinstance(value, str), value, run) for value, run in values if _has_order(value)]
    ordered.sort(key=lambda each: each[:2], reverse=is_down)
    return [*(run for *_, run in ordered), *(run for value, run in values if not _has_order(value))]


def _has_order(value: object) -> bool:
    return isinstance(value, str) or is_number(value)
