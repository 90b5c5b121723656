"""The list of runs and a comparison on a page: seen, turned, saved, and read without a kernel."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from nbconvert import HTMLExporter
from playwright.sync_api import Locator, Page, expect

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


def charts_of(output: Locator) -> list[str]:
    """Over what the charts that one sees are drawn."""
    seen = output.locator(".nbddp-plot").filter(visible=True).all()
    found = [re.search(r"nbddp-at-(\w+)", each.get_attribute("class") or "") for each in seen]
    return [each[1] for each in found if each]


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
        assert charts_of(compared) == ["step"]
        picture(notebook, "compare")
        compared.get_by_label("over time", exact=True).check()
        assert charts_of(compared) == ["time"]
        compared.get_by_label("over samples", exact=True).check()
        assert charts_of(compared) == ["samples", "time"]
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
        assert charts_of(page.locator("body")) == ["step"]
        page.get_by_label("over time", exact=True).check()
        assert charts_of(page.locator("body")) == ["time"]
        assert wrong_for_somebody(page) == []
        page.screenshot(path=tmp_path / f"{theme}.png", full_page=True)
    page.close()
