"""Every notebook in a real JupyterLab: it runs from start to end, with its panels."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from browser.conftest import NEEDS_CHROMIUM
from browser.lab import Lab, LabNotebook

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
OTHERS = sorted(path for path in NOTEBOOKS.glob("*.ipynb") if "quickstart" not in path.name)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.notebook,
    pytest.mark.timeout(300),
    NEEDS_CHROMIUM,
]


def meant_to_fail(path: Path) -> int:
    """How many cells of a notebook shall end with an error."""
    cells = nbformat.read(path, as_version=4).cells
    return sum("raises-exception" in cell.metadata.get("tags", []) for cell in cells)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_run_all_shows_no_error_and_nothing_on_the_console(
    lab: Lab, path: Path, picture: Callable[[LabNotebook, str], None]
) -> None:
    shutil.copytree(NOTEBOOKS / "pictures", lab.notebooks / "pictures", dirs_exist_ok=True)
    shutil.copy(path, lab.notebooks)
    with lab.open(path.name) as notebook:
        notebook.run_all(timeout=200)
        picture(notebook, path.stem)
        assert len(notebook.errors()) == meant_to_fail(path), notebook.errors()
        assert notebook.problems == []
        text = "\n".join(notebook.outputs())
        assert "done on ranks" in text
        assert "No such comm" not in text  # the page spoke of a panel that was gone
