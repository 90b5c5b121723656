"""The folder of a run, ``.nbddp/runs/<time>-<name>/``; only its owner can read it.

docs/files.md describes its files and the fields of ``run.json``.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from nbddp.errors import StartError
from nbddp.private_files import make_private_folders, open_private_file, open_private_folder

FORMAT = 2  # of ``run.json``
MAX_NAME = 60  # characters of a name
MAX_NAME_BYTES = 220  # in UTF-8; file systems allow 255, with the time and a number


def new_facts(facts: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the facts of ``run.json`` before the first event; ``facts`` are known already."""
    counts = {"restarts": 0, "heals": 0, "failures": 0, "seconds_lost": 0.0}
    first: dict[str, Any] = {"format": FORMAT, "outcome": "", "config": {}}
    return {**first, **counts, **facts, "format": FORMAT}


def to_text(facts: Mapping[str, Any]) -> str:
    """Return the facts as JSON, one line for each fact: readable, and fast to write."""
    rate, batch = facts.get("steps_per_second"), facts.get("samples_per_step")
    if rate and batch:
        facts = {**facts, "samples_per_second": round(rate * batch, 3)}
    lines = [
        f"{json.dumps(name)}: {json.dumps(value, default=str)}" for name, value in facts.items()
    ]
    return "{" + ",\n ".join(lines) + "}\n"


def read_facts(path: Path, file: str = "run.json") -> dict[str, Any]:
    """Return the facts in a JSON file of a run folder; empty if it cannot be read."""
    try:
        facts = json.loads((path / file).read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def facts_of_start() -> dict[str, Any]:
    """Return the facts that are known at the start of a run."""
    return {
        "started": iso_time(time.time()),
        "started_by": _program_name(),
        "host": platform.node(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("nbddp", "torch", "ipykernel")},
    }


def iso_time(at: float) -> str:
    """Return a ``time.time()`` as text."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(at))


def _program_name() -> str:
    """Return the file name of this process's notebook or script; empty if unknown."""
    main = sys.modules.get("__main__")
    found = (  # a script may inherit the environment of a notebook
        getattr(main, "__file__", None)
        or getattr(main, "__vsc_ipynb_file__", None)
        or os.environ.get("JPY_SESSION_NAME", "")
    )
    return Path(str(found)).name


def _version(package: str) -> str:
    with suppress(ImportError):
        return version(package)
    return ""


# ---- files and folders


def create_run_folder(base: Path, name: str, notify: Callable[[str], None]) -> tuple[Path, int]:
    """Create a run folder below ``base`` or, if that fails, in a temporary folder.

    Return it with the descriptor of its ``events.jsonl``.

    Args:
        base: the folder of the notebook.
        name: a part of the folder's name.
        notify: gets a message if the folder is not below ``base``.

    Raises:
        StartError: no folder can be created.
    """
    try:
        return _create_folder(base, (".nbddp", "runs"), folder_name(name))
    except OSError as error:
        refused = error.strerror
    try:
        elsewhere = f"nbddp-runs-{secrets.token_hex(8)}"
        path, events = _create_folder(Path(tempfile.gettempdir()), (elsewhere,), folder_name(name))
    except OSError as error:
        raise StartError(
            f"the run cannot be recorded, neither in {base} ({refused}) nor in a temporary "
            f"folder ({error.strerror}); free disk space, or start in another folder"
        ) from None
    notify(f"{base} cannot be used for the run ({refused}); the logs are in {path}")
    return path, events


def open_events(folder: Path) -> int:
    """Open ``events.jsonl`` to append events; return the descriptor."""
    return open_private_file(folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for its owner only, and move it to ``path`` at the end.

    Readers see the old file or the new file. If a write fails, the old file stays.

    Raises:
        OSError: the file cannot be written, or other users can change the folder.
    """
    draft, flags = f"{path.name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open_private_folder(path.parent) as folder:
        try:
            with os.fdopen(os.open(draft, flags, 0o600, dir_fd=folder), "wb") as file:
                yield file
            os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise


def write_atomic(path: Path, text: str) -> None:
    """Write a text by :func:`replace_file`.

    Raises:
        OSError: the file cannot be written.
    """
    with replace_file(path) as file:
        file.write(text.encode())


def _create_folder(base: Path, names: tuple[str, ...], name: str) -> tuple[Path, int]:
    """Create a new run folder. Return it with the descriptor of its ``events.jsonl``."""
    runs = make_private_folders(base, *names)
    if runs.parent.name == ".nbddp":
        with suppress(FileExistsError), (runs.parent / ".gitignore").open("x") as ignore:
            ignore.write("*\n")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for count in range(1000):
        path = runs / "-".join(filter(None, (stamp, name, str(count) if count else "")))
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path, open_events(path)
    raise FileExistsError(17, f"1000 runs started in the second {stamp}")


def folder_name(name: str) -> str:
    """Return a name with the characters that a folder name allows: letters of all scripts, ``_.-``.

    >>> folder_name("lr 0.1"), folder_name("lr0.1"), folder_name("été/1")
    ('lr-0.1', 'lr0.1', 'été-1')
    """
    text = unicodedata.normalize("NFC", name)  # é may be two characters
    words = "".join(each if _is_kept(each) else " " for each in text).split()
    cut = "-".join(words).strip("-.")[:MAX_NAME]
    return cut.encode()[:MAX_NAME_BYTES].decode(errors="ignore")


def _is_kept(char: str) -> bool:
    """Return whether a character is a letter, the mark of a letter, a digit, or one of ``_.-``."""
    return char in "_.-" or unicodedata.category(char)[0] in "LMN"
