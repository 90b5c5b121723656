"""The list of runs and a comparison on a page: seen, turned, saved, and read without a kernel."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from nbconvert import HTMLExporter
from playwright.sync_api import Page, expect

from browser.conftest import IN_BROWSER, Picture, write_notebook
from browser.desk import Desk

pytestmark = [pytest.mark.full, *IN_BROWSER]

TRAIN = """%%ddp --nproc 2 --name beside{number}
nbddp.config(lr={rate}, batch=16)
loader = nbddp.loader(range(320), batch_size=16)
for step in range(40):
    loss = {rate} / (step + 1) + 0.1 * rank
    nbddp.log(step=step, loss=float("nan") if step == 30 and {rate} > 1 else loss)
"""
CELLS = [
    "%load_ext nbddp",
    TRAIN.format(number=1, rate=1.0),
    "%ddp stop",
    TRAIN.format(number=2, rate=3.0),
    "%ddp runs beside --sort loss",
    "%ddp compare beside1 beside2",
]


def wrong_for_somebody(page: Page) -> list[str]:
    """What axe-core finds in the list and in the comparison."""
    tables = ("table[aria-label=runs]", "table[aria-label='what the runs came to']")
    context = {"include": [[f".nbddp:has({each})"] for each in tables]}
    results = Axe().run(page, context=context).response
    assert results["passes"], "it has looked at something"
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in results["violations"]]


def test_runs_are_listed_and_compared_and_the_saved_notebook_shows_both(
    desk: Desk, picture: Picture, tmp_path: Path
) -> None:
    name = "beside.ipynb"
    write_notebook(desk.notebooks / name, *CELLS)
    with desk.open(name) as notebook:
        for cell in range(len(CELLS)):
            notebook.run(cell)
        listed = notebook.code_cell(4).locator("table[aria-label=runs]")
        expect(listed.locator("tbody tr")).to_have_count(2)
        expect(listed.locator("tbody tr").first).to_contain_text("beside1")
        expect(listed).to_contain_text("lr")
        expect(listed.locator("svg").first).to_be_visible()
        compared = notebook.code_cell(5)
        expect(compared).to_contain_text("2 values not finite (B)")
        differs = compared.locator("table[aria-label='in what the runs differ']")
        expect(differs.locator("tbody tr")).to_have_text(["lr13"])
        expect(compared.locator(".nbddp-plot svg")).to_have_count(1)
        picture(notebook, "compare")
        expect(compared.locator(".nbddp-smooth").first).to_be_hidden()
        compared.get_by_label("smooth").check()
        expect(compared.locator(".nbddp-smooth").first).to_be_visible()
        notebook.save()
        assert notebook.problems == []
    saved = nbformat.read(desk.notebooks / name, as_version=4)
    for theme in ("light", "dark"):
        html, _ = HTMLExporter(theme=theme).from_notebook_node(saved)
        (tmp_path / f"{theme}.html").write_text(html)
    page = desk.lab.browser().new_page()
    for theme in ("light", "dark"):
        page.goto((tmp_path / f"{theme}.html").as_uri(), wait_until="domcontentloaded")
        expect(page.locator("table[aria-label=runs] svg").first).to_be_visible()
        expect(page.locator("table[aria-label='what the runs came to']")).to_be_visible()
        page.get_by_label("smooth").first.check()
        expect(page.locator(".nbddp-smooth").first).to_be_visible()
        assert wrong_for_somebody(page) == []
        page.screenshot(path=tmp_path / f"{theme}.png", full_page=True)
    page.close()
