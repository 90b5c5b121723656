"""Who waits for whom, on a page: named while the cell runs, and drawn in what is saved."""

from __future__ import annotations

import re

import nbformat
import pytest
from playwright.sync_api import expect

from browser.conftest import IN_BROWSER, write_notebook
from browser.desk import Desk

pytestmark = [pytest.mark.full, *IN_BROWSER]

START = "%load_ext nbddp\n%ddp start --nproc 3"
TRAIN = """%%ddp --timeline
import time
from pathlib import Path
for step in range(2000):
    time.sleep(0.09 if rank == 2 else 0.04)
    dist.all_reduce(torch.ones(1))
    nbddp.log(step=step, loss=1.0)
    if step % 10 == 0:
        flag = torch.tensor([float(Path("enough").exists())])
        dist.broadcast(flag, 0)
        if flag.item():
            break
"""


def test_the_late_rank_is_named_in_the_panel_and_the_picture_is_saved(desk: Desk) -> None:
    name, enough = "timeline.ipynb", desk.notebooks / "enough"
    enough.unlink(missing_ok=True)
    write_notebook(desk.notebooks / name, START, TRAIN)
    with desk.open(name) as notebook:
        notebook.run(0)
        notebook.begin(1)
        cell = notebook.code_cell(1)
        expect(cell.locator(".nbddp-panel")).to_contain_text(
            re.compile(r"rank 2 .*\bwait"), timeout=60_000
        )
        enough.touch()
        picture = cell.locator("img[alt^='ranks as rows, time across']")
        expect(picture).to_be_visible(timeout=60_000)
        assert picture.evaluate("each => each.complete && each.naturalWidth > 1000")
        table = cell.locator("table[aria-label^='seconds that ranks waited']")
        expect(table.locator("tbody tr")).to_have_count(3)
        notebook.save()
        assert notebook.problems == []
    enough.unlink()
    outputs = nbformat.read(desk.notebooks / name, as_version=4).cells[1].outputs
    (shown,) = [
        each.data for each in outputs if "20 steps" in each.get("data", {}).get("text/plain", "")
    ]
    assert "data:image/png;base64," in shown["text/html"]
    assert re.search(r"^waited for +rank 0 +rank 1 +rank 2 +all$", shown["text/plain"], re.M)
