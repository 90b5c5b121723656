"""Traces, runs and sweeps on a page, live and saved without a kernel."""

import gzip
import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser.conftest import IN_BROWSER, START
from browser.lab import accessibility_problems
from browser.lab_page import LabPage
from nbddp.extensions.trace.merge import OUTSIDE_OPERATORS
from nbddp.extensions.trace.rank import PID_RANGE

pytestmark = [pytest.mark.full, *IN_BROWSER]

TRACED = """%%ddp --trace 2:4
import time
for step in range(8):
    time.sleep(0.05 if rank == 1 else 0.01)
    dist.all_reduce(torch.ones(1))
    nbddp.log(step=step, loss=1.0)
"""


def test_trace_link_downloads_the_file_and_the_table_compares_ranks(lab_page: LabPage) -> None:
    with lab_page.open("trace.ipynb", START, TRACED) as notebook:
        notebook.run(0)
        notebook.run(1)
        cell = notebook.code_cell(1)
        table = cell.locator("table[aria-label='milliseconds in operators, by rank']")
        expect(table).to_contain_text(OUTSIDE_OPERATORS, timeout=30_000)
        expect(table).to_contain_text("gloo:all_reduce, with the waiting")
        with notebook.page.expect_download() as downloaded:
            cell.get_by_role("link", name="download cell").click()
        data = Path(downloaded.value.path()).read_bytes()
        is_packed = downloaded.value.suggested_filename.endswith(".gz")
        events = json.loads(gzip.decompress(data) if is_packed else data)["traceEvents"]
        assert {each["pid"] // PID_RANGE for each in events} == {0, 1}


LOGS = """%%ddp --nproc 2 --name beside{number}
nbddp.config(lr={rate}, batch=16)
nbddp.config(**{{f"a_long_name_of_option_{{i}}": "{rate} and more " * 20 for i in range(9)}})
loader = nbddp.loader(range(320), batch_size=16)
for step in range(40):
    nbddp.log(step=step, loss={rate} / (step + 1) + 0.1 * rank)
"""
BESIDE = [
    "%load_ext nbddp",
    LOGS.format(number=1, rate=1.0),
    "%ddp stop",
    LOGS.format(number=2, rate=3.0),
    "%ddp runs beside --sort loss",
    "%ddp compare beside1 beside2",
]


def around_tables(*labels: str) -> list[str]:
    return [f".nbddp:has(table[aria-label='{each}'])" for each in labels]


def test_saved_notebook_shows_list_and_comparison_of_runs(
    lab_page: LabPage, tmp_path: Path
) -> None:
    with lab_page.open("beside.ipynb", *BESIDE) as notebook:
        for cell in range(len(BESIDE)):
            notebook.run(cell)
        listed = notebook.code_cell(4).locator("table[aria-label=runs] tbody tr")
        expect(listed).to_have_count(2)
        expect(notebook.code_cell(5).locator(".nbddp-plot svg")).to_have_count(1)
        notebook.save()
    page = lab_page.lab.browser().new_page()
    for theme in ("light", "dark"):
        html = tmp_path / f"{theme}.html"
        html.write_text(lab_page.exported("beside.ipynb", theme=theme))
        page.goto(html.as_uri(), wait_until="domcontentloaded")
        expect(page.locator("table[aria-label=runs] svg").first).to_be_visible()
        expect(page.locator(".nbddp-smooth").first).to_be_hidden()
        fits = "region => region.scrollWidth <= region.clientWidth"
        assert page.locator(around_tables("runs")[0]).evaluate(fits)
        page.get_by_label("smooth").first.check()
        expect(page.locator(".nbddp-smooth").first).to_be_visible()
        tables = around_tables("runs", "results of the runs")
        assert accessibility_problems(page, *tables) == []
    page.close()


SWEEPS = [
    "%load_ext nbddp",
    "%%ddp --nproc 2\nimport os, time\ndef train(lr):\n    for step in range(5):\n"
    "        nbddp.log(step=step, loss=lr / (step + 1))",
    "%%ddp --sweep lr=1,2,3\ntrain(lr)\nassert lr != 2, 'diverged'\n"
    "while lr == 3 and not os.path.exists('go_on'):\n    time.sleep(0.05)",
    "%%ddp --scale 1,2\nfor step in range(10):\n    time.sleep(0.01 / world_size)\n"
    "    nbddp.log(step=step, loss=1.0)\n    dist.barrier()",
]


def test_sweep_shows_its_progress_and_its_results_are_saved(lab_page: LabPage) -> None:
    with lab_page.open("sweep.ipynb", *SWEEPS) as notebook:
        for cell in (0, 1):
            notebook.run(cell)
        notebook.begin(2)
        output = notebook.code_cell(2)
        rows = output.locator("table[aria-label='combinations of the sweep'] tbody tr")
        expect(rows).to_have_count(3, timeout=60_000)
        expect(rows.nth(1)).to_contain_text("failed: ranks 0-1: ", timeout=60_000)
        expect(rows.nth(2)).to_contain_text("running", timeout=60_000)
        (lab_page.notebooks / "go_on").touch()
        listed = output.locator("table[aria-label=runs] tbody tr")
        expect(listed).to_have_count(3, timeout=60_000)
        results = output.locator("table[aria-label='results of the runs'] tbody tr")
        expect(results).to_have_count(2)
        expect(rows).to_have_count(0)
        notebook.await_idle()
        notebook.run(3)
        scaled = notebook.code_cell(3)
        expect(scaled.locator("table[aria-label='world sizes'] tbody tr")).to_have_count(2)
        expect(scaled.locator("img[alt^='strong scaling: speed-up ']")).to_be_visible()
        assert accessibility_problems(notebook.page, *around_tables("runs", "world sizes")) == []
        notebook.save()
    body = lab_page.exported("sweep.ipynb")
    for text in ("sweep of 3: 2 ok, 1 failed", "strong scaling: speed-up "):
        assert text in body


def test_stop_button_ends_the_whole_sweep(lab_page: LabPage) -> None:
    sweep = "%%ddp --sweep lr=1,2,3\nnbddp.log(x=lr)\nwhile lr == 2:\n    time.sleep(0.05)"
    with lab_page.open("ended.ipynb", *SWEEPS[:2], sweep) as notebook:
        for cell in (0, 1):
            notebook.run(cell)
        notebook.begin(2)
        expect(notebook.code_cell(2)).to_contain_text("sweep, 2 of 3: lr=2")
        notebook.press_twice("Stop")
        output = notebook.code_cell(2)
        expect(output).to_contain_text("sweep of 3: 1 ok, 1 ended by you, 1 not run")
        notebook.await_idle()


def test_reloaded_page_shows_the_progress_and_end_of_a_sweep(lab_page: LabPage) -> None:
    sweep = "%%ddp --sweep lr=1,2,3\ntrain(lr)\nwhile not os.path.exists(f'go_on_{lr}'):\n"
    cells = [*SWEEPS[:2], f"{sweep}    time.sleep(0.05)", "1 + 1"]
    with lab_page.open_alone("loaded-again.ipynb", *cells) as notebook:
        for cell in (0, 1):
            notebook.run(cell)
        notebook.begin(2)
        expect(notebook.button("Interrupt")).to_be_visible()
        notebook.save()
        notebook.reload()
        expect(notebook.button("Interrupt")).to_be_visible()
        (lab_page.notebooks / "go_on_1").touch()
        output = notebook.code_cell(2)
        expect(output).to_contain_text("sweep, 2 of 3: lr=2")
        expect(notebook.button("Interrupt")).to_be_visible()
        for lr in (2, 3):
            (lab_page.notebooks / f"go_on_{lr}").touch()
        expect(output).to_contain_text("sweep of 3: 3 ok")
        notebook.await_kernel()
        notebook.run(3)
