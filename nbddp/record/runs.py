"""Which runs there are on disk, and which of them is meant."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from nbddp.errors import RequestError

SHOWN = 8  # names in a message
LONGEST = 80  # of what was asked for, in a message
_STAMPED = re.compile(r"\d{8}-\d{6}-(.+)")
_NUMBER = re.compile(r"-\d{1,3}$")


def runs_below(base: Path) -> list[Path]:
    """The folders of the runs that were started in a folder, the newest first."""
    found = [path.parent for path in (base / ".nbddp" / "runs").glob("*/events.jsonl")]
    return sorted(found, key=_age, reverse=True)


def find_run(
    asked: str, base: Path, *, current: Path | None = None, takes_newest: bool = True
) -> Path:
    """The run of this name, or whose name has it in it, or that lies in this folder.

    A whole name, with the time before it or without, goes before a part of another one. A notebook
    that is run again starts its runs under the same names: the newest of them is meant.

    Args:
        asked: a name, a part of one, or a path; empty for the newest run.
        base: the folder that the runs were started in.
        current: the run of this kernel, wherever it lies: if there is one, it is the newest.
        takes_newest: of several of the same whole name; not where a run is taken away.

    Raises:
        RequestError: there is none, or several fit.
    """
    runs = [each for each in runs_below(base) if each != current]
    if current is not None:
        runs.insert(0, current)
    if asked and _is_run(Path(asked)):
        return Path(asked)
    if not runs:
        raise RequestError(f"there is no run below {base}: a `%%ddp` cell makes one")
    if not asked:
        return runs[0]
    fitting = (
        [each for each in runs if each.name == asked]
        or _called(asked, runs)[: 1 if takes_newest else None]
        or [each for each in runs if asked in each.name]
    )
    if not fitting:
        short = asked if len(asked) <= LONGEST else f"{asked[:LONGEST]}..."
        raise RequestError(f"there is no run {short!r}; the newest are: {_names(runs)}")
    if len(fitting) > 1:
        raise RequestError(f"{asked!r} fits {len(fitting)} runs: {_names(fitting)}")
    return fitting[0]


def run_asked_for(asked: str | None, base: Path, *, current: Path | None = None) -> Path:
    """The run of this name, as `find_run` finds it; the newest if none was written.

    Raises:
        RequestError: there is none, or the name is empty.
    """
    return find_run("" if asked is None else named(asked), base, current=current)


def named(asked: str) -> str:
    """What was written as a run's name.

    Raises:
        RequestError: it is empty, which could be taken for the newest run.
    """
    if not asked.strip():
        raise RequestError("an empty name names no run; `%ddp runs` lists them")
    return asked


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the time before them, where that tells them apart.

    >>> short_names(["20260102-030405-a", "20260102-030406-b", "20260102-030407-b"])
    ['a', '20260102-030406-b', '20260102-030407-b']
    """
    called = [found[1] if (found := _STAMPED.fullmatch(name)) else "" for name in names]
    counts = Counter(called)
    pairs = zip(names, called, strict=True)
    return [short if short and counts[short] == 1 else name for name, short in pairs]


def apart(paths: Iterable[Path]) -> list[Path]:
    """Each folder once, however it was named."""
    return list({path.resolve(): path for path in paths}.values())


def _is_run(path: Path) -> bool:
    try:
        return (path / "events.jsonl").is_file()
    except OSError:  # no folder can have such a name, or it cannot be looked into
        return False


def _called(asked: str, runs: list[Path]) -> list[Path]:
    """Those that were started under this very name.

    Of several that began in one second all but the first have a number behind it.
    """
    stamped = [(each, found[1]) for each in runs if (found := _STAMPED.fullmatch(each.name))]
    exact = {each.name for each, name in stamped if name == asked}
    return [each for each, _ in stamped if {each.name, _NUMBER.sub("", each.name)} & exact]


def _names(runs: list[Path]) -> str:
    return ", ".join(each.name for each in runs[:SHOWN]) + (", ..." if len(runs) > SHOWN else "")


def _age(run: Path) -> tuple[str, int]:
    """By the second in the name; in the same one, by when it was written last."""
    return run.name[: len("20260101-000000")], (run / "events.jsonl").stat().st_mtime_ns
