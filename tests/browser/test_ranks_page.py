"""The ranks on a page: the slow one is marked, many are a line or a row for each node."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, expect

from browser.conftest import IN_BROWSER, Picture, write_notebook
from browser.desk import Desk
from browser.lab import LabNotebook

pytestmark = [pytest.mark.full, *IN_BROWSER]

LOAD = "%reload_ext nbddp"
RESTART = "%ddp restart --nproc 4"
STOP = "%ddp stop"
CROWD = "# a crowd\n%ddp restart --nproc 9"
TRAIN = """%%ddp
import time
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
kept = []
for step in nbddp.track(range(4000), label="epoch 1"):
    time.sleep(0.4 if rank == 2 else 0.2)
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    kept.append(torch.ones(100_000))
    nbddp.log(step=step, loss=loss.item())
"""
WHY = r"slow: .* \d\d % .* \d+\.\d s"
SCALE = r"now \d+ MiB, axis 0 to \d+ MiB, last \d+ s"


@pytest.fixture(scope="module")
def shared(lasting: Desk) -> Iterator[LabNotebook]:
    """One page and one kernel for all tests."""
    write_notebook(lasting.notebooks / "ranks.ipynb", RESTART, TRAIN, CROWD, LOAD, STOP)
    with lasting.open("ranks.ipynb") as notebook:
        notebook.run(3)
        yield notebook


def output(notebook: LabNotebook) -> Locator:
    return notebook.code_cell(1).locator(".jp-Cell-outputArea")


def test_the_rank_that_the_others_wait_for_is_marked_and_its_memory_is_a_curve(
    notebook: LabNotebook, picture: Picture
) -> None:
    notebook.begin(1)
    notebook.await_text(1, r"^2 ↓ slow", timeout=60)
    assert re.search(r"4 running .*slowest 2|\d (running|waiting) .*slowest 2", notebook.text(1))
    mark = output(notebook).locator(".nbddp-ranks [title^='slow: ']")
    assert mark.count() == 1, "and no other rank is"
    assert re.fullmatch(WHY, mark.get_attribute("title") or "")
    assert mark.get_attribute("aria-label") == mark.get_attribute("title")
    curves = output(notebook).locator(".nbddp-ranks svg[role=img][aria-label^='memory: ']")
    assert curves.count() == 4
    said = curves.first.get_attribute("aria-label") or ""
    assert re.fullmatch(f"memory: {SCALE}", said)
    assert output(notebook).locator("svg[aria-label^='steps per second: ']").count() == 4
    picture(notebook, "ranks-running")
    notebook.button("Interrupt").click()
    notebook.await_idle()
    kept = output(notebook).locator("details[open] .nbddp-ranks")
    assert re.fullmatch(WHY, kept.locator("[title^='slow: ']").get_attribute("title") or "")
    assert kept.locator("svg[aria-label^='memory: ']:visible").count() == 4
    image = kept.locator("img[alt^='memory: ']").first
    expect(image).to_be_hidden()
    picture(notebook, "ranks-record")
    sheets = notebook.page.locator(".jp-OutputArea style")
    sheets.evaluate_all("sheets => sheets.forEach(each => each.remove())")
    expect(image).to_be_visible()
    assert image.evaluate("it => it.decode().then(() => it.naturalWidth)") == 32


def test_of_many_ranks_the_slow_one_is_marked_in_the_grid(
    notebook: LabNotebook, picture: Picture
) -> None:
    notebook.run(2)
    notebook.begin(1)
    notebook.await_text(1, "slowest 2", timeout=90)
    notebook.button("All ranks").click()
    field = output(notebook).locator(".nbddp-field", has_text="2↓")
    field.wait_for()
    said = rf"rank 2: (running|waiting) · step \d+ · .* · \d+ MiB · {WHY}"
    assert re.fullmatch(said, field.get_attribute("title") or "")
    assert output(notebook).locator(".nbddp-field").count() == 9
    picture(notebook, "ranks-grid")
    notebook.button("Interrupt").click()
    notebook.await_idle()


TWELVE = "%load_ext nbddp\n%ddp start --nproc 12"
MANY_TRAIN = """%%ddp
import time
for step in nbddp.track(range(1000)):
    time.sleep(0.1)
    nbddp.log(step=step, loss=1 / (step + 1) + rank, accuracy=step)
    print("step", step)
"""


def test_the_ranks_are_a_line_that_opens_and_the_record_is_not_much_higher(
    desk: Desk, picture: Picture
) -> None:
    write_notebook(desk.notebooks / "many.ipynb", TWELVE, MANY_TRAIN)
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
        picture(notebook, "many-ranks-record")
        assert cell.locator(".jp-OutputArea").evaluate("it => it.offsetHeight") < live + 100
        assert notebook.problems == []


NODES = "%load_ext nbddp\n%ddp nodes --local 3 --nproc-per-node 3 --wait 100\n%ddp start"
HANG = """%%ddp
import time
for step in range(30):
    time.sleep(0.1)
    nbddp.log(step=step, loss=1 / (step + 1) + rank)
if rank == 4:
    time.sleep(1000)
dist.barrier()
"""


def test_many_ranks_on_nodes_are_a_row_for_each_node_and_who_differs_stands_below(
    desk: Desk, picture: Picture
) -> None:
    write_notebook(desk.notebooks / "nodes.ipynb", NODES, HANG, "%ddp stop")
    with desk.open("nodes.ipynb") as notebook:
        notebook.run(0, timeout=200)
        notebook.begin(1)
        cell = notebook.code_cell(1)
        rows = cell.locator(".nbddp-panel table[aria-label=nodes] tbody tr")
        rows.nth(2).wait_for()
        picture(notebook, "many-nodes")
        assert rows.count() == 3
        rows.filter(has_text="2 waiting, 1 running").wait_for(timeout=60_000)
        rows.nth(11).wait_for()  # no rank has moved for some time
        states = dict(row.split("\t")[:2] for row in rows.all_inner_texts())
        assert "4" in states
        notebook.button("All ranks").click()
        cell.locator(".nbddp-field").nth(8).wait_for()
        picture(notebook, "many-nodes-hang")
        notebook.button("Interrupt").click()
        notebook.await_idle()
        picture(notebook, "many-nodes-record")
        notebook.run(2)
        assert notebook.problems == []
