"""Helpers of the golden walks.

A golden walk types what a user types. It uses only magics, the public names of nbddp and documented
files, and it ends with ranks that work and have their names. It asserts values, ranks, options, ids
and keys exactly; of a message it asserts the fact and the way out. So a change that moves code or
rewords a message changes no walk.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from notebook import Notebook, Reply
from processes import wait_until

KEEP = "kept = rank * 10"


def assert_ranks_work(notebook: Notebook, nproc: int = 2) -> None:
    """Check that all ranks can run a collective and have the name set by ``KEEP``."""
    reply = notebook.run("%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(int(x.item()), kept)")
    assert reply.status == "ok", all_text(reply)
    for rank in range(nproc):
        assert reply.lines(rank) == [f"{nproc} {rank * 10}"], all_text(reply)


def all_text(reply: Reply) -> str:
    return "\n".join([reply.text, reply.error, reply.traceback])


def pids(notebook: Notebook, ranks: Sequence[int]) -> list[int]:
    reply = notebook.run("%%ddp --once\nimport os\nprint(os.getpid())")
    return [int(reply.lines(rank)[0]) for rank in ranks]


def are_gone(processes: Sequence[int]) -> bool:
    """Wait until these processes have ended. Return whether they did."""
    return wait_until(lambda: not any(psutil.pid_exists(pid) for pid in processes))


def run_folders(base: Path, name: str = "") -> list[Path]:
    return sorted((base / ".nbddp" / "runs").glob(f"*-{name}" if name else "*"))


def run_json(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return facts
