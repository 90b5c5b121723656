"""A sweep on a page: which one runs, how far it is, and in the end the table and the comparison."""

from __future__ import annotations

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from nbconvert import HTMLExporter
from playwright.sync_api import Page, expect

from browser.conftest import IN_BROWSER, Picture, write_notebook
from browser.desk import Desk

pytestmark = [pytest.mark.full, *IN_BROWSER]

CELLS = [
    "%load_ext nbddp",
    "%%ddp --nproc 2\nimport os, time\ndef train(lr):\n    for step in range(5):\n"
    "        nbddp.log(step=step, loss=lr / (step + 1))",
    "%%ddp --sweep lr=1,2,3\ntrain(lr)\nassert lr != 2, 'diverged'\n"
    "while lr == 3 and not os.path.exists('go_on'):\n    time.sleep(0.05)",
    "%%ddp\nrank",
    "%%ddp --scale 1,2\nfor step in range(10):\n    time.sleep(0.01 / world_size)\n"
    "    nbddp.log(step=step, loss=1.0)\n    dist.barrier()",
]


def wrong_for_somebody(page: Page) -> list[str]:
    """What axe-core finds in the tables."""
    tables = ("table[aria-label=runs]", "table[aria-label='world sizes']")
    context = {"include": [[f".nbddp:has({each})"] for each in tables]}
    results = Axe().run(page, context=context).response
    assert results["passes"], "it has looked at something"
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in results["violations"]]


def test_a_sweep_shows_how_far_it_is_and_stays_in_the_notebook(desk: Desk) -> None:
    name = "sweep.ipynb"
    write_notebook(desk.notebooks / name, *CELLS)
    with desk.open(name) as notebook:
        for cell in (0, 1):
            notebook.run(cell)
        notebook.begin(2)
        output = notebook.code_cell(2)
        rows = output.locator("table[aria-label='combinations of the sweep'] tbody tr")
        expect(rows).to_have_count(3, timeout=60_000)
        expect(output).to_contain_text("sweep, 3 of 3: lr=3", timeout=60_000)
        expect(rows.nth(0)).to_contain_text("ok")
        expect(rows.nth(1)).to_contain_text("failed: ranks 0-1: AssertionError: diverged")
        expect(rows.nth(2)).to_contain_text("running")
        (desk.notebooks / "go_on").touch()
        listed = output.locator("table[aria-label=runs] tbody tr")
        expect(listed).to_have_count(3, timeout=60_000)
        expect(output).to_contain_text("sweep of 3: 2 ok, 1 failed")
        results = output.locator("table[aria-label='what the runs came to'] tbody tr")
        expect(results).to_have_count(2)
        expect(rows).to_have_count(0)
        notebook.await_idle()
        notebook.run(3)
        notebook.run(4)
        scaled = notebook.code_cell(4)
        expect(scaled.locator("table[aria-label='world sizes'] tbody tr")).to_have_count(2)
        expect(scaled.locator("img[alt^='strong scaling: speed-up ']")).to_be_visible()
        expect(scaled).to_contain_text("scale of 6: 6 ok")
        expect(scaled).to_contain_text("strong scaling: ")
        assert wrong_for_somebody(notebook.page) == []
        notebook.save()
        assert notebook.problems == []
    saved = nbformat.read(desk.notebooks / name, as_version=4)
    body, _ = HTMLExporter().from_notebook_node(saved)
    for text in ("sweep of 3: 2 ok, 1 failed", "strong scaling: speed-up "):
        assert text in body


def test_the_panels_buttons_end_the_whole_sweep(desk: Desk) -> None:
    name = "ended.ipynb"
    sweep = "%%ddp --sweep lr={}\nnbddp.log(x=lr)\nwhile lr == {}:\n    time.sleep(0.05)"
    write_notebook(
        desk.notebooks / name, *CELLS[:2], sweep.format("1,2,3", 2), sweep.format("4,5", 4)
    )
    with desk.open(name) as notebook:
        for cell in (0, 1):
            notebook.run(cell)
        notebook.begin(2)
        expect(notebook.code_cell(2)).to_contain_text("sweep, 2 of 3: lr=2")
        notebook.press_twice("Stop")
        output = notebook.code_cell(2)
        expect(output).to_contain_text("sweep of 3: 1 ok, 1 ended by you, 1 not run")
        notebook.await_idle()
        notebook.begin(3)
        expect(notebook.code_cell(3)).to_contain_text("sweep, 1 of 2: lr=4")
        notebook.button("Interrupt").click()
        expect(notebook.code_cell(3)).to_contain_text("sweep of 2: 1 ended by you, 1 not run")
        notebook.await_idle()
        assert notebook.problems == []


def test_a_page_that_was_saved_and_loaded_again_in_a_sweep_sees_how_it_goes_on_and_ends(
    desk: Desk, picture: Picture
) -> None:
    path = desk.notebooks / "saved-and-loaded-again.ipynb"
    cell = "%%ddp --sweep lr=1,2,3\ntrain(lr)\nwhile not os.path.exists(f'go_on_{lr}'):\n"
    write_notebook(path, *CELLS[:2], f"{cell}    time.sleep(0.05)", "1 + 1")
    with desk.lab.open(path.name) as notebook:
        for each in (0, 1):
            notebook.run(each)
        notebook.begin(2)
        expect(notebook.button("Interrupt")).to_be_visible()
        notebook.save()
        notebook.reload()
        expect(notebook.button("Interrupt")).to_be_visible()
        (desk.notebooks / "go_on_1").touch()
        output = notebook.code_cell(2)
        expect(output).to_contain_text("sweep, 2 of 3: lr=2")
        expect(notebook.button("Interrupt")).to_be_visible()
        for lr in (2, 3):
            (desk.notebooks / f"go_on_{lr}").touch()
        expect(output).to_contain_text("sweep of 3: 3 ok")
        picture(notebook, "sweep-loaded-again")
        notebook.await_kernel()
        notebook.run(3)
