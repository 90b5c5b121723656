"""The quickstart's cells as a script: under torchrun it gives the notebook's numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from notebook import Notebook
from processes import GLOO_ABORTS

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "00_quickstart.ipynb"

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(200)]


def test_the_quickstart_gives_its_numbers_under_torchrun(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", str(QUICKSTART))  # as Jupyter's server sets it
    cells = [each.source for each in nbformat.read(QUICKSTART, 4).cells if each.cell_type == "code"]
    until = next(at for at, cell in enumerate(cells) if cell.startswith("%ddp restart"))
    with Notebook(folder, loads=False) as notebook:
        for cell in cells[:until]:
            notebook.run(cell, timeout=100)
        reply = notebook.run("%ddp export quickstart.py")
        assert reply.status == "ok", reply.text
        assert reply.text.count("left out") == 1  # the cell in which rank 1 dies
        sums = notebook.run("print(checksums[0], losses[-1], accuracy[0])").text.split()
    script = next(folder.rglob("quickstart.py"))
    assert "# ## One model, kept equal on all ranks" in script.read_text()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            script,
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0 or GLOO_ABORTS in done.stderr, done.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] checksums {sums[0]}\n" in done.stdout
        assert f"[rank {rank}] accuracy {sums[2]}\n" in done.stdout
    assert re.search(
        rf"^\[rank 0\] losses \[.*, {re.escape(sums[1])}\]$", done.stdout, re.MULTILINE
    )
