"""JupyterLab actions on a running cell leave its record or the command that shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Locator, expect

from browser.conftest import IN_BROWSER, START, Picture, write_notebook
from browser.desk import Desk
from browser.lab import LabNotebook

pytestmark = [pytest.mark.full, *IN_BROWSER]

TRAIN = """%%ddp
import time
from pathlib import Path
for step in range(1000):
    time.sleep(0.05)
    nbddp.log(step=step, loss=2 / (step + 1))
    if step % 10 == 0:
        print("step", step)
    if Path("enough").exists() and step % 10 == 0:
        break
"""
SHORT = """%%ddp
import time
for step in range(20):
    time.sleep(0.05)
    nbddp.log(step=step, loss=2 / (step + 1) + rank / 10)
    if step % 10 == 0:
        print("\\x1b[32mgreen\\x1b[0m step", step)
"""
GET = r"`%ddp show \S+ --cell \d+`"  # how the record is got


@pytest.fixture
def notebook(desk: Desk, request: pytest.FixtureRequest) -> Iterator[LabNotebook]:
    """A page with a cell in which step 10 is done; it goes on until :func:`end` is called."""
    (desk.notebooks / "enough").unlink(missing_ok=True)
    name = f"{request.node.name}.ipynb"
    write_notebook(desk.notebooks / name, START, TRAIN, "1 + 1")
    with desk.open(name) as notebook:
        notebook.run(0)
        notebook.begin(1)
        notebook.await_text(1, r"step 10$")
        expect(notebook.code_cell(1).locator(".nbddp-panel")).to_be_visible()
        yield notebook


def end(desk: Desk) -> None:
    """Let the cell end."""
    (desk.notebooks / "enough").touch()


def command(notebook: LabNotebook, name: str) -> None:
    """Do something with the cell that runs, as a menu does."""
    notebook.js(
        f"panel.content.activeCellIndex = 1; await window.jupyterapp.commands.execute('{name}')"
    )


def test_cell_moved_while_running_shows_its_record(
    desk: Desk, notebook: LabNotebook, picture: Picture
) -> None:
    command(notebook, "notebook:move-cell-down")
    notebook.await_text(2, r"step [3-9]0$")
    end(desk)
    notebook.await_text(2, r"^done on ranks 0-1 · [\s\S]*step \d+$")
    assert not re.search(GET, notebook.text(2))
    expect(notebook.code_cell(2).locator("svg[aria-label^='loss: ']").first).to_be_visible()
    assert notebook.problems == []
    picture(notebook, "moved")


def test_cell_cleared_while_running_shows_its_record_once(
    desk: Desk, notebook: LabNotebook, picture: Picture
) -> None:
    command(notebook, "notebook:clear-cell-output")
    expect(notebook.code_cell(1).locator(".nbddp-panel")).to_have_count(0)
    end(desk)
    notebook.await_idle()
    text = notebook.await_text(1, r"^done on ranks 0-1 · [\s\S]*step \d+$").string
    assert text.count("done on ranks 0-1") == 1
    assert notebook.problems == []
    picture(notebook, "cleared")


BRIEF = """%%ddp
import time
print("first")
time.sleep({seconds})
print("last")
"""
WHEN_SHOWN = """
const outputs = panel.content.widgets[1].model.outputs;
while (outputs.length === 0) await new Promise(go => setTimeout(go, 5));
"""


def begin_brief(notebook: LabNotebook) -> None:
    """Run the second cell, and wait until something stands under it, before its panel."""
    notebook.run(0)
    notebook.begin(1)
    notebook.js(WHEN_SHOWN)


@pytest.mark.parametrize("seconds", [0.6, 3], ids=["short", "long"])
def test_cell_cleared_just_after_its_start_shows_its_record(desk: Desk, seconds: float) -> None:
    name = f"cleared-soon-{seconds}.ipynb"
    write_notebook(desk.notebooks / name, START, BRIEF.format(seconds=seconds), "1 + 1")
    with desk.open(name) as notebook:
        begin_brief(notebook)
        command(notebook, "notebook:clear-cell-output")
        text = notebook.await_text(1, r"^done on ranks 0-1 · [\s\S]*\[rank 0\] last$").string
        assert text.count("[rank 0] first") == 1
        assert text.count("done on ranks 0-1") == 1
        shown = notebook.code_cell(1).locator(".jp-OutputArea-child:visible")
        expect(shown).to_have_count(1)
        assert notebook.problems == []


def test_reloaded_notebook_shows_the_record_and_saves_its_command(
    desk: Desk, notebook: LabNotebook, picture: Picture
) -> None:
    notebook.save()
    notebook.reload()
    notebook.await_text(1, r"running [\s\S]* step [4-9]0$")
    assert not re.search(GET, notebook.text(1))  # the panel is there
    end(desk)
    notebook.await_text(1, r"^done on ranks 0-1 · [\s\S]*step \d+$")
    assert not re.search(GET, notebook.text(1))
    notebook.await_idle()
    notebook.save()
    notebook.shut_down_kernel()
    notebook.reload()
    notebook.await_ready()
    found = notebook.await_text(1, GET).group()
    picture(notebook, "reopened-without-its-kernel")
    show = found.partition("`")[2].partition("`")[0]
    notebook.js(
        "const cell = panel.content.widgets[2]; "
        f"cell.model.sharedModel.setSource('%load_ext nbddp\\n{show}')"
    )
    notebook.run(2)
    notebook.await_text(2, r"^cell \d+ of run \S+ · done · ranks 0-1 · [\s\S]*\[rank 1\] step \d+$")
    expect(notebook.code_cell(2).locator("svg[aria-label^='loss: ']").first).to_be_visible()
    picture(notebook, "shown-again")


def cut_off(log: Locator) -> float:
    """How many pixels of the first row of a log are not in view."""
    return float(
        log.evaluate(
            "it => (it.getBoundingClientRect().top + 1"
            " - it.querySelector('pre').getBoundingClientRect().top) % 17"
        )
    )


def test_heal_button_works_on_a_reloaded_page(notebook: LabNotebook, picture: Picture) -> None:
    notebook.save()
    notebook.reload()
    notebook.await_text(1, r"running [\s\S]* step [4-9]0$")
    notebook.press_twice("Kill")
    notebook.await_text(1, "^failed on rank 0 · ")
    assert " left" not in notebook.text(1)
    notebook.button("Heal").scroll_into_view_if_needed()
    assert cut_off(notebook.code_cell(1).locator(".nbddp-kept").last) == pytest.approx(0, abs=0.5)
    picture(notebook, "killed-after-reload")
    notebook.button("Heal").click()
    notebook.await_text(1, r"^rank 0 healed ")
    notebook.await_kernel()
    notebook.run(2)
    expect(notebook.button("Heal")).to_be_visible()  # only a ``%%ddp`` cell removes them
    notebook.await_idle()
    assert notebook.problems == []


def test_undisturbed_cell_leaves_no_extra_line_or_space(desk: Desk, notebook: LabNotebook) -> None:
    end(desk)
    notebook.await_idle()
    notebook.await_text(1, r"^done on ranks 0-1 · [\s\S]*step \d+$")
    assert not re.search(GET, notebook.text(1))
    expect(notebook.code_cell(1).locator(".jp-OutputArea-child:visible")).to_have_count(1)
    assert notebook.problems == []


def test_saved_notebook_shows_the_record_without_its_kernel(desk: Desk, picture: Picture) -> None:
    path = desk.notebooks / "saved.ipynb"
    write_notebook(path, START, SHORT, "%ddp status")
    with desk.open(path.name) as notebook:
        notebook.run_all()
        notebook.save()
    with desk.lab.open(path.name) as notebook:
        picture(notebook, "reopened")
        for cell, title in ((1, "done on ranks 0-1 · "), (2, "ready · 2 ranks · ")):
            assert title in notebook.text(cell)
            assert "[rank 1] green step 10" in notebook.text(cell)
            chart = notebook.code_cell(cell).locator("svg[aria-label^='loss: ']").first
            assert chart.bounding_box()["width"] > 300
        assert notebook.problems == []
    page, _ = HTMLExporter().from_notebook_node(nbformat.read(path, as_version=4))
    assert "done on ranks 0-1" in page
    assert len(re.findall(r'<img[^>]* alt="loss"', page)) == 2


PRINTS = """%%ddp --ranks 0
for line in range(100):
    print("line", line)
raise ValueError("\\n".join(map(str, range(100))))
"""


def test_printed_record_is_complete(desk: Desk) -> None:
    path = desk.notebooks / "paper.ipynb"
    write_notebook(path, START, PRINTS)
    with desk.open(path.name) as notebook:
        notebook.run(0)
        notebook.run(1)
        notebook.await_text(1, "^failed on rank 0 · ")
        notebook.save()
    html, _ = HTMLExporter().from_notebook_node(nbformat.read(path, as_version=4))
    with desk.lab.browser().new_context() as context:
        page = context.new_page()
        page.set_content(html)
        parts = page.locator(".nbddp-kept:visible, .nbddp-card:visible")
        assert parts.count() == 2
        is_cut = "parts => parts.map(each => each.scrollHeight > each.clientHeight + 1)"
        assert parts.evaluate_all(is_cut) == [True, True]
        page.emulate_media(media="print")
        assert parts.evaluate_all(is_cut) == [False, False]
