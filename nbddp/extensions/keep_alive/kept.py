"""Find the agents that keep ranks alive on this machine. Only the processes know: no file does."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbddp.errors import RequestError
from nbddp.extensions.nodes.join_file import FOLDER
from nbddp.extensions.nodes.stale_files import is_locked
from nbddp.formatting import MAX_SHOWN, format_bytes, format_seconds, list_some, plural

_LOG = re.compile(r"rank\d+\.log")
END_TIMEOUT = 15.0  # seconds for the ranks and their agent to end


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRanks:
    """The ranks of an agent.

    Attributes:
        run: the folder of their run.
        agent: the process that keeps them.
        join_file: the join file of their notebook.
        has_notebook: whether their notebook is alive.
        seconds: how long they are kept without a notebook.
        remaining: for how long they are still kept.
        count: the number of ranks.
        memory: bytes of memory that the agent and all its processes use.
    """

    run: Path
    agent: psutil.Process
    join_file: Path
    has_notebook: bool
    seconds: float
    remaining: float
    count: int
    memory: int

    def describe(self) -> str:
        """Return a line about them."""
        state = (
            f"their notebook is alive; kept for {format_seconds(self.seconds)} after its end"
            if self.has_notebook
            else f"kept for {format_seconds(self.remaining)}, `%ddp rejoin {self.run.name}`"
        )
        what = f"{plural(self.count, 'rank')}, {format_bytes(self.memory)}"
        return f"{self.run.name} · {what} · {state}\n  {self.run}"


def kept_ranks() -> list[KeptRanks]:
    """Return the kept ranks of this user and home folder on this machine, sorted by their run."""
    found: list[KeptRanks] = []
    for process in psutil.process_iter(["cmdline", "uids"]):
        words = process.info["cmdline"] or []
        # torchrun is the parent of the agent, and has the same words
        is_agent = "nbddp.nodes" in words and "--keep" in words
        if is_agent and "torch.distributed.run" not in words and _is_own(process):
            with suppress(psutil.Error, OSError):  # it is ending
                found += _ranks_of(process, words)
    return sorted(found, key=lambda each: each.run.name)


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
        info = process.memory_info()
        return int(info.rss - getattr(info, "shared", 0))
    return 0


def find_kept(name: str | None) -> KeptRanks:
    """Return the kept ranks whose run has this part in its name.

    Without a name, they are the only ones without a notebook.

    Raises:
        RequestError: there are none, or several.
    """
    kept = kept_ranks()
    matching = [each for each in kept if (name in each.run.name if name else not each.has_notebook)]
    if len(matching) == 1:
        return matching[0]
    what = f"run {name!r}" if name else "a notebook that has ended"
    if not matching:
        names = list_some([each.run.name for each in kept], MAX_SHOWN) if kept else "none"
        raise RequestError(f"no ranks of {what} are kept alive; kept: {names}")
    names = list_some([each.run.name for each in matching], MAX_SHOWN)
    raise RequestError(f"the ranks of several runs are kept alive, so name one: {names}")


def describe_kept() -> str:
    """Return the kept ranks, as text."""
    return "\n".join(each.describe() for each in kept_ranks()) or "no ranks are kept alive"


def end_kept(kept: KeptRanks) -> str:
    """End kept ranks, and wait until their agent has removed its files.

    Raises:
        RequestError: they did not end.
    """
    kept.agent.terminate()
    try:
        kept.agent.wait(END_TIMEOUT)
    except psutil.TimeoutExpired:
        raise RequestError(
            f"the agent (process {kept.agent.pid}) of run {kept.run.name} has not ended within "
            f"{END_TIMEOUT:.0f} s: try again"
        ) from None
    return f"{plural(kept.count, 'rank')} of run {kept.run.name} ended; their variables are lost"
