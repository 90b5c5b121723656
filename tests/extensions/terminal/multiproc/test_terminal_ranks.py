"""`nbddp` in a terminal beside a real kernel that trains, hangs, has failed, and is dead."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from notebook import Notebook
from processes import wait_until

HANG = """%%ddp
import time
import torch
for step in range(3):
    nbddp.log(step=step, loss=1.0)
    print("step", step)
if rank == 0:
    dist.all_reduce(torch.ones(4))
else:
    time.sleep(600)
"""
SHORT_HANG = "get_ipython()._nbddp.notebook.group.session.rank_monitor.hangs.hang_after = 3.0"
TRAIN = """%%ddp
import time
for step in nbddp.track(range(10_000)):
    nbddp.log(step=step, loss=0.5)
    dist.barrier()
    time.sleep(0.01)
"""


@pytest.fixture
def kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("HOME", str(folder))
    with Notebook(folder) as notebook:
        yield notebook


def nbddp(folder: Path, *words: str) -> dict[str, Any]:
    """Return the answer of a command, as another process prints it."""
    command = [sys.executable, "-m", "nbddp", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def wait_for_why(folder: Path, kind: str) -> dict[str, Any]:
    """Wait until ``nbddp why`` gives a reason of this kind, and return its answer."""
    answer: dict[str, Any] = {}

    def has_kind() -> bool:
        answer.update(nbddp(folder, "why"))
        return answer.get("kind") == kind

    assert wait_until(has_kind, timeout=100), answer
    return answer


def test_hang_failure_and_dead_kernel_are_named_from_outside(kernel: Notebook) -> None:
    folder = kernel.folder
    kernel.run("%ddp start --nproc 2")
    kernel.run(SHORT_HANG)
    request = kernel.begin(HANG)
    why = wait_for_why(folder, "hang")
    assert why["text"].startswith("no progress for 3 s: rank 0 called all_reduce #")
    assert "rank 1 never came" in why["text"]
    assert why["way_out"].endswith("an interrupt ends it and keeps all variables")
    assert why["ranks"][0]["call"].startswith("all_reduce #")
    assert [rank["line"] for rank in why["ranks"]] == [8, 10]
    assert why["ranks"][1]["code"] == "time.sleep(600)"
    status = nbddp(folder, "status")
    assert status["age"] < 3  # the kernel is busy, and still has a heartbeat
    assert status["state"] == "running a cell"
    assert status["cell"]["is_running"]
    assert status["metrics"]["loss"]["mean"] == 1.0
    [log] = nbddp(folder, "logs", "1")["logs"]
    assert log["lines"] == ["step 0", "step 1", "step 2"]
    kernel.interrupt()
    kernel.finish(request)
    assert wait_for_why(folder, "interrupted")["way_out"].startswith("Every rank keeps")

    kernel.run("%%ddp\nx = 1\nif rank == 1:\n    1 / 0")
    why = wait_for_why(folder, "failed")
    assert why["text"].startswith("rank 1: ZeroDivisionError: division by zero, line 4")
    assert why["way_out"].startswith("Every rank keeps its variables")

    kernel.run("%%ddp\nimport os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)")
    why = wait_for_why(folder, "failed")
    assert wait_until(lambda: "SIGKILL" in nbddp(folder, "why")["text"])
    why = nbddp(folder, "why")
    assert "`%ddp heal` replaces rank 1" in why["way_out"]
    assert why["state"] == "a rank is dead"

    kernel.run("%ddp restart")
    kernel.begin(TRAIN)
    assert wait_until(lambda: (nbddp(folder, "status")["ranks"][1]["step"] or 0) > 20)
    assert wait_for_why(folder, "running")["text"].startswith("no problem is known: cell [")
    [live] = nbddp(folder, "runs", "--live")["runs"]
    assert live["kernel"]["pid"] == kernel.pid
    kernel.kill()
    why = wait_for_why(folder, "dead kernel")
    assert f"the kernel is dead (process {live['kernel']['pid']}, started 2" in why["text"]
    assert nbddp(folder, "runs", "--live")["runs"] == []
    assert len(nbddp(folder, "logs")["logs"]) == 2
    assert nbddp(folder, "metrics")["metrics"][0]["last"]["1"] == 0.5


def test_cell_is_interrupted_a_rank_killed_and_all_are_stopped_from_outside(
    kernel: Notebook,
) -> None:
    folder = kernel.folder
    kernel.run("%ddp start --nproc 2")
    request = kernel.begin(HANG)
    assert wait_until(lambda: "step 2" in str(nbddp(folder, "logs")))
    assert "interrupted" in nbddp(folder, "interrupt", "--yes")["done"]
    assert "interrupted" in kernel.finish(request).error
    request = kernel.begin(HANG)
    assert wait_until(lambda: nbddp(folder, "status")["state"] == "running a cell")
    assert nbddp(folder, "kill", "1", "--yes")["done"].startswith("rank 1 was killed; ")
    assert "rank 1 was killed by you" in kernel.finish(request).error
    assert nbddp(folder, "stop", "--yes")["done"].startswith("all ranks are stopped")
    assert wait_until(lambda: nbddp(folder, "status").get("is_over", False))


def test_run_that_was_stopped_has_its_end(kernel: Notebook) -> None:
    kernel.run("%%ddp --nproc 2\nrank")
    kernel.run("%ddp stop")
    assert wait_until(lambda: nbddp(kernel.folder, "status").get("is_over", False))
    assert nbddp(kernel.folder, "why")["text"].startswith("nothing has failed: cell [")
