"""The notebooks run from start to end, and a failing %%ddp cell fails a notebook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

pytestmark = [pytest.mark.notebook, pytest.mark.multiproc]

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    client = NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute()


def of_cells(*sources: str) -> NotebookNode:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(cells=cells)


def text_of(notebook: NotebookNode) -> str:
    streams = [
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream"
    ]
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(streams))


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], NotebookNode]:
    """Executes a notebook in a folder of its own, once for all tests."""

    @cache
    def run(path: Path) -> NotebookNode:
        return execute(nbformat.read(path, as_version=4), tmp_path_factory.mktemp(path.stem))

    return run


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_start_to_end(
    path: Path, executed: Callable[[Path], NotebookNode]
) -> None:
    notebook = executed(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    failed = {
        index
        for index, cell in enumerate(notebook.cells)
        for output in cell.get("outputs", [])
        if output["output_type"] == "error"
    }
    meant = {
        index
        for index, cell in enumerate(notebook.cells)
        if "raises-exception" in cell.metadata.get("tags", [])
    }
    assert failed == meant


def test_the_quickstart_names_the_rank_that_was_lost(
    executed: Callable[[Path], NotebookNode],
) -> None:
    notebook = executed(NOTEBOOKS[0])
    errors = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "error"
    ]
    assert [error["evalue"] for error in errors] == ["rank 1 was killed by SIGKILL"]
    assert re.search(r"trained to 9\d\.\d%, lost rank 1, and started again", text_of(notebook))


def test_a_failing_cell_fails_the_notebook(folder: Path) -> None:
    notebook = of_cells("%load_ext nbddp", "%%ddp --nproc 2\n1 / 0", "print('not reached')")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError: division by zero, line 2"):
        execute(notebook, folder)
    assert "not reached" not in text_of(notebook)


def test_a_wrong_option_fails_the_notebook(folder: Path) -> None:
    with pytest.raises(CellExecutionError):
        execute(of_cells("%load_ext nbddp", "%%ddp --nope\npass"), folder)


def test_the_output_of_ranks_is_stored_as_plain_text(folder: Path) -> None:
    notebook = execute(
        of_cells("%load_ext nbddp", "%%ddp --nproc 2\nprint('hello', rank)\nworld_size"), folder
    )
    lines = text_of(notebook).splitlines()
    assert sorted(lines[:2]) == ["[rank 0] hello 0", "[rank 1] hello 1"]
    assert lines[2:] == ["Out [ranks 0-1] 2"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # papermill's own
def test_papermill_runs_it_too(folder: Path) -> None:
    import papermill  # absent where hosted notebooks are tried

    source, target = folder / "in.ipynb", folder / "out.ipynb"
    nbformat.write(of_cells("%load_ext nbddp", "%%ddp --nproc 2\nworld_size"), source)
    papermill.execute_notebook(source, target, kernel_name="python3", progress_bar=False)
    assert "Out [ranks 0-1] 2" in text_of(nbformat.read(target, as_version=4))


def test_terminal_ipython_shows_it_as_text(folder: Path) -> None:
    script = folder / "cells.ipy"
    script.write_text(
        "%load_ext nbddp\n"
        "get_ipython().run_cell_magic('ddp', '--nproc 2', 'print(\"hi\", rank)\\nworld_size')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--colors=nocolor", str(script)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
        cwd=folder,
        env=os.environ | {"IPYTHONDIR": str(folder / "ipython")},
    )
    lines = done.stdout.splitlines()
    assert {"[rank 0] hi 0", "[rank 1] hi 1", "Out [ranks 0-1] 2"} <= set(lines)
