"""Which runs there are on disk, and which of them is meant."""

from __future__ import annotations

from pathlib import Path

from nbddp.errors import RequestError

SHOWN = 8  # names in a message


def runs_below(base: Path) -> list[Path]:
    """The folders of the runs that were started in a folder, the newest first."""
    found = [path.parent for path in (base / ".nbddp" / "runs").glob("*/events.jsonl")]
    return sorted(found, key=_age, reverse=True)


def find_run(asked: str, base: Path, *, current: Path | None = None) -> Path:
    """The run of this name, or whose name has it in it, or that lies in this folder.

    Args:
        asked: a name, a part of one, or a path; empty for the newest run.
        base: the folder that the runs were started in.
        current: the run of this kernel, wherever it lies: if there is one, it is the newest.

    Raises:
        RequestError: there is none, or several fit.
    """
    runs = [each for each in runs_below(base) if each != current]
    if current is not None:
        runs.insert(0, current)
    if asked and (Path(asked) / "events.jsonl").is_file():
        return Path(asked)
    if not runs:
        raise RequestError(f"there is no run below {base}: a `%%ddp` cell makes one")
    if not asked:
        return runs[0]
    fitting = [each for each in runs if each.name == asked] or [
        each for each in runs if asked in each.name
    ]
    if not fitting:
        raise RequestError(f"there is no run {asked!r}; the newest are: {_names(runs)}")
    if len(fitting) > 1:
        raise RequestError(f"{asked!r} fits {len(fitting)} runs: {_names(fitting)}")
    return fitting[0]


def _names(runs: list[Path]) -> str:
    return ", ".join(each.name for each in runs[:SHOWN]) + (", ..." if len(runs) > SHOWN else "")


def _age(run: Path) -> tuple[str, int]:
    """By the second in the name; in the same one, by when it was written last."""
    return run.name[: len("20260101-000000")], (run / "events.jsonl").stat().st_mtime_ns
