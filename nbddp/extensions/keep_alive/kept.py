"""Find the agents that keep ranks alive on this machine. Only the processes know: no file does."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from nbddp.errors import RequestError
from nbddp.extensions.nodes.join_file import FOLDER
from nbddp.extensions.nodes.stale_files import is_locked
from nbddp.extensions.runs.find import matching_runs
from nbddp.extensions.runs.kept_ranks import KeptRanks, kept_ranks
from nbddp.formatting import MAX_SHOWN, list_some

_LOG = re.compile(r"rank\d+\.log")


def ranks_of_agents() -> list[KeptRanks]:
    """Return the kept ranks of this user and home folder on this machine."""
    found: list[KeptRanks] = []
    for process in psutil.process_iter(["cmdline", "uids"]):
        words = process.info["cmdline"] or []
        # torchrun is the parent of the agent, and has the same words
        is_agent = "nbddp.nodes" in words and "--keep" in words
        if is_agent and "torch.distributed.run" not in words and _is_own(process):
            with suppress(psutil.Error, OSError):  # it is ending
                found += _ranks_of(process, words)
    return found


def _is_own(process: psutil.Process) -> bool:
    uids = process.info["uids"]
    return uids is not None and uids.real == os.getuid()


def _ranks_of(agent: psutil.Process, words: Sequence[str]) -> Iterator[KeptRanks]:
    join_file = Path(words[words.index("--join") + 1])
    if join_file.parent != Path.home() / FOLDER:
        return
    [seconds] = [float(word.partition("=")[2]) for word in words if "--orphan-timeout=" in word]
    family = agent.children(recursive=True)
    logs = {path for process in family for path in _logs_of(process)}
    if logs:
        has_notebook = is_locked(join_file)
        remaining = join_file.stat().st_mtime + seconds - time.time()
        memory = sum(_memory(process) for process in [agent, *family])
        yield KeptRanks(
            run=next(iter(logs)).parent,
            agent=agent,
            join_file=join_file,
            has_notebook=has_notebook,
            seconds=seconds,
            remaining=max(0.0, remaining),
            count=len(logs),
            memory=memory,
        )


def _logs_of(process: psutil.Process) -> list[Path]:
    with suppress(psutil.Error):
        paths = [Path(each.path) for each in process.open_files()]
        return [path for path in paths if _LOG.fullmatch(path.name)]
    return []


def _memory(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        info = process.memory_full_info()
        return int(getattr(info, "pss", info.uss))  # memory that ranks share counts once
    return 0


def find_kept(name: str | None) -> KeptRanks:
    """Return the kept ranks of the run with this name or path, or with this part in its name.

    Those without a notebook come first. Without a name, they are the only ones.

    Raises:
        RequestError: there are none, or several.
    """
    kept = kept_ranks()
    runs = [*kept]
    if name:
        runs = [run for run in runs if str(run) == name] or matching_runs(name, runs)
    waiting = [run for run in runs if not kept[run].has_notebook]
    matching = waiting or (runs if name else [])
    if len(matching) == 1:
        return kept[matching[0]]
    if not matching:
        what = f"run {name!r}" if name else "a notebook that has ended"
        shown = _list_runs([*kept]) if kept else "none"
        raise RequestError(f"no ranks of {what} are kept alive; kept: {shown}")
    raise RequestError(
        f"the ranks of several runs are kept alive, so name one: {_list_runs(matching)}"
    )


def _list_runs(runs: Sequence[Path]) -> str:
    """Return their names, or their paths if runs of several folders have the same name."""
    names = [run.name for run in runs]
    return list_some(names if len({*names}) == len(names) else [*map(str, runs)], MAX_SHOWN)
