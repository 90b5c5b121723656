"""What the page on scripts and tests shows does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nbddp import ArgumentError, CellFailedError, WorkerGroup

pytestmark = pytest.mark.multiproc

PAGE = Path(__file__).parents[2] / "docs" / "from_python.md"


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_examples_of_the_page_run(folder: Path) -> None:
    for name, code in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / name).write_text(code)
    said = run(folder, "train.py")
    assert re.search(r"-train\n\[\d\S+, \d\S+\]\n\{\(", said), said
    assert "3 passed" in run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0")


def test_a_group_traces_steps_without_a_notebook(folder: Path) -> None:
    with WorkerGroup(nproc=2) as group:
        source = "for step in range(4): dist.barrier(); nbddp.log(step=step, loss=1.0)"
        trace = group.trace(source, 1, 2)
        assert (sorted(trace.ranks), trace.missing, trace.steps) == ([0, 1], {}, [1, 2])
        assert trace.events > 0
        assert trace.path is not None
        assert trace.path.is_relative_to(folder)
        for refused in (
            lambda: group.trace(source, 1, 2, ranks=[5]),
            lambda: group.trace(source, 2, 1),
            lambda: group.run(None),
        ):
            with pytest.raises(ArgumentError):
                refused()
        with pytest.raises(CellFailedError) as error:
            group.run("import os; os._exit(3)", ranks=[1], quiet=True)
        assert "`%ddp heal` replaces rank 1" in error.value.report  # rank 0 lives
