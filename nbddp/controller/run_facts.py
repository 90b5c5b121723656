"""Collect facts for ``run.json``: devices, totals, the global batch size, the state of git."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from nbddp.record.rank_monitor import RankMonitor
from nbddp.wire.messages import Ready

WRITE_INTERVAL = 10.0  # seconds between two writes while a cell runs


def known_facts(ready: Mapping[int, Ready], rank_monitor: RankMonitor) -> dict[str, Any]:
    """Return the known facts for ``run.json``. The file keeps the values of all others."""
    facts = rank_monitor.totals()
    if ready:
        ranks = [ready[rank] for rank in sorted(ready)]
        facts |= {
            "backend_used": ranks[0].backend,
            "devices": [each.device for each in ranks],
            "hosts": [each.host for each in ranks],
            "cores": ranks[0].cores,
            "threads": ranks[0].threads,
            "device_names": _device_names(ready, rank_monitor),
        }
    return facts


def _device_names(ready: Mapping[int, Ready], rank_monitor: RankMonitor) -> list[str]:
    """Return each rank's device name; empty for a GPU that no cell has used yet."""
    names = []
    for rank in sorted(ready):
        heartbeat = rank_monitor.hangs.heartbeats.get(rank)
        is_cpu = ready[rank].device == "cpu" and ready[rank].host == platform.node()
        names.append(processor() if is_cpu else heartbeat.status.gpu_name if heartbeat else "")
    return names


@cache
def processor() -> str:
    """Return the name of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


GIT_TIMEOUT = 5.0  # seconds for each git command
MAX_DIFF = 64 << 10  # characters of the diff to keep
MAX_CHANGED = 100  # names of changed files to keep
# without notebooks: their outputs are long, and the record has the cells that ran
_PATHS = ("--", ":/", ":(top,exclude)*.ipynb")
# git must not prompt for a password, and must not take locks
_GIT_ENV = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}

Callback = Callable[[dict[str, Any]], object]


def start_git_query(folder: Path, callback: Callback) -> None:
    """Query git about a folder on another thread, and pass the facts to ``callback``.

    If neither this folder nor a parent folder has a ``.git``, no thread is started.
    """
    # unlike Path.exists, this does not raise for a parent folder that this user cannot read
    if any(os.path.exists(each / ".git") for each in (folder, *folder.parents)):  # noqa: PTH110
        thread = threading.Thread(
            target=lambda: callback(git_origin(folder)), name="nbddp-git", daemon=True
        )
        thread.start()


def git_origin(folder: Path) -> dict[str, Any]:
    """Return commit, branch, whether tracked files are changed, and the diff, cut at 64 KiB.

    If some facts are unknown, ``error`` has the reason, such as a timeout or a missing git.
    """
    facts: dict[str, Any] = {}
    try:
        facts["commit"] = _run_git(folder, "rev-parse", "--verify", "HEAD").strip()
        facts["branch"] = _run_git(folder, "rev-parse", "--abbrev-ref", "HEAD").strip()
        changed = _run_git(folder, "diff", "--name-only", "-z", "HEAD").split("\0")[:-1]
        facts |= {"dirty": bool(changed), "changed": changed[:MAX_CHANGED]}
        if changed:
            diff = _run_git(folder, *_PLAIN_DIFF, "HEAD", *_PATHS)
            facts |= {"diff": diff[:MAX_DIFF], "diff_is_cut": len(diff) > MAX_DIFF}
    except (OSError, RuntimeError) as error:
        facts["error"] = str(error)
    return facts


_PLAIN_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short")


def _run_git(folder: Path, *arguments: str) -> str:
    """Return the output of a git command.

    Raises:
        OSError: git is not installed.
        RuntimeError: git failed or timed out.
    """
    try:
        answer = subprocess.run(
            ["git", "--no-pager", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_TIMEOUT,
            env={**os.environ, **_GIT_ENV},
            start_new_session=True,  # keeps the notebook's interrupt away
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"git {arguments[0]} took more than {GIT_TIMEOUT:g} s") from None
    if answer.returncode != 0:
        raise RuntimeError(f"git {arguments[0]} ended with code {answer.returncode}")
    return answer.stdout.decode(errors="replace")
