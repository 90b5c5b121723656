"""A panel of many ranks: one line, a grid that unfolds, and a record of the same length.

On several nodes there is a row for each of them.
"""

from __future__ import annotations

import pytest

from browser.conftest import IN_BROWSER, Picture, write_notebook
from browser.desk import Desk

pytestmark = [pytest.mark.full, *IN_BROWSER]

START = "%load_ext nbddp\n%ddp start --nproc 12"
TRAIN = """%%ddp
import time
for step in nbddp.track(range(1000)):
    time.sleep(0.1)
    nbddp.log(step=step, loss=1 / (step + 1) + rank, accuracy=step)
    print("step", step)
"""


def test_many_ranks_are_one_expandable_line_and_the_record_is_short(
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


def test_many_ranks_on_nodes_are_one_row_per_node_and_outliers_follow(
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
