"""What a sweep tries, one combination after the other, and which of them are on disk already."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from nbddp.archive.find import runs_below
from nbddp.archive.sameness import digest, digest_of
from nbddp.errors import ArgumentError, RequestError
from nbddp.record.cell import Deed
from nbddp.record.folder import read_facts
from nbddp.record.push_store import PushRecord

SEED = "seed"
MOST = 1000  # combinations: a typing error must not fill a night
SWEEP = "sweep"  # in ``run.json``

Swept = tuple[str, tuple[Any, ...]]  # a name, and its values


@dataclass(frozen=True, slots=True)
class Trial:
    """One combination of a sweep; ``number`` is from 1."""

    number: int
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())

    @property
    def name(self) -> str:
        """For its run's folder.

        >>> Trial(1, {"lr": 0.1, "model": "cnn", "batch": 16}).name
        'lr0.1-model-cnn-batch16'
        """
        return "-".join(
            f"{name}{value}" if _is_number(value) else f"{name}-{value}"
            for name, value in self.settings.items()
        )

    @property
    def config(self) -> dict[str, Any]:
        """As ``nbddp.config`` has it: what is no plain value as it is written."""
        return {
            name: value if value is None or isinstance(value, str | int | float) else repr(value)
            for name, value in self.settings.items()
        }


class State(Enum):
    """How far a combination is, in words."""

    WAITING = "waiting"
    RUNNING = "running"
    OK = "ok"
    BEFORE = "ok, done before"
    FAILED = "failed"
    ENDED = "ended"

    @property
    def is_done(self) -> bool:
        """Whether its run can be compared with others."""
        return self in (State.OK, State.BEFORE)


@dataclass(slots=True)
class Row:
    """A combination, and what has come of it.

    Attributes:
        why: for a failure what it was.
        path: its run's folder, None if there is none.
        seconds: that it took, with its start; 0 if it was not run now.
    """

    trial: Trial
    state: State = State.WAITING
    why: str = ""
    path: Path | None = None
    seconds: float = 0.0


def count_of(rows: Iterable[Row], *states: State) -> int:
    """How many are in one of these states."""
    return sum(row.state in states for row in rows)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def grid(sweeps: Sequence[Swept], repeat: int = 0) -> list[Trial]:
    """Every combination, the last name the fastest.

    Args:
        sweeps: names and their values.
        repeat: how many seeds, from 0, each is tried with; 0 for no seed.

    Raises:
        ArgumentError: a name is there twice, or there are too many.

    >>> [str(each) for each in grid([("lr", (0.1, 0.01))], repeat=2)]
    ['lr=0.1, seed=0', 'lr=0.1, seed=1', 'lr=0.01, seed=0', 'lr=0.01, seed=1']
    """
    swept = [*sweeps, *([(SEED, tuple(range(repeat)))] if repeat else [])]
    names = [name for name, _ in swept]
    for name in names:
        if names.count(name) > 1:
            twice = "--repeat sets it" if name == SEED and repeat else "give all its values at once"
            raise ArgumentError(f"--sweep {name}: it is swept already; {twice}")
    count = 1
    for _, values in swept:
        count *= len(values)
    if count > MOST:
        raise ArgumentError(f"a sweep has up to {MOST} combinations, these are {count}")
    combinations = itertools.product(*(values for _, values in swept))
    return [
        Trial(number, dict(zip(names, values, strict=True)))
        for number, values in enumerate(combinations, start=1)
    ]


def key_of(source: str, deeds: Sequence[Deed], *options: object) -> str:
    """What two sweeps have in common whose combinations are worth the same.

    Args:
        source: of the cell.
        deeds: what is done before it: other definitions make other results.
        options: what else counts, such as how many ranks there are.
    """
    parts = (repr(options), source, *map(_said, deeds))
    return digest("".join(f"{len(part)}:{part}" for part in parts).encode())


def _said(deed: Deed) -> str:
    if not isinstance(deed, PushRecord):
        return repr((deed.source, deed.ranks))
    try:
        data = deed.data()
    except RequestError:  # it is not there any more, which the replay will say
        return repr((deed.names, deed.ranks))
    try:
        values = digest_of(pickle.loads(data))  # made in this very process
    except Exception:  # noqa: BLE001 - of what cannot be opened the bytes must do
        values = digest(data)
    return repr((deed.names, deed.ranks, values))


def facts_of(key: str, trial: Trial, of: int, *, is_done: bool) -> dict[str, Any]:
    """What a run's ``run.json`` says of the combination that it is."""
    sweep = {"key": key, "settings": trial.config, "number": trial.number, "of": of}
    return {SWEEP: {**sweep, "is_done": is_done}}


def done_before(base: Path, key: str, trials: Sequence[Trial]) -> dict[int, Path]:
    """By number, the newest run of each combination that has come to its end."""
    by_settings = {_json(trial.config): trial.number for trial in trials}
    found: dict[int, Path] = {}
    for path in runs_below(base):
        sweep = read_facts(path).get(SWEEP)
        if not isinstance(sweep, dict) or sweep.get("key") != key or not sweep.get("is_done"):
            continue
        number = by_settings.get(_json(sweep.get("settings")))
        if number is not None:
            found.setdefault(number, path)
    return found


def _json(settings: object) -> str:
    return json.dumps(settings, sort_keys=True)
