"""A panel in the classic Notebook 6.5, its button pressed while the cell runs; for tools/hosted.sh.

It is the nearest to Colab's page that can be tried here: both speak ipywidgets 7 with a kernel
that handles one message after the other.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from browser.conftest import NEEDS_CHROMIUM
from browser.lab import CHROMIUM, CHROMIUM_ARGS, write_notebook
from playwright.sync_api import Page, sync_playwright
from processes import free_port, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180), NEEDS_CHROMIUM]

LOOP = """%%ddp --nproc 2
import time
for step in nbddp.track(range(2000)):
    nbddp.log(step=step, loss=1 / (step + 1))
    time.sleep(0.05)"""
READY = "window.Jupyter?.notebook?.kernel?.is_connected()"
OUTPUTS = "Jupyter.notebook.get_cells().map(cell => cell.output_area.element.text())"


def answers(url: str) -> bool:
    with suppress(OSError):
        urllib.request.urlopen(url, timeout=5).close()
        return True
    return False


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A classic Notebook's page with one notebook, its kernel connected."""
    write_notebook(tmp_path / "cells.ipynb", "%load_ext nbddp", LOOP, "%%ddp\nstep > 0")
    port, token = free_port(), secrets.token_hex(16)
    command = [
        *(sys.executable, "-m", "notebook", "--no-browser", "--allow-root", "--ip=127.0.0.1"),
        *(f"--port={port}", f"--NotebookApp.token={token}", f"--notebook-dir={tmp_path}"),
    ]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        assert wait_until(lambda: answers(f"{url}/api"), timeout=60), "it did not start"
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
            page = browser.new_page(viewport={"width": 1200, "height": 1000})
            page.goto(f"{url}/notebooks/cells.ipynb?token={token}")
            page.wait_for_function(READY, timeout=60_000)
            yield page
            page.evaluate("() => new Promise(ended => Jupyter.notebook.kernel.kill(ended))")
            browser.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def await_text(page: Page, cell: int, pattern: str) -> None:
    is_shown = wait_until(
        lambda: bool(re.search(pattern, page.evaluate(OUTPUTS)[cell])), timeout=60
    )
    assert is_shown, f"{pattern!r} is not in:\n{page.evaluate(OUTPUTS)[cell]}"


def picture(page: Page, name: str) -> None:
    if "PICTURES" in os.environ:
        page.screenshot(path=Path(os.environ["PICTURES"]) / f"{name}.png")


def test_classic_notebook_shows_the_panel_and_its_button_works(page: Page) -> None:
    page.evaluate("Jupyter.notebook.execute_cell_range(0, 2)")
    await_text(page, 1, r"running a cell(.|\n)*/2000")
    page.wait_for_selector(".nbddp-charts svg, .nbddp-shots svg", timeout=30_000)
    picture(page, "classic-running")
    page.get_by_role("button", name="Interrupt").first.click()
    await_text(page, 1, r"ranks 0-1 interrupted, line 5")
    picture(page, "classic-record")
    page.wait_for_function("!Jupyter.notebook.get_cells()[1].element.text().includes('%ddp show')")
    page.wait_for_function("!Jupyter.notebook.kernel_busy", timeout=30_000)
    time.sleep(1)  # what is asked just after an error, ipykernel answers with "aborted"
    page.evaluate("Jupyter.notebook.execute_cell_range(2, 3)")
    await_text(page, 2, r"Out \[ranks 0-1\]\s*True|\[ranks 0-1\]\s*True")
