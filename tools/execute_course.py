"""Execute the notebooks so that each cell shows the record of its panel.

A notebook that needs other packages is left out where they are missing.

python tools/execute_course.py FOLDER    # writes an executed copy of each notebook
EXECUTED=FOLDER mkdocs build             # shows these copies on the site
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import nbformat
from nbclient import NotebookClient

AS_PANEL = "%ddp view panel"  # without a page nbddp would print text
WIDGET = "application/vnd.jupyter.widget-view+json"  # buttons, which need a kernel
TIMEOUT = 120  # seconds for a cell
NEEDED = {"A2_two_gpus_and_a_language_model": ("trl", "peft")}  # packages, by notebook


def jobs() -> int:
    """Return the number of notebooks to run at a time: one for two cores, as each has ranks."""
    return max(1, (os.cpu_count() or 1) // 2)


def is_executable(path: Path) -> bool:
    """Return whether the packages that a notebook needs are installed."""
    return all(find_spec(name) for name in NEEDED.get(path.stem, ()))


def execute_all(paths: Sequence[Path], folder: Path) -> None:
    """Write an executed copy of each notebook into a folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed unexpectedly.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs()) as pool:
        list(pool.map(partial(_execute, folder=folder), paths))


def _execute(path: Path, folder: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    view_cell = nbformat.v4.new_code_cell(AS_PANEL)
    first = next(at for at, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells.insert(first + 1, view_cell)  # after %load_ext
    with tempfile.TemporaryDirectory() as folder_name:
        shutil.copytree(path.parent / "pictures", Path(folder_name, "pictures"))
        resources = {"metadata": {"path": folder_name}}
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT,
            kernel_name="python3",
            resources=resources,
            store_widget_state=False,
        )
        client.execute()
    notebook.cells.remove(view_cell)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if WIDGET not in each.get("data", {})]
    nbformat.write(notebook, folder / path.name)


if __name__ == "__main__":
    notebooks = Path(__file__).resolve().parents[1] / "notebooks"
    paths = [path for path in sorted(notebooks.glob("*.ipynb")) if is_executable(path)]
    execute_all(paths, Path(sys.argv[1]))
