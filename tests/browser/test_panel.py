"""The panel in a real JupyterLab and a real browser: looked at, pressed, reloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from browser.conftest import IN_BROWSER, Picture, write_notebook
from browser.desk import Desk
from browser.lab import LabNotebook

pytestmark = [pytest.mark.full, *IN_BROWSER]

LOAD = "%reload_ext nbddp"
RESTART = "%ddp restart --nproc 2"
TRAIN = """%%ddp
import time
kept = rank
for step in nbddp.track(range(400), label="epoch <1>"):
    time.sleep(0.05)
    nbddp.log(step=step, loss=2 / (step + 1) + rank / 10)
    if step % 10 == 0:
        print("\\x1b[32mgreen\\x1b[0m step", step)
"""
BACKGROUND = """%%ddp --no-wait
import time
for step in range(400):
    time.sleep(0.05)
    print("tick", step)"""
CHECK = "%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\n(kept, x.item())"
HOSTILE = """%%ddp
import time
evil = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 2</script>"
for step in nbddp.track(range(8), label=evil):
    print(evil)
    print("\\x1b]8;;javascript:window.hacked=3\\x07click\\x1b]8;;\\x07")
    nbddp.log(step=step, **{evil: step})
    time.sleep(0.2)
raise ValueError(evil)"""
LONG = "%%ddp\nraise KeyError('Missing keys: ' + ', '.join(f'layer{n}' for n in range(20_000)))"


@pytest.fixture(scope="module")
def shared(lasting: Desk) -> Iterator[LabNotebook]:
    """One page and one kernel for the tests that leave both in use."""
    cells = [RESTART, TRAIN, CHECK, HOSTILE, BACKGROUND, LONG]
    write_notebook(lasting.notebooks / "shared.ipynb", *cells, LOAD, "%ddp stop")
    with lasting.open("shared.ipynb") as notebook:
        notebook.run(6)
        yield notebook


def test_lines_charts_and_progress_show_while_the_cell_runs(
    notebook: LabNotebook, picture: Picture
) -> None:
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
    picture(notebook, "running")
    notebook.button("Interrupt").click()
    notebook.await_idle()


def test_interrupt_ends_the_cell_and_leaves_a_record_in_its_place(
    notebook: LabNotebook, picture: Picture
) -> None:
    notebook.begin(1)
    notebook.await_text(1, "step 10$")
    notebook.button("Interrupt").click()
    notebook.await_idle()
    output = notebook.code_cell(1).locator(".jp-Cell-outputArea")
    assert output.locator("button").count() == 0
    assert output.locator("svg[aria-label^='loss: ']:visible").count() == 1
    text = notebook.text(1)
    assert text.startswith("interrupted · ")
    assert re.search(r"^\[rank 0\] green step 10$", text, re.MULTILINE)
    assert re.search(r"interrupt requested$", text, re.MULTILINE)
    picture(notebook, "interrupted")
    notebook.run(2)
    assert "Out [rank 1] (1, 2.0)" in notebook.text(2)


def test_kill_ends_the_chosen_rank_and_the_record_names_rank_and_signal(
    notebook: LabNotebook, picture: Picture
) -> None:
    notebook.begin(1)
    notebook.await_text(1, "step 10$")
    notebook.page.locator(".nbddp-buttons select").select_option("1")
    notebook.press_twice("Kill")
    notebook.await_idle()
    text = notebook.text(1)
    assert text.startswith("failed on rank 1 · ")
    assert re.search(r"\brank 1\b.*SIGKILL", text)
    picture(notebook, "killed")


def test_restart_button_ends_the_cell_and_the_next_cell_has_new_ranks(
    notebook: LabNotebook, picture: Picture
) -> None:
    notebook.begin(1)
    notebook.await_text(1, "step 10$")
    notebook.press_twice("Restart")
    notebook.await_idle()
    text = notebook.text(1)
    assert text.startswith("ended by a restart · ")
    assert "SIGTERM" not in text.partition("rank\tstate")[0]  # the user ended them: no failure
    picture(notebook, "restarted")
    notebook.run(2)
    assert "NameError" in notebook.text(2)


def test_buttons_work_for_a_cell_that_does_not_block(notebook: LabNotebook) -> None:
    notebook.run(4)  # returns at once
    notebook.await_text(4, r"running [\s\S]*tick 5$")
    notebook.button("Interrupt").click()
    notebook.await_text(4, "^interrupted · ")


def test_output_and_names_of_ranks_are_escaped_as_text(
    notebook: LabNotebook, picture: Picture
) -> None:
    notebook.begin(3)
    output = notebook.code_cell(3).locator(".jp-Cell-outputArea")
    output.locator(".nbddp-shots svg").wait_for()
    picture(notebook, "hostile")
    notebook.await_idle()
    assert "[rank 1] <img src=x onerror='window.hacked = 1'>" in notebook.text(3)
    assert output.locator("img[src='x'], script, a[href]").count() == 0
    assert notebook.page.evaluate("window.hacked ?? 'safe'") == "safe"


def test_message_of_thousands_of_lines_scrolls(notebook: LabNotebook, picture: Picture) -> None:
    notebook.run(5)
    notebook.await_text(5, "^failed on ranks 0-1 · ")
    notebook.button("Restart").scroll_into_view_if_needed()
    picture(notebook, "long-message")
    cell = notebook.code_cell(5)
    assert cell.locator(".jp-OutputArea").evaluate("it => it.offsetHeight") < 1200
    card = cell.locator(".nbddp-card").first
    card.focus()
    notebook.page.keyboard.press("End")
    expect(card).not_to_have_js_property("scrollTop", 0)
