"""Every notebook in a real JupyterLab, with its panels; where there is no page they run whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest

from browser.conftest import IN_BROWSER, Picture
from browser.desk import Desk
from browser.lab import Lab

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
OTHERS = sorted(path for path in NOTEBOOKS.glob("*.ipynb") if "quickstart" not in path.name)

pytestmark = [pytest.mark.full, pytest.mark.notebook, *IN_BROWSER]


def meant_to_fail(path: Path) -> int:
    """How many cells of a notebook shall end with an error."""
    cells = nbformat.read(path, as_version=4).cells
    return sum("raises-exception" in cell.metadata.get("tags", []) for cell in cells)


@pytest.fixture
def pictures(lab: Lab) -> None:
    """Copy the pictures that the notebooks show."""
    shutil.copytree(NOTEBOOKS / "pictures", lab.notebooks / "pictures", dirs_exist_ok=True)


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_notebook_opens_and_its_first_cell_leaves_a_record(desk: Desk, path: Path) -> None:
    shutil.copy(path, desk.notebooks)
    with desk.open(path.name) as notebook:
        first = next(at for at, each in enumerate(notebook.sources()) if each.startswith("%%ddp"))
        for cell in range(first + 1):
            notebook.run(cell)
        notebook.await_text(first, "^done on ranks 0-")
        broken = "[...document.images].filter(it => it.complete && !it.naturalWidth).length"
        assert notebook.page.evaluate(broken) == 0
        assert notebook.problems == []


@pytest.mark.usefixtures("pictures")
@pytest.mark.soak  # half a minute each; the quickstart runs whole in every run
@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_run_all_shows_no_unexpected_error_or_console_message(
    lab: Lab, path: Path, picture: Picture
) -> None:
    shutil.copy(path, lab.notebooks)
    with lab.open(path.name) as notebook:
        notebook.run_all(timeout=200)
        picture(notebook, path.stem)
        assert len(notebook.errors()) == meant_to_fail(path), notebook.errors()
        assert notebook.problems == []
        text = "\n".join(notebook.outputs())
        assert "done on ranks" in text
        assert "No such comm" not in text  # the page sent a message to a closed panel
