"""The panel in a real JupyterLab and a real browser: looked at, pressed, reloaded."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from browser.conftest import IN_BROWSER
from browser.lab import LabNotebook

pytestmark = [pytest.mark.full, *IN_BROWSER]

CELLS = [
    "%ddp restart --nproc 2",
    """%%ddp
import time
for step in nbddp.track(range(400), label="epoch <1>"):
    time.sleep(0.05)
    nbddp.log(step=step, loss=2 / (step + 1) + rank / 10)
    if step % 10 == 0:
        print("\\x1b[32mgreen\\x1b[0m step", step)
""",
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
    "%%ddp\nraise KeyError('Missing keys: ' + ', '.join(f'layer{n}' for n in range(20_000)))",
]


def test_lines_charts_and_progress_show_while_the_cell_runs(notebook: LabNotebook) -> None:
    notebook.begin(1)
    notebook.await_text(1, r"^\[rank 1\] green step 10$")
    output = notebook.code_cell(1).locator(".jp-Cell-outputArea")
    output.locator(".nbddp-shots svg").wait_for(state="visible")
    notebook.page.wait_for_function(  # it is redrawn continuously
        "document.querySelector('.nbddp-shots svg')?.getBoundingClientRect().width > 300"
    )
    notebook.await_text(1, r"epoch <1> \d+/400 · .* left")
    text = notebook.text(1)
    assert re.search(r"running .* · \d+\.\d s · 2 ranks · gloo · cpu · attempt \d+ · ", text)
    assert output.locator(".ansi-green-fg").first.inner_text() == "green"
    assert output.locator("table.nbddp-ranks tbody tr").count() == 2
    notebook.await_text(1, r"time.sleep\(0.05\)|nbddp.log")
    notebook.button("Interrupt").click()
    notebook.await_idle()
    assert output.locator("button").count() == 0
    assert output.locator("svg[aria-label^='loss: ']:visible").count() == 1
    for line in (r"^\[rank 0\] green step 10$", r"interrupt requested$"):
        assert re.search(line, notebook.text(1), re.MULTILINE)


def test_buttons_work_for_a_cell_that_does_not_block(notebook: LabNotebook) -> None:
    notebook.run(3)  # returns at once
    notebook.await_text(3, r"running [\s\S]*tick 5$")
    notebook.button("Interrupt").click()
    notebook.await_text(3, "^interrupted · ")


def test_output_and_names_of_ranks_are_escaped_as_text(notebook: LabNotebook) -> None:
    notebook.begin(2)
    output = notebook.code_cell(2).locator(".jp-Cell-outputArea")
    output.locator(".nbddp-shots svg").wait_for()
    notebook.await_idle()
    assert "[rank 1] <img src=x onerror='window.hacked = 1'>" in notebook.text(2)
    assert output.locator("img[src='x'], script, a[href]").count() == 0
    assert notebook.page.evaluate("window.hacked ?? 'safe'") == "safe"


def test_message_of_thousands_of_lines_scrolls(notebook: LabNotebook) -> None:
    notebook.run(4)
    notebook.await_text(4, "^failed on ranks 0-1 · ")
    notebook.button("Restart").scroll_into_view_if_needed()
    cell = notebook.code_cell(4)
    assert cell.locator(".jp-OutputArea").evaluate("it => it.offsetHeight") < 1200
    card = cell.locator(".nbddp-card").first
    card.focus()
    notebook.page.keyboard.press("End")
    expect(card).not_to_have_js_property("scrollTop", 0)
