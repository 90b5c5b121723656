"""Memory of a Binder: four ranks fit."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from notebook import Notebook

pytestmark = [
    pytest.mark.full,
    pytest.mark.notebook,
    pytest.mark.multiproc,
    pytest.mark.timeout(400),
]

ROOT = Path(__file__).parents[2]
QUICKSTART = "notebooks/00_quickstart.ipynb"


def memory_of(pid: int) -> int:
    """Return the memory of a process and its descendants; shared pages count once (PSS)."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    total = 0
    for process in family:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has just ended, or is about to
            continue
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's own measure")
def test_the_quickstart_with_four_ranks_stays_under_a_gigabyte(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEM_LIMIT", str(2 << 30))  # as Binder sets it
    cells = nbformat.read(ROOT / QUICKSTART, as_version=4).cells
    held = []
    with Notebook(folder, loads=False) as notebook:
        for cell in cells:
            if cell.cell_type == "code":
                notebook.run(cell.source.replace("--nproc 2", "--nproc 4"))
                held.append(memory_of(notebook.pid))
            if "accuracy = " in cell.source:
                assert notebook.run("%ddp pull accuracy").result.count("0.9") == 4
                shared = notebook.run("%%ddp\nimport sys\n'torch._dynamo' in sys.modules")
                assert shared.text == "Out [ranks 0-3] True\n"
    assert 200 << 20 < max(held) < 10**9, f"kernel and ranks took {max(held) / 1e6:.0f} MB"
