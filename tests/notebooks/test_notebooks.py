"""The notebooks run from start to end, and a failing %%ddp cell fails a notebook."""

import re
import sys
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
import pytest
import torch
from lessons import NOTEBOOKS, check_lesson, errors_of, execute, text_of
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from notebook import Notebook

pytestmark = [pytest.mark.notebook, pytest.mark.multiproc]

QUICKSTART = NOTEBOOKS[0]
SAYS = {  # with their own settings
    "1.4_from_one_process_to_ddp": "a larger rate brings back",
    "2.1_checkpoint_and_resume": "the largest bump: optimizer",
    "3.3_where_the_time_goes": "and the network learns",
    "3.6_a_small_gpt": "some letters have become words",
    "4.4_experts": "the loss has spread the tokens over the experts",
}
# tests/multiproc/ecosystem/test_notebook.py runs the other one
EACH = [path for path in NOTEBOOKS if path.stem[:2] != "A2"]


def of_cells(*sources: str) -> NotebookNode:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.full  # the gate runs the quickstart on a page
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", EACH, ids=lambda path: path.stem)
def test_a_notebook_runs_from_start_to_end(path: Path, folder: Path) -> None:
    notebook = check_lesson(path, folder)
    assert SAYS.get(path.stem, "") in text_of(notebook.cells)
    if path == QUICKSTART:
        assert re.search(r"\brank 1\b.*SIGKILL", errors_of(notebook.cells)[0])
        assert re.search(r"9\d\.\d%.*\brank 1\b", text_of(notebook.cells))


def memory_of(pid: int) -> int:
    """Return the memory of a process and its descendants; shared pages count once (PSS)."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.Error):  # it has just ended, or is about to
            total += process.memory_full_info().pss
    return total


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's own measure")
@pytest.mark.skipif(torch.version.cuda is not None, reason="Binder has torch's build for CPUs")
def test_the_quickstart_with_four_ranks_stays_under_a_gigabyte(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEM_LIMIT", str(2 << 30))  # as Binder sets it
    cells = nbformat.read(QUICKSTART, as_version=4).cells
    held, replies = [], []
    with Notebook(folder, loads=False) as notebook:
        for cell in cells:
            if cell.cell_type == "code":
                replies.append(notebook.run(cell.source.replace("--nproc 2", "--nproc 4")))
                held.append(memory_of(notebook.pid))
            if "accuracy = " in cell.source:
                assert notebook.run("%ddp pull accuracy").result.count("0.9") == 4
                shared = notebook.run("%%ddp\nimport sys\n'torch._dynamo' in sys.modules")
                assert shared.text == "Out [ranks 0-3] True\n"
    assert "360 of them on each rank" in "".join(each.text for each in replies)
    assert "SIGKILL" in "".join(each.error for each in replies)
    assert 200 << 20 < max(held) < 10**9, f"kernel and ranks took {max(held) / 1e6:.0f} MB"


@pytest.mark.gate_runs("--nope")
@pytest.mark.parametrize(
    ("cell", "error"),
    [("%%ddp --nproc 2\n1 / 0", "ZeroDivisionError: .*, line 2"), ("%%ddp --nope\npass", "--nope")],
)
def test_a_failing_cell_fails_the_notebook(folder: Path, cell: str, error: str) -> None:
    notebook = of_cells("%load_ext nbddp", cell, "print('not reached')")
    with pytest.raises(CellExecutionError, match=error):
        execute(notebook, folder)
    assert "not reached" not in text_of(notebook.cells)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # papermill's own
def test_papermill_runs_a_notebook(folder: Path) -> None:
    import papermill  # absent where hosted notebooks are tried

    source, target = folder / "in.ipynb", folder / "out.ipynb"
    nbformat.write(of_cells("%load_ext nbddp", "%%ddp --nproc 2\nworld_size"), source)
    papermill.execute_notebook(source, target, kernel_name="python3", progress_bar=False)
    assert "Out [ranks 0-1] 2" in text_of(nbformat.read(target, as_version=4).cells)
