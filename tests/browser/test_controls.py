"""A panel's buttons in a real page: layout, confirmation, and actions after a failure."""

import re

import pytest
from limits import limits_source
from playwright.sync_api import ViewportSize, expect

from browser.conftest import IN_BROWSER, START, TRAIN
from browser.lab import LabNotebook
from browser.lab_page import LabPage

pytestmark = IN_BROWSER

# a page at 200 %, or beside another window; the wrap around a row of buttons cuts what sticks out
NARROW: ViewportSize = {"width": 620, "height": 700}
CUT_OFF = """rows => rows.flatMap(row => {
    const box = row.closest('.nbddp-panel, .jp-OutputArea-output').getBoundingClientRect();
    const inside = row.querySelectorAll('button, select, input');
    return [...inside].filter(each => each.offsetWidth > 0
        && each.getBoundingClientRect().right > box.right).map(each => each.innerText);
})"""


@pytest.mark.gate_runs("Stop")
@pytest.mark.parametrize(
    ("button", "outcome", "next_cell"),
    [
        ("Stop", "ended by a stop · ", "NameError"),
        ("Restart", "ended by a restart · ", "NameError"),
        ("Kill", "failed on rank 1 · ", "rank 1 was killed by you"),
    ],
)
def test_button_ends_the_cell_and_leaves_a_record(
    training: LabNotebook, button: str, outcome: str, next_cell: str
) -> None:
    training.page.locator(".nbddp-buttons select").select_option("1")
    training.press_twice(button)
    training.await_idle()
    text = training.text(1)
    assert text.startswith(outcome)
    causes = text.partition("rank\tstate")[0]
    assert ("rank 1 was killed by you" in causes) == (button == "Kill")
    assert not re.search(r"\brank 1\b.*SIGKILL", causes)
    assert "SIGTERM" not in causes  # the user ended them: no failure
    training.run(3)
    training.await_text(3, next_cell)


@pytest.mark.gate_runs("stopped")
@pytest.mark.parametrize("is_interrupted", [True, False], ids=["stopped", "done"])
def test_running_cell_that_is_run_again_keeps_its_panel(
    training: LabNotebook, lab_page: LabPage, is_interrupted: bool
) -> None:
    panel = training.code_cell(1).locator(".nbddp-panel")
    for _ in range(2):
        panel.evaluate("panel => panel.classList.add('before')")
        training.code_cell(1).locator(".cm-content").click()
        training.page.keyboard.press("Control+Enter")
        expect(panel.and_(training.page.locator(":not(.before)"))).to_be_visible()
    if is_interrupted:
        training.button("Interrupt").click()
        training.await_text(1, "^interrupted · ")
    else:
        (lab_page.notebooks / "enough").touch()
        training.await_text(1, "^done on ")
    training.await_idle()
    outcomes = re.findall("^(interrupted|done) ", training.text(1), re.MULTILINE)
    assert outcomes == ["interrupted" if is_interrupted else "done"]
    count = training.js("return panel.content.widgets[1].model.executionCount")
    assert (count is None) == is_interrupted  # an interrupt cancels the waiting run


def test_panel_header_stays_visible_while_scrolling(training: LabNotebook) -> None:
    training.page.set_viewport_size({"width": 1000, "height": 500})
    training.code_cell(1).locator(".nbddp-shots svg").nth(3).wait_for()
    training.page.locator(".jp-WindowedPanel-outer").hover()
    top = "document.querySelector('.jp-WindowedPanel-outer').getBoundingClientRect().top"
    panel = "document.querySelector('.nbddp-panel').getBoundingClientRect().top"
    for _ in range(20):  # until the panel's own top is out of sight
        training.page.mouse.wheel(0, 100)
        training.page.wait_for_timeout(50)
        if training.page.evaluate(f"{panel} < {top} - 150"):
            break
    assert training.page.evaluate(f"{panel} < {top} - 150"), "it was scrolled"
    head = "document.querySelector('.nbddp-head').getBoundingClientRect().top"
    assert abs(training.page.evaluate(f"{head} - {top}")) < 3
    training.button("Interrupt").click()
    training.await_idle()
    assert training.text(1).startswith("interrupted · ")


def test_buttons_fit_in_a_narrow_page(training: LabNotebook) -> None:
    training.code_cell(1).locator(".nbddp-shots svg").nth(3).wait_for()
    training.page.set_viewport_size(NARROW)
    training.code_cell(1).locator(".nbddp-head").scroll_into_view_if_needed()
    rows = training.code_cell(1).locator(".nbddp-buttons, .nbddp-choice")
    assert rows.count() == 3
    assert rows.evaluate_all(CUT_OFF) == []
    training.press_twice("Kill")
    training.await_idle()
    training.await_text(1, "^failed on rank 0 · ")
    row = training.code_cell(1).locator(".nbddp-aftermath")
    row.scroll_into_view_if_needed()
    assert row.evaluate_all(CUT_OFF) == []


SHORT = """%%ddp
import time
print("early")
time.sleep(0.6)
print("late")
"""
OUTPUT = "panel.content.widgets[1].outputArea.node"
HEIGHTS = f"""
const area = {OUTPUT};
window.heights = [];
new ResizeObserver(() => window.heights.push(area.offsetHeight)).observe(area);
"""


def test_output_of_a_short_cell_never_shrinks(lab_page: LabPage) -> None:
    cells = [limits_source(panel_opens_after=seconds) for seconds in (60.0, 1.0)]
    with lab_page.open("short.ipynb", START, SHORT, *cells) as notebook:
        notebook.run(0)
        notebook.run(2)
        for _ in range(3):
            notebook.js("panel.content.widgets[1].model.outputs.clear()")  # or its height counts
            notebook.await_js(f"return {OUTPUT}.offsetHeight === 0")
            notebook.js(HEIGHTS)
            notebook.run(1)
            notebook.await_text(1, r"^done on ranks 0-1 · [\s\S]*late$")
            heights = [each for each in notebook.js("return window.heights") if each]
            assert heights, "it is watched"
            assert heights == sorted(heights), "what was drawn is not taken away again"
        notebook.run(3)


def test_restart_button_after_a_failure_restarts_the_ranks(lab_page: LabPage) -> None:
    fails = "%%ddp\nkept = 1\nraise ValueError"
    with lab_page.open("anew.ipynb", START, fails, "%%ddp --quiet\nkept") as notebook:
        notebook.run(0)
        notebook.run(1)
        notebook.press_twice("Restart")
        notebook.await_text(1, r"^the ranks .* attempt \d+$")
        notebook.save()
        notebook.run(2)
        assert "NameError" in notebook.text(2)
        assert notebook.button("Restart").count() == 0  # another cell has run
    with lab_page.open("anew.ipynb") as notebook:  # saved with the buttons, without their kernel
        notebook.await_text(1, "^failed on ")
        notebook.page.wait_for_timeout(1000)
        assert "model not found" not in notebook.code_cell(1).inner_text()


@pytest.mark.full
def test_panel_of_a_restarted_kernel_says_that_the_kernel_is_gone(lab_page: LabPage) -> None:
    with lab_page.open_alone("gone.ipynb", START, TRAIN) as notebook:
        notebook.run(0)
        notebook.begin(1)
        notebook.await_text(1, r"step 10$")
        notebook.code_cell(1).locator(".nbddp-panel").wait_for()
        notebook.js("await panel.sessionContext.session.kernel.restart()")
        notebook.page.wait_for_selector(".nbddp-panel.jupyter-widgets-disconnected")
        shown = notebook.page.evaluate(
            "[...document.querySelectorAll('.jupyter-widgets-disconnected')]"
            ".map(each => getComputedStyle(each, '::before'))"
            ".filter(style => style.display != 'none').map(style => style.content)"
        )
        [words] = shown
        assert "kernel" in words
        assert not notebook.button("Interrupt").is_visible()
        assert not re.search("running a cell|left", notebook.text(1))
        assert re.search(r"`%ddp show \S+ --cell 2`", notebook.text(1))
        notebook.await_idle()  # by then all messages of the ended kernel have arrived
