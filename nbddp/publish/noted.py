"""That a run was published, noted in its folder: it is not published there twice unasked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError
from nbddp.record.run_folder import write_whole


def note(folder: Path, kind: str, *, name: str, is_whole: bool = False, **facts: Any) -> None:
    """Write down where it is; whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    said = {"name": name, "is_whole": is_whole, **facts}
    write_whole(_path(folder, kind), json.dumps(said) + "\n")


def read_note(folder: Path, kind: str) -> dict[str, Any]:
    """What was noted; empty if nothing was published there."""
    try:
        said = json.loads(_path(folder, kind).read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def name_there(folder: Path, kind: str, *, is_again: bool) -> str:
    """What a run is called in a tracker: like its folder; once more, with a number behind it.

    Raises:
        RequestError: it is there already.
    """
    before = read_note(folder, kind)
    if not before:
        return folder.name
    if not is_again:
        how = "is" if before.get("is_whole") else "began to be"
        raise RequestError(
            f"run {folder.name} {how} published to {kind} already ({before.get('where', '?')}); "
            "--again makes another run of it there"
        )
    begin, dash, number = str(before.get("name", "")).rpartition("-again")
    is_numbered = bool(dash) and begin == folder.name and number.isdecimal()
    return f"{folder.name}-again{int(number) + 1 if is_numbered else 2}"


def _path(folder: Path, kind: str) -> Path:
    return folder / f"published-{kind}.json"
