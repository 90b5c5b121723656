"""The panel in a real browser: its log while lines come, a background cell, hostile text."""

import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator

from browser.conftest import IN_BROWSER
from browser.lab import LabNotebook

pytestmark = [pytest.mark.full, *IN_BROWSER]

CELLS = [
    "%ddp restart --nproc 4",
    """%%ddp
import time
for step in range(4000):
    time.sleep(0.05)
    print(f"step {step} of rank {rank}.")
""",
    "%%ddp\nimport time\nfor step in range(400): print(f'line {step}'); time.sleep(0.02)",
    """%%ddp
import time
evil = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 2</script>"
for step in nbddp.track(range(40), label=evil):
    print(evil)
    print("\\x1b]8;;javascript:window.hacked=3\\x07click\\x1b]8;;\\x07")
    nbddp.log(step=step, **{evil: step})
    time.sleep(0.2)
raise ValueError(evil)""",
    """%%ddp --no-wait
import time
for step in range(400):
    time.sleep(0.05)
    print("tick", step)""",
]
# the text node of the log that has a text
FIND = """text => {
  const log = [...document.querySelectorAll('.nbddp-scroll')].at(-1);
  const walk = document.createTreeWalker(log, NodeFilter.SHOW_TEXT);
  while (walk.nextNode() && !walk.currentNode.data.includes(text));
  const node = walk.currentNode, range = document.createRange();
  if (!node.data.includes(text)) throw new Error(text);
"""
SELECT = f"""{FIND}
  range.setStartBefore(node.previousSibling); // the tag
  range.setEnd(node, node.data.indexOf(text) + text.length);
  window.getSelection().removeAllRanges();
  window.getSelection().addRange(range);
  return window.getSelection().toString();
}}"""
SELECTED = "window.getSelection().toString()"
PLACE = f"""{FIND}
  range.selectNodeContents(node);
  return range.getBoundingClientRect().top - log.getBoundingClientRect().top;
}}"""


@pytest.fixture
def printing(notebook: LabNotebook) -> Iterator[LabNotebook]:
    notebook.begin(1)
    log(notebook).locator(".nbddp-log").nth(1).wait_for()  # the first page is not sent again
    yield notebook
    notebook.button("Interrupt").click()
    notebook.await_idle()


def log(notebook: LabNotebook, cell: int = 1) -> Locator:
    """The part of the panel that scrolls."""
    return notebook.code_cell(cell).locator(".nbddp-scroll")


def newest(notebook: LabNotebook) -> int:
    return max(map(int, re.findall(r"step (\d+) of", log(notebook).inner_text())))


def await_more(notebook: LabNotebook) -> None:
    """Wait until 20 more lines of each rank are there."""
    notebook.await_text(1, rf"step {newest(notebook) + 20} of", timeout=30)


def place(notebook: LabNotebook, text: str) -> float:
    """How far below the log's upper edge a line stands."""
    return float(notebook.page.evaluate(PLACE, text))


def await_rest(notebook: LabNotebook, text: str) -> float:
    """Where a line stands, once the log has been scrolled up and glides no more."""
    until = time.monotonic() + 30
    while True:
        at = place(notebook, text)
        notebook.page.wait_for_timeout(300)
        is_up = log(notebook).evaluate("it => it.scrollTop") < 0
        if is_up and abs(place(notebook, text) - at) < 0.5:
            return at
        assert time.monotonic() < until, "it glides"


def below_view(scroll: Locator) -> float:
    """How far the end of the newest line is below the log's lower edge."""
    return float(
        scroll.evaluate(
            "it => [...it.querySelectorAll('.nbddp-log')].at(-1).getBoundingClientRect().bottom"
            " - it.getBoundingClientRect().bottom"
        )
    )


def test_text_selection_survives_new_lines_and_the_times_button(printing: LabNotebook) -> None:
    assert not re.search(r"\d\d:\d\d:\d\d", log(printing).inner_text())
    before = printing.page.evaluate(SELECT, "step 3 of rank 2")
    assert before == "[rank 2] step 3 of rank 2"
    for _ in range(3):
        await_more(printing)
        assert printing.page.evaluate(SELECTED) == before
    printing.button("Times").click()
    printing.await_text(1, r"^\d\d:\d\d:\d\d\.\d \[rank 1\] step")
    assert printing.page.evaluate(SELECTED) == before
    printing.button("Times").click()
    log(printing).locator(".nbddp-time").first.wait_for(state="hidden")


def test_log_follows_new_lines_only_at_its_end(printing: LabNotebook) -> None:
    scroll = log(printing)
    assert scroll.evaluate("it => it.clientHeight") <= 260
    for _ in range(3):
        await_more(printing)
        assert below_view(scroll) <= 1, "the newest line is in view"
    scroll.hover()
    printing.page.mouse.wheel(0, -300)
    step = newest(printing) - 10
    at = await_rest(printing, f"step {step} of rank 1")
    for _ in range(3):
        await_more(printing)
        assert place(printing, f"step {step} of rank 1") == pytest.approx(at, abs=1)
    while scroll.evaluate("it => it.scrollTop") < 0:  # it glides, and lines come meanwhile
        printing.page.mouse.wheel(0, 10_000)
        printing.page.wait_for_timeout(100)
    await_more(printing)
    assert below_view(scroll) <= 1


def test_log_of_the_record_is_as_high_as_that_of_the_panel(notebook: LabNotebook) -> None:
    notebook.begin(2)
    notebook.await_text(2, r"^\[rank 3\] line 40$")
    live = log(notebook, 2).evaluate("it => it.offsetHeight")
    assert live > 200
    notebook.code_cell(2).locator("input[type=text]").fill("line 7")
    notebook.await_text(2, r"\d+ of [\d,]+ lines$")
    notebook.await_idle()
    kept = notebook.code_cell(2).locator(".nbddp-kept").first
    assert kept.evaluate("it => it.offsetHeight") == live
    assert re.search(r"^\[rank \d\] line 398$", notebook.text(2), re.MULTILINE), "all is shown"
    assert kept.evaluate("it => it.scrollTop") == 0  # of a column-reverse: the end is in view
    bottom = kept.evaluate("it => it.getBoundingClientRect().bottom")
    last = kept.locator("pre").evaluate("it => it.getBoundingClientRect().bottom")
    assert last <= bottom + 1
    top = kept.evaluate("it => it.getBoundingClientRect().top")
    first = kept.locator("pre").evaluate("it => it.getBoundingClientRect().top")
    assert (top + 1 - first) % 17 == pytest.approx(0, abs=0.5), "the first row is whole"
    assert "earlier lines in .nbddp/runs/" in notebook.text(2)


def test_buttons_work_for_a_cell_that_does_not_block(notebook: LabNotebook) -> None:
    notebook.run(4)  # returns at once
    notebook.await_text(4, r"running [\s\S]*tick 5$")
    notebook.button("Interrupt").click()
    notebook.await_text(4, "^interrupted · ")


def test_output_and_names_of_ranks_are_escaped_as_text(notebook: LabNotebook) -> None:
    notebook.begin(3)
    output = notebook.code_cell(3).locator(".jp-Cell-outputArea")
    output.locator(".nbddp-shots svg").wait_for()
    notebook.await_idle()
    assert "[rank 1] <img src=x onerror='window.hacked = 1'>" in notebook.text(3)
    assert output.locator("img[src='x'], script, a[href]").count() == 0
    assert notebook.page.evaluate("window.hacked ?? 'safe'") == "safe"
