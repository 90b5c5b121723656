"""What was traced, on a page: a link that downloads the file, and a table."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser.conftest import IN_BROWSER, START, Picture, write_notebook
from browser.desk import Desk
from nbddp.record.trace import REST
from nbddp.worker.watch.profiler import PID_RANGE

pytestmark = [pytest.mark.full, *IN_BROWSER]

TRAIN = """%%ddp --trace 2:4
import time
for step in range(8):
    time.sleep(0.05 if rank == 1 else 0.01)
    dist.all_reduce(torch.ones(1))
    nbddp.log(step=step, loss=1.0)
"""


def test_the_link_downloads_the_file_and_the_table_says_what_differs(
    desk: Desk, picture: Picture
) -> None:
    name = "trace.ipynb"
    write_notebook(desk.notebooks / name, START, TRAIN)
    with desk.open(name) as notebook:
        notebook.run(0)
        notebook.run(1)
        cell = notebook.code_cell(1)
        table = cell.locator("table[aria-label='milliseconds in operators, by rank']")
        expect(table).to_contain_text(REST, timeout=30_000)
        expect(table).to_contain_text("gloo:all_reduce, with the waiting")
        picture(notebook, "trace")
        with notebook.page.expect_download() as downloaded:
            cell.get_by_role("link", name="download cell").click()
        data = Path(downloaded.value.path()).read_bytes()
        is_packed = downloaded.value.suggested_filename.endswith(".gz")
        events = json.loads(gzip.decompress(data) if is_packed else data)["traceEvents"]
        assert {each["pid"] // PID_RANGE for each in events} == {0, 1}
        assert notebook.problems == []
