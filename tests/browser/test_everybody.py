"""Accessibility: axe-core finds no problem in nbddp's output, in light and dark themes."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from browser.conftest import IN_BROWSER
from browser.lab import LabNotebook, accessibility_problems

pytestmark = [pytest.mark.full, *IN_BROWSER]

CELLS = [
    "%ddp restart --nproc 3",
    """%%ddp
import time
for step in nbddp.track(range(2000), label="epoch 1"):
    nbddp.log(step=step, loss=2 / (step + 1) + rank / 10)
    time.sleep(0.05)
    if step % 10 == 0:
        print("step", step)
    if step == 60:
        dist.barrier() if rank != 2 else time.sleep(600)
""",
    """%%ddp
import time
for step in nbddp.track(range(40)):
    nbddp.log(step=step, loss=2 / (step + 1) + rank / 10)
    time.sleep(0.05)
    print("step", step)
raise ValueError("no luck") if rank == 1 else SystemExit(1)
""",
]
TAGS = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
THEMES = ("JupyterLab Light", "JupyterLab Dark")


@pytest.fixture(params=THEMES, ids=["light", "dark"])
def theme(notebook: LabNotebook, request: pytest.FixtureRequest) -> Iterator[None]:
    before = notebook.page.evaluate("document.body.dataset.jpThemeName")
    change_theme(notebook, request.param)
    yield
    change_theme(notebook, before)


def change_theme(notebook: LabNotebook, name: str) -> None:
    """As the menu does: the server keeps it."""
    notebook.js(
        f"await window.jupyterapp.commands.execute('apputils:change-theme', {{theme: '{name}'}})"
    )
    is_light = str(name == THEMES[0]).lower()
    notebook.page.wait_for_selector(f"body[data-jp-theme-light={is_light}]", state="attached")
    notebook.page.wait_for_timeout(500)  # the theme's own sheets are loaded


def found(notebook: LabNotebook, where: str) -> list[str]:
    return accessibility_problems(notebook.page, where, runOnly=TAGS)


@pytest.mark.usefixtures("theme")
def test_running_panel_is_accessible_and_moves_only_if_wanted(notebook: LabNotebook) -> None:
    notebook.page.emulate_media(reduced_motion="reduce")
    notebook.begin(1)
    notebook.await_text(1, r"step 20$")
    moves = "getComputedStyle(document.querySelector('.nbddp-panel .nbddp-dot')).animationName"
    assert notebook.page.evaluate(moves) == "none"
    notebook.page.emulate_media(reduced_motion="no-preference")
    assert notebook.page.evaluate(moves) == "nbddp-pulse"
    notebook.code_cell(1).locator(".nbddp-shots svg").first.wait_for()
    notebook.button("Stop").click()
    assert found(notebook, ".nbddp-panel") == []
    notebook.await_text(1, "^no progress for|never came")
    expect(notebook.code_cell(1).locator("[role=alert]")).to_have_count(1)
    assert notebook.text(1).count("waiting in") == 1, "the log does not repeat the card"
    assert found(notebook, ".nbddp-panel") == []
    notebook.button("Interrupt").click()
    notebook.await_idle()
    assert notebook.code_cell(1).locator("[role=status]").inner_text() == "interrupted"


@pytest.mark.usefixtures("theme")
def test_record_of_a_failure_is_accessible(notebook: LabNotebook) -> None:
    notebook.run(2)
    notebook.button("Restart").wait_for()
    assert found(notebook, ".jp-CodeCell:nth-of-type(3) .nbddp") == []
    assert found(notebook, ".nbddp-aftermath") == []
    notebook.js("panel.content.activeCellIndex = 2")
    assert "failed on " in notebook.code_cell(2).locator("[role=status]").first.inner_text()
