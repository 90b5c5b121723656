"""Input boxes of ranks in a real page."""

import pytest
from playwright.sync_api import Locator

from browser.conftest import IN_BROWSER
from browser.lab import LabNotebook
from browser.lab_page import LabPage

pytestmark = [pytest.mark.full, *IN_BROWSER]

CELLS = [
    "%ddp restart --nproc 2",
    """%%ddp
losses = [2.0, 1.5]
if rank == 1:
    breakpoint()
    losses.append(0.5)
dist.barrier()
print(losses)""",
    "%%ddp\nname = input('name? ')\nprint(name.upper())",
    "%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nprint('kept', kept, x.item())",
    "%%ddp\nkept = rank",
    *(
        f"""%%ddp
import time
from pathlib import Path
if rank == 1:
    {asks}
while not Path("go_on").exists(): time.sleep(0.05)
raise ValueError("mine")"""
        for asks in ("input('alone? ')", "breakpoint()\n    x = 1")
    ),
]
BREAK, NAME, AFTER, KEEP, ALONE, ALONE_IN_DEBUGGER = range(1, 7)
OPEN = ".jp-OutputArea-stdin-item:not(.jp-OutputArea-stdin-hiding)"  # JupyterLab 4.4 and newer


def await_box(notebook: LabNotebook, prompt: str) -> Locator:
    """Until the page asks this; where one types."""
    asked = notebook.page.locator(f"{OPEN} .jp-Stdin-prompt", has_text=prompt)
    box = asked.locator("input.jp-Stdin-input").last
    box.wait_for(timeout=60_000)
    return box


def answer(notebook: LabNotebook, prompt: str, text: str) -> None:
    await_box(notebook, prompt).click()
    notebook.page.keyboard.type(text)
    notebook.page.keyboard.press("Enter")


def names_are_kept(notebook: LabNotebook) -> None:
    notebook.run(AFTER)
    assert "kept 0 2.0" in notebook.text(AFTER)
    assert "kept 1 2.0" in notebook.text(AFTER)


def test_debugger_opens_at_a_breakpoint_and_continues(notebook: LabNotebook) -> None:
    notebook.begin(BREAK)
    await_box(notebook, "[rank 1] ipdb>")
    notebook.await_text(BREAK, r"in the debugger\s+4 breakpoint")
    answer(notebook, "[rank 1] ipdb>", "p losses")
    notebook.await_text(BREAK, r"\[2\.0, 1\.5\]")
    notebook.await_text(BREAK, "waiting for the debugger")
    answer(notebook, "[rank 1] ipdb>", "c")
    notebook.await_idle()
    assert "[2.0, 1.5, 0.5]" in notebook.text(BREAK)
    assert notebook.errors() == []


def interrupt(notebook: LabNotebook) -> None:
    notebook.js("await panel.sessionContext.session.kernel.interrupt()")


COMMANDS = {  # to the cell that asks; after each, it or a new cell is in its place
    "delete": ("delete-cell", "undo-cell-action"),
    "clear": ("clear-cell-output",),
    "move": ("move-cell-down", "move-cell-up"),
    "interrupt": (),
}


def leave(notebook: LabNotebook, way_out: str) -> None:
    """Reload the page, press the panel's button, or do commands and interrupt the kernel."""
    match way_out:
        case "reload":
            notebook.reload()
        case "panel":
            notebook.button("Interrupt").click()
            await_no_box(notebook)
        case _:
            notebook.js(f"panel.content.activeCellIndex = {NAME}")
            for command in COMMANDS[way_out]:
                notebook.js(f"await window.jupyterapp.commands.execute('notebook:{command}')")
            interrupt(notebook)


def await_no_box(notebook: LabNotebook) -> None:
    """Until the cell is over; then the page runs other cells, and there is no trace of a script."""
    notebook.await_kernel()
    notebook.await_idle()
    assert not notebook.js("return panel.sessionContext.pendingInput")
    assert notebook.page.locator(OPEN).count() == 0
    saved = notebook.js("return JSON.stringify(panel.content.model.toJSON())")
    assert "application/javascript" not in saved


@pytest.mark.parametrize("way_out", ["reload", "panel", *COMMANDS])
def test_input_box_is_abandoned_when_the_user_leaves(notebook: LabNotebook, way_out: str) -> None:
    notebook.run(KEEP)
    notebook.begin(NAME)
    await_box(notebook, "name?")
    notebook.await_text(NAME, "input")
    leave(notebook, way_out)
    notebook.await_ready()
    notebook.await_kernel()
    notebook.await_idle()
    interrupt(notebook)  # JupyterLab waits for an answer, the kernel does not
    names_are_kept(notebook)


@pytest.mark.parametrize(
    ("cell", "prompt"),
    [(ALONE, "alone?"), (ALONE_IN_DEBUGGER, "[rank 1] ipdb>")],
    ids=["input", "debugger"],
)
def test_input_box_closes_when_another_rank_fails(
    notebook: LabNotebook, lasting: LabPage, cell: int, prompt: str
) -> None:
    go_on = lasting.notebooks / "go_on"
    go_on.unlink(missing_ok=True)
    notebook.begin(cell)
    await_box(notebook, prompt)
    go_on.touch()
    await_no_box(notebook)
    assert "mine" in notebook.text(cell)
    go_on.unlink()
    notebook.run(notebook.place_of("%ddp restart"))
    notebook.run(KEEP)
    names_are_kept(notebook)
