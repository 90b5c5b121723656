"""Find a run on disk by its path or name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from nbddp.errors import RequestError
from nbddp.formatting import list_some
from nbddp.record.run_folder import folder_name

MAX_SHOWN_NAMES = 8  # names in a message
MAX_SHOWN_CHARS = 80  # characters of the requested name in a message
_NUMBER = re.compile(r"-\d{1,3}$")
_STAMP = re.compile(r"\d{8}-\d{6}-")


def runs_below(base: Path) -> list[Path]:
    """Return the folders of the runs that were started in a folder, newest first."""
    runs = [path.parent for path in (base / ".nbddp" / "runs").glob("*/events.jsonl")]
    # by the second in the name; within a second, by the last change
    seconds = len("20260101-000000")
    runs.sort(key=lambda run: (run.name[:seconds], (run / "events.jsonl").stat().st_mtime_ns))
    return runs[::-1]


def find_run(
    name: str | None, base: Path, *, current: Path | None = None, is_unique: bool = False
) -> Path:
    """Find a run by its path, its full name (with or without its time), or a part of its name.

    If several match, return the newest: a notebook that runs again starts runs with the same names.

    Args:
        name: the path or name; None for the newest run.
        base: the folder in which the runs were started.
        current: the folder of this kernel's running run. It counts as the newest.
        is_unique: reject a name that matches several runs.

    Raises:
        RequestError: no run matches, several match with ``is_unique``, or the name is empty.
    """
    if name is not None and not name.strip():
        raise RequestError("the name of a run is empty; `%ddp runs` lists the names")
    with suppress(OSError):  # an invalid folder name, or an unreadable folder
        if name is not None and (Path(name) / "events.jsonl").is_file():
            return Path(name)
    runs = [run for run in runs_below(base) if run != current]
    if current is not None:
        runs.insert(0, current)
    if not runs:
        raise RequestError(f"there is no run below {base}: a `%%ddp` cell makes one")
    if name is None:
        return runs[0]
    matching = _named(name, runs) or [run for run in runs if is_in_name(name, run.name)]
    if not matching:
        shortened = name if len(name) <= MAX_SHOWN_CHARS else f"{name[:MAX_SHOWN_CHARS]}..."
        raise RequestError(f"there is no run {shortened!r}; the newest are: {_list_names(runs)}")
    if is_unique and len(matching) > 1:
        raise RequestError(f"{name!r} matches {len(matching)} runs: {_list_names(matching)}")
    return matching[0]


def matching_runs(name: str, runs: list[Path]) -> list[Path]:
    """Return the runs of exactly this full name, else those with this part in their name."""
    exact = [run for run in runs if run.name == name]
    return exact or [run for run in runs if is_in_name(name, run.name)]


def is_in_name(text: str, name: str) -> bool:
    """Return whether a text is a part of a run's name, as it is or as ``--name`` changes it.

    >>> is_in_name("lr 0.1", "20260102-030405-lr-0.1"), is_in_name("?", "20260102-030405")
    (True, False)
    >>> is_in_name(70 * "long", "20260102-030405-" + folder_name(70 * "long"))
    True
    """
    return text in name or (folder_name(text) or text) in name


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names without their times if they still differ.

    >>> short_names(["20260102-030405-a", "20260102-030406-b", "20260102-030407-b"])
    ['a', '20260102-030406-b', '20260102-030407-b']
    """
    shorts = [*map(_without_stamp, names)]
    counts = Counter(shorts)
    pairs = zip(names, shorts, strict=True)
    return [short if counts[short] == 1 else name for name, short in pairs]


def unique_folders(paths: Iterable[Path]) -> list[Path]:
    """Return each folder once, even if it was given by several paths."""
    return list({path.resolve(): path for path in paths}.values())


def _named(name: str, runs: list[Path]) -> list[Path]:
    """Return the runs of exactly this name, with or without its time."""
    texts = {name, folder_name(name)}
    names = {run.name for run in runs if texts & {run.name, _without_stamp(run.name)}}
    if not texts & names:  # runs of the same second have a number, except the first
        names |= {run.name for run in runs if _NUMBER.sub("", run.name) in names}
    return [run for run in runs if run.name in names]


def _without_stamp(name: str) -> str:
    return name[stamp.end() :] if (stamp := _STAMP.match(name)) else name


def _list_names(runs: list[Path]) -> str:
    return list_some([run.name for run in runs], MAX_SHOWN_NAMES)
