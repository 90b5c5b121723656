"""Where the code of a run comes from: git is asked, in the background, and never waited for."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 5.0  # seconds for each question
MAX_DIFF = 64 << 10  # characters of the diff that are kept
MAX_CHANGED = 100  # names of changed files
# notebooks are left out: their outputs are long, and the cells that ran are in the record
_PATHS = ("--", ":/", ":(top,exclude)*.ipynb")

Tell = Callable[[dict[str, Any]], object]


def begin_to_ask(folder: Path, tell: Tell) -> None:
    """Have ``tell`` called with what git says of a folder, on another thread, or never.

    Where there is no repository, nothing is started.
    """
    if has_repository(folder):
        asking = threading.Thread(
            target=lambda: tell(origin(folder)), name="nbddp-git", daemon=True
        )
        asking.start()


def has_repository(folder: Path) -> bool:
    """Whether this folder, or one that it lies in, has a ``.git``; nothing is started for it."""
    return any(map(_is_there, (each / ".git" for each in (folder, *folder.parents))))


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder above that is not for us
        return False


def origin(folder: Path) -> dict[str, Any]:
    """Commit, branch, whether tracked files are changed, and the diff, cut at 64 KiB.

    ``error`` says why what is missing is not known: it took too long, or git is not there.
    """
    facts: dict[str, Any] = {}
    try:
        facts["commit"] = _ask(folder, "rev-parse", "--verify", "HEAD").strip()
        facts["branch"] = _ask(folder, "rev-parse", "--abbrev-ref", "HEAD").strip()
        changed = _ask(folder, "diff", "--name-only", "-z", "HEAD").split("\0")[:-1]
        facts |= {"dirty": bool(changed), "changed": changed[:MAX_CHANGED]}
        if changed:
            diff = _ask(folder, *_PLAIN_DIFF, "HEAD", *_PATHS)
            facts |= {"diff": diff[:MAX_DIFF], "diff_is_cut": len(diff) > MAX_DIFF}
    except (OSError, RuntimeError) as error:
        facts["error"] = str(error)
    return facts


_PLAIN_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short")


def _ask(folder: Path, *question: str) -> str:
    """Return what git answers.

    Raises:
        OSError: there is no git.
        RuntimeError: it refused, or it took too long and was ended.
    """
    try:
        answer = subprocess.run(
            ["git", "--no-pager", "-c", "core.fsmonitor=false", "-C", str(folder), *question],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT,
            env=_environment(),
            start_new_session=True,  # else the notebook's stop button would reach it
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"git {question[0]} took more than {LIMIT:g} s") from None
    if answer.returncode != 0:
        raise RuntimeError(f"git {question[0]} ended with code {answer.returncode}")
    return answer.stdout.decode(errors="replace")


def _environment() -> dict[str, str]:
    """The kernel's, by which git asks nobody for a password, and takes no lock."""
    return {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
