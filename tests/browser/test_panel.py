"""The panel of a cell in the background, and hostile output of ranks, in a real browser."""

from __future__ import annotations

import pytest

from browser.conftest import IN_BROWSER
from browser.lab import LabNotebook

pytestmark = [pytest.mark.full, *IN_BROWSER]

CELLS = [
    "%ddp restart --nproc 2",
    """%%ddp
import time
evil = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 2</script>"
for step in nbddp.track(range(40), label=evil):
    print(evil)
    print("\\x1b]8;;javascript:window.hacked=3\\x07click\\x1b]8;;\\x07")
    nbddp.log(step=step, **{evil: step})
    time.sleep(0.2)
raise ValueError(evil)""",
    """%%ddp --no-wait
import time
for step in range(400):
    time.sleep(0.05)
    print("tick", step)""",
]


def test_buttons_work_for_a_cell_that_does_not_block(notebook: LabNotebook) -> None:
    notebook.run(2)  # returns at once
    notebook.await_text(2, r"running [\s\S]*tick 5$")
    notebook.button("Interrupt").click()
    notebook.await_text(2, "^interrupted · ")


def test_output_and_names_of_ranks_are_escaped_as_text(notebook: LabNotebook) -> None:
    notebook.begin(1)
    output = notebook.code_cell(1).locator(".jp-Cell-outputArea")
    output.locator(".nbddp-shots svg").wait_for()
    notebook.await_idle()
    assert "[rank 1] <img src=x onerror='window.hacked = 1'>" in notebook.text(1)
    assert output.locator("img[src='x'], script, a[href]").count() == 0
    assert notebook.page.evaluate("window.hacked ?? 'safe'") == "safe"
