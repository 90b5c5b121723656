"""The quickstart in a real JupyterLab and a real browser."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from browser.conftest import IN_BROWSER
from browser.lab import IS_LAB, Lab

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "00_quickstart.ipynb"

pytestmark = [pytest.mark.notebook, *IN_BROWSER]


def test_quickstart_run_all_trains_loses_a_rank_and_restarts(lab: Lab) -> None:
    shutil.copy(QUICKSTART, lab.notebooks)
    with lab.open(QUICKSTART.name) as notebook:
        notebook.run_all()
        outputs = notebook.outputs()
        if "PICTURES" in os.environ:  # a folder to look at them in
            for cell in (1, 4, 8, 11, 16):
                notebook.shot(Path(os.environ["PICTURES"]) / f"cell{cell}.png", cell=cell)
        assert notebook.problems == []
        assert len(notebook.errors()) == 1  # of the rank that was killed
    text = "\n".join(outputs)
    assert re.search(r"^\[rank 1\] I am rank 1 of 2, process \d+", outputs[1], re.MULTILINE)
    assert re.search(r"\brank 1\b.*SIGKILL", text)
    assert re.search(r"9\d\.\d%.*\brank 1\b", text)
    assert "No such comm" not in text  # the page sent a message to a closed panel
    assert "CellFailedError" not in text  # the report is shown, not a traceback of the notebook


@pytest.mark.full
@pytest.mark.skipif(not IS_LAB, reason="mybinder.org opens JupyterLab, as binder/ tells it to")
def test_binder_configuration_opens_the_quickstart(lab: Lab, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(QUICKSTART.parent, root / "notebooks" / "notebooks")
    shutil.copytree(QUICKSTART.parents[1] / "binder", root / "jupyter_config_dir")
    with Lab(root, browser=lab.browser()) as binder, binder.open_first_page() as notebook:
        assert notebook.page.url.startswith(f"{binder.url}/lab/tree/notebooks/{QUICKSTART.name}")
    assert "jupyter_lab_config.json" in (QUICKSTART.parents[1] / "binder/postBuild").read_text()
