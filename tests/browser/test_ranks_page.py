"""Ranks on a page: the slow rank is marked, many ranks unfold, and the record keeps both."""

from dataclasses import replace

import pytest
from playwright.sync_api import Locator, expect

from browser.conftest import IN_BROWSER
from browser.lab import Lab, LabNotebook
from nbddp.record.rank_monitor import LoopProgress
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.html_pieces import STYLE_SHEET
from nbddp.ui.report.rank_table import rank_blocks
from nbddp.ui.report.render import blocks_html

pytestmark = [pytest.mark.full, *IN_BROWSER]

CELLS = [
    "%ddp restart --nproc 4",
    """%%ddp
import time
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
kept = []
for step in nbddp.track(range(4000), label="epoch 1"):
    time.sleep(0.4 if rank == 2 else 0.2)
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    kept.append(torch.ones(100_000))
    nbddp.log(step=step, loss=loss.item())
    print("step", step)
""",
    "# a crowd\n%ddp restart --nproc 9",
]


def output(notebook: LabNotebook) -> Locator:
    return notebook.code_cell(1).locator(".jp-Cell-outputArea")


def test_slow_rank_is_marked_and_memory_is_shown_as_curves(notebook: LabNotebook) -> None:
    notebook.begin(1)
    notebook.await_text(1, r"^2 ↓ slow", timeout=60)
    notebook.await_text(1, r"rank 2 .*\bwait")
    mark = output(notebook).locator(".nbddp-ranks [title^='slow: ']")
    assert mark.count() == 1, "and no other rank is"
    assert output(notebook).locator("svg[aria-label^='memory: ']").count() == 4
    assert output(notebook).locator("svg[aria-label^='steps per second: ']").count() == 4
    notebook.button("Interrupt").click()
    notebook.await_idle()
    kept = output(notebook).locator("details[open] .nbddp-ranks")
    assert kept.locator("[title^='slow: ']").count() == 1
    assert kept.locator("svg[aria-label^='memory: ']:visible").count() == 4
    image = kept.locator("img[alt^='memory: ']").first
    expect(image).to_be_hidden()
    notebook.page.set_viewport_size({"width": 1010, "height": 1000})
    is_cut = "cells => cells.map(it => it.scrollWidth > it.clientWidth)"
    assert not any(kept.locator("td:has(svg)").evaluate_all(is_cut)), "their numbers are whole"
    sheets = notebook.page.locator(".jp-OutputArea style")
    sheets.evaluate_all("sheets => sheets.forEach(each => each.remove())")
    expect(image).to_be_visible()
    assert image.evaluate("it => it.decode().then(() => it.naturalWidth)") == 32


CODE = "total = model(batch).square().mean(); the_name_of_a_long_variable = total.item()"
BARS = (LoopProgress("epoch", 0, 20, 4.0), LoopProgress("steps of this epoch", 12, 50, 4.0))


@pytest.mark.parametrize("width", [460, 700])  # of the panel, with and without the file browser
@pytest.mark.parametrize("bars", [(), BARS])
def test_table_of_ranks_fits_a_narrow_page(
    lab: Lab, bars: tuple[LoopProgress, ...], width: int
) -> None:
    rank = RankSnapshot(
        rank=0,
        state="waiting",
        line=4,
        code=CODE,
        seconds=7.2,
        collective="all_reduce #12 float [1, 20, 300]",
        step=10.0,
        steps_per_second=2.5,
        cpu=37.0,
        memory=190 << 20,
        progress_bars=bars,
    )
    table = blocks_html(rank_blocks([rank, replace(rank, rank=1)]))
    page = lab.browser().new_page(viewport={"width": width, "height": 500})
    page.set_content(f'<body>{STYLE_SHEET}<div class="nbddp" role="region">{table}</div></body>')
    ranks = page.locator(".nbddp")
    assert ranks.evaluate("it => it.scrollWidth <= it.clientWidth"), "it does not scroll"
    code = page.locator(".nbddp-clip:has(code)").first
    assert code.evaluate("it => it.scrollHeight > it.clientHeight"), "the rest is cut off"
    assert code.evaluate("it => it.clientWidth") > 30
    ends_inside = """it => {
      const left = it.getBoundingClientRect(), around = it.parentNode.getBoundingClientRect();
      return left.right <= around.right + 0.5 && left.bottom <= around.bottom + 0.5 }"""
    assert all(each.evaluate(ends_inside) for each in page.locator(".nbddp-left").all())
    heights = page.locator("tbody tr").evaluate_all("rows => rows.map(it => it.offsetHeight)")
    assert max(heights) < 25 * max(1, len(bars))
    page.close()


def test_many_ranks_are_one_expandable_line_and_the_record_is_short(notebook: LabNotebook) -> None:
    notebook.run(2)
    notebook.begin(1)
    output(notebook).locator(".nbddp-shots svg").first.wait_for()
    notebook.await_text(1, "rank 2 is the slowest", timeout=90)
    opens = notebook.button("All ranks")
    before = opens.bounding_box()
    opens.click()
    field = output(notebook).locator(".nbddp-field", has_text="2↓")
    field.wait_for()
    assert output(notebook).locator(".nbddp-field").count() == 9
    assert opens.bounding_box() == before, "the same place closes it"
    area = notebook.code_cell(1).locator(".jp-OutputArea")
    live = area.evaluate("it => it.offsetHeight")
    notebook.button("Interrupt").click()
    notebook.await_idle()
    notebook.await_text(1, "^9 interrupted$")
    assert area.evaluate("it => it.offsetHeight") < live + 100
