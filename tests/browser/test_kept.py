"""JupyterLab actions on a running cell leave its record or the command that shows it."""

import re

import pytest
from playwright.sync_api import expect
from processes import wait_until

from browser.conftest import IN_BROWSER, START
from browser.lab import LabNotebook
from browser.lab_page import LabPage

pytestmark = [pytest.mark.full, *IN_BROWSER]

GET = r"`%ddp show \S+ --cell \d+`"  # how the record is got
DONE = r"^done on ranks 0-1 · [\s\S]*step \d+$"


def command(notebook: LabNotebook, name: str) -> None:
    """Do something with the cell that runs, as a menu does."""
    notebook.js(
        f"panel.content.activeCellIndex = 1; await window.jupyterapp.commands.execute('{name}')"
    )


def test_cell_moved_while_running_shows_its_record(
    lab_page: LabPage, training: LabNotebook
) -> None:
    command(training, "notebook:move-cell-down")
    training.await_text(2, r"step [3-9]0$")
    (lab_page.notebooks / "enough").touch()
    training.await_text(2, DONE)
    assert not re.search(GET, training.text(2))
    expect(training.code_cell(2).locator("svg[aria-label^='loss: ']").first).to_be_visible()


def test_cleared_cell_shows_its_record_once(lab_page: LabPage, training: LabNotebook) -> None:
    command(training, "notebook:clear-cell-output")
    (lab_page.notebooks / "enough").touch()
    assert training.await_text(1, DONE).string.count("done on ranks 0-1") == 1
    expect(training.code_cell(1).locator(".jp-OutputArea-child:visible")).to_have_count(1)


def test_reloaded_page_shows_the_record_or_its_command(
    lab_page: LabPage, training: LabNotebook
) -> None:
    training.save()
    training.reload()
    training.await_text(1, r"running [\s\S]* step [4-9]0$")
    assert not re.search(GET, training.text(1))  # the panel is there
    (lab_page.notebooks / "enough").touch()
    training.await_text(1, DONE)
    assert not re.search(GET, training.text(1))
    training.await_idle()
    training.save()
    training.shut_down_kernel()
    training.reload()
    training.await_ready()
    training.await_text(1, GET)
    assert all("widget model not found" in each for each in training.problems)
    training.problems.clear()  # the panel went with the kernel


@pytest.mark.parametrize("is_saved", [False, True])
def test_reloaded_page_shows_the_panel_in_the_next_cell_unless_it_was_saved_with_it(
    lab_page: LabPage, training: LabNotebook, is_saved: bool
) -> None:
    asked: list[bool] = []  # the page for its widgets
    note = lambda frame: asked.append("request_states" in str(frame))  # noqa: E731
    training.page.on("websocket", lambda socket: socket.on("framesent", note))
    if is_saved:
        training.save()
    training.reload()
    assert wait_until(lambda: bool(training.js("return true")) and any(asked), timeout=60)
    if is_saved:
        training.await_text(1, r"running [\s\S]* step [4-9]0$")
    training.begin(2)
    (shown, other) = (1, 2) if is_saved else (2, 1)
    training.await_text(shown, r"running [\s\S]* step \d+0$")
    expect(training.code_cell(other).locator(".nbddp-panel")).to_have_count(0)
    (lab_page.notebooks / "enough").touch()
    training.await_text(shown, DONE)
    training.await_text(2, "^2$")
    expect(training.code_cell(other).locator(".nbddp")).to_have_count(0)
    expected = r"lost the output of cell \[\d+\].*`nbddp status`"
    assert bool(re.search(expected, training.text(2))) == (not is_saved)


def test_heal_button_works_on_a_reloaded_page(training: LabNotebook) -> None:
    training.save()
    training.reload()
    training.await_text(1, r"running [\s\S]* step [4-9]0$")
    training.press_twice("Kill")
    training.await_text(1, "^failed on rank 0 · ")
    assert " left" not in training.text(1)
    training.button("Heal").scroll_into_view_if_needed()
    training.button("Heal").click()
    training.await_text(1, r"^rank 0 healed .*\brank 1 in \d+\.\d\d s")
    is_cut = "it => it.scrollWidth > it.clientWidth"
    assert not training.button("Restart").evaluate(is_cut), "the message does not cut it off"
    training.await_kernel()
    training.run(2)
    expect(training.button("Heal")).to_be_hidden()
    expect(training.button("Restart")).to_be_visible()  # only a ``%%ddp`` cell removes it
    training.await_idle()


PRINTS = """%%ddp --ranks 0
for line in range(100):
    print("line", line)
raise ValueError("\\n".join(map(str, range(100))))
"""


def test_printed_record_is_complete(lab_page: LabPage) -> None:
    with lab_page.open("paper.ipynb", START, PRINTS) as notebook:
        notebook.run(0)
        notebook.run(1)
        notebook.await_text(1, "^failed on rank 0 · ")
        notebook.save()
    with lab_page.lab.browser().new_context() as context:
        page = context.new_page()
        page.set_content(lab_page.exported("paper.ipynb"))
        parts = page.locator(".nbddp-kept:visible, .nbddp-card:visible")
        assert parts.count() == 2
        is_cut = "parts => parts.map(each => each.scrollHeight > each.clientHeight + 1)"
        assert parts.evaluate_all(is_cut) == [True, True]
        page.emulate_media(media="print")
        assert parts.evaluate_all(is_cut) == [False, False]
