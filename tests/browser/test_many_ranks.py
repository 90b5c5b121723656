"""A panel of more ranks than have rows: one line, a grid that opens, a record no longer than it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from browser.conftest import NEEDS_CHROMIUM, write_notebook
from browser.desk import Desk
from browser.lab import LabNotebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300), NEEDS_CHROMIUM]

Picture = Callable[[LabNotebook, str], None]

START = "%load_ext nbddp\n%ddp start --nproc 12"
TRAIN = """%%ddp
import time
for step in nbddp.track(range(1000)):
    time.sleep(0.1)
    nbddp.log(step=step, loss=1 / (step + 1) + rank, accuracy=step)
    print("step", step)
"""


def test_the_ranks_are_a_line_that_opens_and_the_record_is_not_much_higher(
    desk: Desk, picture: Picture
) -> None:
    write_notebook(desk.notebooks / "many.ipynb", START, TRAIN)
    with desk.open("many.ipynb") as notebook:
        notebook.run(0)
        notebook.begin(1)
        cell = notebook.code_cell(1)
        cell.locator(".nbddp-shots svg").nth(1).wait_for()
        notebook.await_text(1, "^12 running · ")
        notebook.await_text(1, r" step 19$")  # more lines than a record has
        opens = notebook.button("All ranks")
        before = opens.bounding_box()
        opens.click()
        cell.locator(".nbddp-field").nth(11).wait_for()
        picture(notebook, "many-ranks")
        assert opens.bounding_box() == before, "the same place closes it"
        live = cell.locator(".jp-OutputArea").evaluate("it => it.offsetHeight")
        notebook.button("Interrupt").click()
        notebook.await_idle()
        notebook.await_text(1, "^12 interrupted$")
        notebook.await_text(1, "^each rank's lines$")
        picture(notebook, "many-ranks-record")
        assert cell.locator(".jp-OutputArea").evaluate("it => it.offsetHeight") < live + 100
        assert notebook.problems == []
