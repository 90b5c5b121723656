"""Every notebook in a real JupyterLab, with its panels; where there is no page they run whole."""

import shutil
from pathlib import Path

import nbformat
import pytest

from browser.conftest import IN_BROWSER
from browser.lab import IS_LAB, Lab

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
BROKEN_IMAGES = "[...document.images].filter(it => it.complete && !it.naturalWidth).length"

pytestmark = [pytest.mark.notebook, *IN_BROWSER]


@pytest.mark.gate_runs("quickstart")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_run_all_shows_no_unexpected_error_or_console_message(lab: Lab, path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    meant = [each for each in cells if "raises-exception" in each.metadata.get("tags", [])]
    shutil.copytree(path.parent / "pictures", lab.notebooks / "pictures", dirs_exist_ok=True)
    shutil.copy(path, lab.notebooks)
    with lab.open(path.name) as notebook:
        notebook.run_all(timeout=200)
        assert len(notebook.errors()) == len(meant), notebook.errors()
        assert notebook.page.evaluate(BROKEN_IMAGES) == 0
        assert notebook.problems == []
        text = "\n".join(notebook.outputs())
    if any(each.source.startswith("%%ddp") for each in cells):
        assert "done on ranks" in text
    assert "No such comm" not in text  # the page sent a message to a closed panel
    assert "CellFailedError" not in text  # the report is shown, not a traceback of the notebook


@pytest.mark.full
@pytest.mark.skipif(not IS_LAB, reason="mybinder.org opens JupyterLab, as binder/ tells it to")
def test_binder_configuration_opens_the_quickstart(lab: Lab, tmp_path: Path) -> None:
    root, binder_files = tmp_path / "root", NOTEBOOKS[0].parents[1] / "binder"
    shutil.copytree(NOTEBOOKS[0].parent, root / "notebooks" / "notebooks")
    shutil.copytree(binder_files, root / "jupyter_config_dir")
    with Lab(root, browser=lab.browser()) as binder, binder.open_first_page() as notebook:
        assert notebook.page.url.startswith(f"{binder.url}/lab/tree/notebooks/{NOTEBOOKS[0].name}")
    assert "jupyter_lab_config.json" in (binder_files / "postBuild").read_text()
