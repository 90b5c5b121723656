"""A panel in the classic Notebook 6.5, its button pressed while the cell runs; for tools/hosted.sh.

It is the nearest to Colab's page that can be tried here: both speak ipywidgets 7 with a kernel
that handles one message after the other.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.conftest import NEEDS_CHROMIUM
from browser.lab import SIZE, Lab, write_notebook
from playwright.sync_api import Page
from processes import free_port, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180), NEEDS_CHROMIUM]

LOOP = """%%ddp --nproc 2
import time
for step in nbddp.track(range(2000)):
    nbddp.log(step=step, loss=1 / (step + 1))
    time.sleep(0.05)"""
SERVER = ("notebook", "--NotebookApp.token={token}", "--notebook-dir={folder}")
READY = "window.Jupyter?.notebook?.kernel?.is_connected()"
OUTPUTS = "Jupyter.notebook.get_cells().map(cell => cell.output_area.element.text())"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A classic Notebook's page with one notebook, its kernel connected."""
    with Lab(tmp_path, server=[*SERVER, f"--port={free_port()}"]) as server:
        write_notebook(server.notebooks / "cells.ipynb", "%load_ext nbddp", LOOP, "%%ddp\nstep > 0")
        page = server.browser().new_page(viewport=SIZE)
        page.goto(f"{server.url}/notebooks/cells.ipynb?token={server.token}")
        page.wait_for_function(READY, timeout=60_000)
        yield page
        page.evaluate("() => new Promise(ended => Jupyter.notebook.kernel.kill(ended))")


def await_text(page: Page, cell: int, pattern: str) -> None:
    is_shown = wait_until(
        lambda: bool(re.search(pattern, page.evaluate(OUTPUTS)[cell])), timeout=60
    )
    assert is_shown, f"{pattern!r} is not in:\n{page.evaluate(OUTPUTS)[cell]}"


def test_classic_notebook_shows_the_panel_and_its_button_works(page: Page) -> None:
    page.evaluate("Jupyter.notebook.execute_cell_range(0, 2)")
    await_text(page, 1, r"running a cell(.|\n)*/2000")
    page.wait_for_selector(".nbddp-charts svg, .nbddp-shots svg", timeout=30_000)
    page.get_by_role("button", name="Interrupt").first.click()
    await_text(page, 1, r"ranks 0-1 interrupted, line 5")
    page.wait_for_function("!Jupyter.notebook.get_cells()[1].element.text().includes('%ddp show')")
    page.wait_for_function("!Jupyter.notebook.kernel_busy", timeout=30_000)
    time.sleep(1)  # what is asked just after an error, ipykernel answers with "aborted"
    page.evaluate("Jupyter.notebook.execute_cell_range(2, 3)")
    await_text(page, 2, r"Out \[ranks 0-1\]\s*True|\[ranks 0-1\]\s*True")
