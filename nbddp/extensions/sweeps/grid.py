"""The combinations of a sweep, and which of them have a finished run."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import keyword
import math
import pickle
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from nbddp.errors import ArgumentError, RequestError
from nbddp.extensions.runs.comparison import SWEEP
from nbddp.extensions.runs.find import runs_below
from nbddp.record.cell import ReplayEntry
from nbddp.record.push_store import PushRecord
from nbddp.record.replay_log import SET_IN_EACH_RANK
from nbddp.record.run_folder import read_facts

SEED = "seed"
MAX_SEED = 2**32 - 1  # NumPy's
MAX_COMBINATIONS = 1000  # a typing error must not start a night of runs

Swept = tuple[str, tuple[Any, ...]]  # a name, and its values


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One combination of a sweep; ``number`` counts from 1."""

    number: int
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())

    @property
    def name(self) -> str:
        """A part of the name of its run.

        >>> SweepPoint(1, {"lr": 0.1, "model": "cnn", "batch": 16}).name
        'lr0.1-model-cnn-batch16'
        """
        return "-".join(
            f"{name}{value}" if type(value) in (int, float) else f"{name}-{value}"
            for name, value in self.settings.items()
        )

    @property
    def config(self) -> dict[str, Any]:
        """The settings for ``run.json``, with the repr of values that JSON cannot hold."""
        return {
            name: value if value is None or isinstance(value, str | int | float) else repr(value)
            for name, value in self.settings.items()
        }


class SweepState(Enum):
    """The state of a combination."""

    WAITING = "waiting"
    RUNNING = "running"
    OK = "ok"
    ALREADY_DONE = "ok, done before"
    FAILED = "failed"
    ENDED = "ended"

    @property
    def is_done(self) -> bool:
        """Whether its run can be compared with other runs."""
        return self in (SweepState.OK, SweepState.ALREADY_DONE)


@dataclass(slots=True)
class SweepEntry:
    """A combination and its state.

    Attributes:
        why: the reason of a failure.
        path: the folder of its run; None if there is none.
        seconds: duration, including the start; 0 if it did not run now.
    """

    trial: SweepPoint
    state: SweepState = SweepState.WAITING
    why: str = ""
    path: Path | None = None
    seconds: float = 0.0


def count_in(rows: Iterable[SweepEntry], *states: SweepState) -> int:
    """Count the entries in these states."""
    return sum(row.state in states for row in rows)


def sweep_points(sweeps: Iterable[tuple[str, Iterable[Any]]], repeat: int = 0) -> list[SweepPoint]:
    """Return all combinations; the last name changes fastest.

    Args:
        sweeps: names and their values.
        repeat: number of seeds, from 0, for each combination; 0 for no seed.

    Raises:
        ArgumentError: a name is invalid or given twice, or there are too many combinations.

    >>> [str(each) for each in sweep_points([("lr", (0.1, 0.01))], repeat=2)]
    ['lr=0.1, seed=0', 'lr=0.1, seed=1', 'lr=0.01, seed=0', 'lr=0.01, seed=1']
    """
    requested = [*sweeps, *([(SEED, range(repeat))] if repeat else [])]
    swept = [(name, _values(name, values)) for name, values in requested]
    names = [name for name, _ in swept]
    for name, values in swept:
        _check_swept_name(name, values)
        if names.count(name) > 1:
            hint = "repeat sets its values" if repeat else "give all its values at once"
            raise ArgumentError(f"{name} is swept twice: {hint}")
    count = math.prod(len(values) for _, values in swept) if swept else 0
    if not 1 <= count <= MAX_COMBINATIONS:
        raise ArgumentError(f"a sweep takes 1 to {MAX_COMBINATIONS} combinations, got {count}")
    combinations = itertools.product(*(values for _, values in swept))
    return [
        SweepPoint(number, dict(zip(names, values, strict=True)))
        for number, values in enumerate(combinations, start=1)
    ]


def _values(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ArgumentError(f"{name} needs a list of values, got {values!r}")
    return tuple(values)


def _check_swept_name(name: str, values: Sequence[Any]) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or not values:
        raise ArgumentError(f"expected a Python name and its values, got {name}={values!r}")
    if name in SET_IN_EACH_RANK:
        raise ArgumentError(f"{name} is set by nbddp in each rank; sweep another name")
    for seed in values if name == SEED else ():
        if type(seed) is not int or not 0 <= seed <= MAX_SEED:
            raise ArgumentError(
                f"expected whole numbers from 0 to {MAX_SEED} for seed, which seeds torch, NumPy "
                f"and random, got {seed!r}"
            )


def sweep_key(source: str, entries: Sequence[ReplayEntry], *options: object) -> str:
    """Return a text that is equal for sweeps with the same results for each combination.

    Args:
        source: the source of the cell.
        entries: replayed before the cell.
        options: other values that change results, such as the number of ranks.
    """
    parts = (repr(options), source, *map(_entry_key, entries))
    return _hash("".join(f"{len(part)}:{part}" for part in parts).encode())


def _entry_key(entry: ReplayEntry) -> str:
    if not isinstance(entry, PushRecord):
        return repr((entry.source, entry.ranks))
    try:
        values = value_key(entry.data())
    except RequestError:  # not stored: the replay reports that
        values = ""
    return repr((entry.names, entry.ranks, values))


def value_key(data: bytes, *, if_plain: str | None = None) -> str:
    """Return a text that is equal for equal pickled values.

    Values with an exact repr are compared by that text. The pickles of other values, such as
    functions and tensors, are comparable only in this process.

    Args:
        data: the pickle.
        if_plain: the result for values with an exact repr, instead of the repr.

    >>> value_key(pickle.dumps({"lr": 0.1}))
    "{'lr': 0.1}"
    """
    try:
        text = repr(_PlainUnpickler(io.BytesIO(data)).load())
    except (pickle.UnpicklingError, ValueError):  # ValueError for integers with too many digits
        return f"{_PROCESS} {_hash(data)}"
    return text if if_plain is None else if_plain


class _PlainUnpickler(pickle.Unpickler):
    """Loads numbers, text, and containers of them."""

    def find_class(self, module: str, name: str) -> Any:
        """Reject any other object."""
        raise pickle.UnpicklingError(f"{module}.{name}")


_PROCESS = uuid.uuid4().hex


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def run_json_entry(key: str, trial: SweepPoint, of: int, *, is_done: bool) -> dict[str, Any]:
    """Return the entry of a combination in ``run.json``."""
    sweep = {"key": key, "settings": trial.config, "number": trial.number, "of": of}
    return {SWEEP: {**sweep, "is_done": is_done}}


def completed_runs(base: Path, key: str, trials: Sequence[SweepPoint]) -> dict[int, Path]:
    """Map the number of each completed combination to its newest finished run.

    ``key``: runs of other sweeps below ``base`` have another key.
    """
    by_settings = {_as_json(trial.config): trial.number for trial in trials}
    found: dict[int, Path] = {}
    for path in runs_below(base):
        sweep = read_facts(path).get(SWEEP)
        if not isinstance(sweep, dict) or sweep.get("key") != key or not sweep.get("is_done"):
            continue
        number = by_settings.get(_as_json(sweep.get("settings")))
        if number is not None:
            found.setdefault(number, path)
    return found


def _as_json(settings: object) -> str:
    return json.dumps(settings, sort_keys=True)
