"""The worker group at one moment, as a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from nbddp.controller.session import Session
from nbddp.controller.states import RankLife
from nbddp.errors import describe_exit


def status(session: Session) -> str:
    """The state of the group and of every rank."""
    life = session.life
    if not life.state.is_live:
        return "no worker group; `%ddp start` or a `%%ddp` cell starts one"
    lines = [_headline(session), "rank  state      pid      device   memory"]
    pids = session.process_ids()
    lines += [_row(session, each, pids.get(each.rank, 0)) for each in life.ranks]
    return "\n".join([*lines, *_footer(session)])


def _headline(session: Session) -> str:
    life = session.life
    backends = {ready.backend for ready in session.ready.values()}
    count = len(life.ranks)
    facts = [
        life.state.value,
        f"{count} rank{'s' if count > 1 else ''}",
        *sorted(backends),
        f"attempt {life.attempt}",
    ]
    return "worker group: " + " · ".join(facts)


def _row(session: Session, each: RankLife, pid: int) -> str:
    if not each.is_alive:
        return f"{each.rank:<4}  {describe_exit(each.exitcode)}"
    ready = session.ready.get(each.rank)
    device = ready.device if ready else ""
    return f"{each.rank:<4}  {each.state.value:<9}  {pid:<7}  {device:<7}  {_memory(pid)}"


def _memory(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).memory_info().rss / 2**20:.0f} MiB"
    except psutil.NoSuchProcess:
        return ""


def _shortened(path: Path) -> Path:
    """Relative to the notebook's folder, where it lies in there."""
    with suppress(ValueError, FileNotFoundError):
        return path.relative_to(Path.cwd())
    return path


def _footer(session: Session) -> Iterator[str]:
    if session.folder is not None:
        yield f"logs in {_shortened(session.folder.path)}"
    if session.link is not None and session.link.refused:
        yield f"{session.link.refused} messages refused: they were not signed by this group"
