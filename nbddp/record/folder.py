"""The record of a run on disk, in ``.nbddp/runs/<time>-<name>/``, for its owner only."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import secrets
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nbddp.errors import StartError
from nbddp.record.description import Description
from nbddp.record.log_reader import end_of, log_name

LAST_WORDS = 2000  # characters
MAX_NAME = 60  # characters of a name


class RunFolder:
    """Where a worker group's logs and events are; lives from its start to its stop.

    ``run.json`` says what was run, with what, and what came of it, ``events.jsonl`` what happened,
    ``rank{r}.log`` holds what each rank wrote, all attempts one after the other.

    Args:
        base: where to make it.
        name: a part of its own name.
        is_there: whether ``base`` is the folder itself, of a run that goes on.

    Raises:
        StartError: there is no room for it anywhere.
    """

    def __init__(self, base: Path, name: str = "", *, is_there: bool = False) -> None:
        self.remark = ""
        self._has_complained = False
        self._described = 0.0  # in ``time.monotonic()``
        self._is_torn = False
        if is_there:
            self.path, self._events = base, _open_private(base / "events.jsonl", os.O_APPEND)
        else:
            self.path, self._events = self._make(base, folder_name(name))
        known = read_facts(self.path) if is_there else _facts_of_start()
        self.description = Description(known)

    def log(self, rank: int) -> Path:
        """The file of a rank's output."""
        return self.path / log_name(rank)

    def size_of_log(self, rank: int) -> int:
        """How many bytes a rank has written."""
        try:
            return self.log(rank).stat().st_size
        except OSError:  # it has written nothing, or somebody deleted it
            return 0

    def describe(self, **facts: Any) -> str:
        """Write ``run.json`` with all that is known, and these facts; the old one, or this one."""
        self.description.add(facts)
        self._described = time.monotonic()
        try:
            write_whole(self.path / "run.json", _a_line_each(self.description.facts()))
        except OSError as error:
            return self._complain(error)
        return ""

    def seconds_since_described(self) -> float:
        """How long ago ``run.json`` was written."""
        return time.monotonic() - self._described

    def event(self, kind: str, /, **facts: Any) -> str:
        """Append one line to ``events.jsonl``; returns what to tell the user if that fails."""
        self.description.note(kind, facts)
        line = json.dumps(facts | {"time": round(time.time(), 3), "kind": kind})
        data = ("\n" * self._is_torn + f"{line}\n").encode()
        try:
            self._is_torn = os.write(self._events, data) < len(data)
            if self._is_torn:  # a full disk took a part of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            return self._complain(error)
        return ""

    def _complain(self, error: OSError) -> str:
        """Once: a record that cannot be written must not end a training."""
        has_complained, self._has_complained = self._has_complained, True
        if has_complained:
            return ""
        return f"the record in {self.path} is not complete: {error.strerror}"

    def close(self) -> None:
        """Nothing more will happen."""
        with suppress(OSError):  # what a full disk could not take was told when it was written
            os.close(self._events)

    def last_words(self, rank: int) -> str:
        """The end of a rank's log, as far as it can be read."""
        try:
            return end_of(self.log(rank), 4 * LAST_WORDS)[0][-LAST_WORDS:]
        except OSError:
            return ""

    def _make(self, base: Path, name: str) -> tuple[Path, int]:
        """Make the folder of the run below ``base``, or else in a temporary folder."""
        try:
            return _begin(base / ".nbddp" / "runs", name)
        except OSError as error:
            refused = error.strerror
        try:
            elsewhere = Path(tempfile.gettempdir()) / f"nbddp-runs-{secrets.token_hex(8)}"
            path, events = _begin(elsewhere, name)
        except OSError as error:
            raise StartError(
                f"the run cannot be recorded, neither in {base} ({refused}) nor in a temporary "
                f"folder ({error.strerror}); make room, or start in another folder"
            ) from None
        self.remark = f"{base} cannot be written ({refused}); the logs are in {path}"
        return path, events


def read_facts(path: Path) -> dict[str, Any]:
    """What the ``run.json`` of a run's folder says; nothing where that cannot be read."""
    try:
        facts = json.loads((path / "run.json").read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _a_line_each(facts: dict[str, Any]) -> str:
    """As JSON that one can read, and that is written in no time."""
    lines = [f"{json.dumps(name)}: {json.dumps(its, default=str)}" for name, its in facts.items()]
    return "{" + ",\n ".join(lines) + "}\n"


def _facts_of_start() -> dict[str, Any]:
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "pid": os.getpid(),
        "started_by": _program(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("nbddp", "torch", "ipykernel")},
    }


def _program() -> str:
    """Return the file name of this process's notebook or script; empty if it is not known."""
    main = sys.modules.get("__main__")
    found = (  # a script may have inherited the environment of a notebook
        getattr(main, "__file__", None)
        or getattr(main, "__vsc_ipynb_file__", None)
        or os.environ.get("JPY_SESSION_NAME", "")
    )
    return Path(str(found)).name


def write_whole(path: Path, text: str) -> None:
    """Write a file that only its owner reads: the old one is there, or this one.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f"{path.name}.tmp")
    try:
        with os.fdopen(_open_private(draft, os.O_TRUNC), "w") as file:
            file.write(text)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def _open_private(path: Path, flag: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)


def _begin(runs: Path, name: str) -> tuple[Path, int]:
    """Make a new folder; return it with the descriptor of its ``events.jsonl``."""
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    if runs.parent.name == ".nbddp":
        with suppress(FileExistsError), (runs.parent / ".gitignore").open("x") as ignore:
            ignore.write("*\n")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for count in range(1000):
        path = runs / "-".join(filter(None, (stamp, name, str(count) if count else "")))
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path, _open_private(path / "events.jsonl", os.O_APPEND)
    raise FileExistsError(17, f"1000 runs began in the second {stamp}")


def folder_name(name: str) -> str:
    """A name as the folder of a run gets it, whatever was asked for.

    >>> folder_name("lr 0.1"), folder_name("lr0.1")
    ('lr-0.1', 'lr0.1')
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:MAX_NAME]


def _version(package: str) -> str:
    with suppress(ImportError):
        return version(package)
    return ""
