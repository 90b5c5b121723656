"""Input boxes of ranks in a real page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator

from browser.conftest import IN_BROWSER, Picture, write_notebook
from browser.desk import Desk
from browser.lab import LabNotebook

pytestmark = [pytest.mark.full, *IN_BROWSER]

CELLS = (
    "%load_ext nbddp",
    "%ddp restart --nproc 2",
    "%ddp stop",
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
    "%%ddp\ndef half(n):\n    return 1 / n\nhalf(rank)",
    "%ddp debug",
    "from getpass import getpass",
    "%%ddp\nfrom getpass import getpass\nif rank == 0: print(len(getpass('token: ')))",
    *(
        f"""%%ddp
import os, threading, time
from pathlib import Path
def await_go():
    while not Path("go_on").exists(): time.sleep(0.05)
def die():
    await_go()
    os._exit(3)
if rank == 1:
    {asks}
else:
    await_go()
    raise ValueError("mine")"""
        for asks in (
            "input('alone? ')",
            "breakpoint()\n    x = 1",
            "threading.Thread(target=die).start(); input('dying? ')",
        )
    ),
    *["'a cell below'"] * 12,
)
BREAK, NAME, AFTER, KEEP, FAIL, DEBUG, SECRET, ALONE, ALONE_IN_DEBUGGER, DYING = (
    *range(3, 9),
    *range(10, 14),
)
OPEN = ".jp-OutputArea-stdin-item:not(.jp-OutputArea-stdin-hiding)"  # JupyterLab 4.4 and newer


@pytest.fixture(scope="module")
def shared(lasting: Desk) -> Iterator[LabNotebook]:
    """A page with cells that ask."""
    write_notebook(lasting.notebooks / "typing.ipynb", *CELLS)
    with lasting.open("typing.ipynb") as notebook:
        notebook.run(0)
        yield notebook


def await_box(notebook: LabNotebook, prompt: str) -> Locator:
    """Until the page asks this; where one types."""
    asked = notebook.page.locator(f"{OPEN} .jp-Stdin-prompt", has_text=prompt)
    box = asked.locator("input.jp-Stdin-input").last
    box.wait_for(timeout=60_000)
    return box


def answer(notebook: LabNotebook, prompt: str, text: str) -> None:
    """Type it into the box that the page shows, as a person does."""
    await_box(notebook, prompt).click()
    notebook.page.keyboard.type(text)
    notebook.page.keyboard.press("Enter")


def names_are_kept(notebook: LabNotebook) -> None:
    """Check that the ranks work and have their names."""
    notebook.run(AFTER)
    assert "kept 0 2.0" in notebook.text(AFTER)
    assert "kept 1 2.0" in notebook.text(AFTER)


def test_debugger_opens_at_a_breakpoint_and_continues(
    notebook: LabNotebook, picture: Picture
) -> None:
    notebook.begin(BREAK)
    await_box(notebook, "[rank 1] ipdb>")
    notebook.await_text(BREAK, r"in the debugger\s+4 breakpoint")
    picture(notebook, "debugger")
    answer(notebook, "[rank 1] ipdb>", "p losses")
    notebook.await_text(BREAK, r"\[2\.0, 1\.5\]")
    notebook.await_text(BREAK, "waiting for the debugger")
    answer(notebook, "[rank 1] ipdb>", "c")
    notebook.await_idle()
    assert "[2.0, 1.5, 0.5]" in notebook.text(BREAK)
    assert notebook.errors() == []
    picture(notebook, "debugger-record")


def test_a_secret_is_not_shown(notebook: LabNotebook) -> None:
    notebook.begin(SECRET)
    assert await_box(notebook, "[rank 0] token:").get_attribute("type") == "password"
    answer(notebook, "[rank 0] token:", "abcdef")
    notebook.await_idle()
    assert "6" in notebook.text(SECRET)
    assert "abcdef" not in notebook.text(SECRET)


def test_debugger_opens_the_last_failure(notebook: LabNotebook, picture: Picture) -> None:
    notebook.run(FAIL)
    notebook.begin(DEBUG)
    answer(notebook, "[rank 0] ipdb>", "p n")
    notebook.await_text(DEBUG, "^.*\\b0$")
    picture(notebook, "post-mortem")
    answer(notebook, "[rank 0] ipdb>", "u")
    answer(notebook, "[rank 0] ipdb>", "p rank")
    answer(notebook, "[rank 0] ipdb>", "q")
    notebook.await_idle()
    notebook.run(KEEP)
    names_are_kept(notebook)


def do_to_cell(notebook: LabNotebook, *commands: str) -> None:
    """Do JupyterLab's commands to the cell that asks."""
    notebook.js(f"panel.content.activeCellIndex = {NAME}")
    for each in commands:
        notebook.js(f"await window.jupyterapp.commands.execute('notebook:{each}')")


def reload(notebook: LabNotebook) -> None:
    """Press F5."""
    notebook.reload()


def delete(notebook: LabNotebook) -> None:
    """Delete the cell that asks, and undo it: the cells after it have the same places then."""
    do_to_cell(notebook, "delete-cell", "undo-cell-action")
    interrupt(notebook)


def clear(notebook: LabNotebook) -> None:
    """Clear the outputs, and with them the box."""
    do_to_cell(notebook, "clear-cell-output")
    interrupt(notebook)


def move(notebook: LabNotebook) -> None:
    """Move the cell that asks down and up again."""
    do_to_cell(notebook, "move-cell-down", "move-cell-up")
    interrupt(notebook)


def interrupt(notebook: LabNotebook) -> None:
    """Press the notebook's own button."""
    notebook.js("await panel.sessionContext.session.kernel.interrupt()")


def press_interrupt(notebook: LabNotebook) -> None:
    """Press the panel's button."""
    notebook.button("Interrupt").click()


WAYS_OUT = (reload, delete, clear, move, interrupt, press_interrupt)


def turn_away(notebook: LabNotebook, leave: Callable[[LabNotebook], None]) -> None:
    """Open an input box, and leave the cell without an answer."""
    notebook.run(KEEP)
    notebook.begin(NAME)
    await_box(notebook, "name?")
    notebook.await_text(NAME, "input")
    leave(notebook)
    notebook.await_ready()
    notebook.await_kernel()
    notebook.await_idle()
    interrupt(notebook)  # JupyterLab waits for an answer, the kernel does not
    names_are_kept(notebook)


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("leave", WAYS_OUT, ids=lambda each: each.__name__)
def test_input_box_is_abandoned_when_the_user_leaves_the_cell(
    notebook: LabNotebook, leave: Callable[[LabNotebook], None], times: int
) -> None:
    for _ in range(times):
        turn_away(notebook, leave)


def await_no_box(notebook: LabNotebook) -> None:
    """Until the cell is over; then the page runs other cells, and there is no trace of a script."""
    notebook.await_kernel()
    notebook.await_idle()
    assert not notebook.js("return panel.sessionContext.pendingInput")
    assert notebook.page.locator(OPEN).count() == 0
    saved = notebook.js("return JSON.stringify(panel.content.model.toJSON())")
    assert "application/javascript" not in saved


@pytest.mark.parametrize(
    ("cell", "prompt", "said"),
    [
        (ALONE, "alone?", "mine"),
        (ALONE_IN_DEBUGGER, "[rank 1] ipdb>", "mine"),
        (DYING, "dying?", "code 3"),
    ],
    ids=["input", "debugger", "death"],
)
def test_input_box_closes_when_a_rank_fails_or_dies(
    notebook: LabNotebook, lasting: Desk, cell: int, prompt: str, said: str
) -> None:
    go_on = lasting.notebooks / "go_on"
    go_on.unlink(missing_ok=True)
    notebook.begin(cell)
    await_box(notebook, prompt)
    go_on.touch()
    await_no_box(notebook)
    assert said in notebook.text(cell)
    go_on.unlink()
    notebook.run(notebook.place_of("%ddp restart"))
    notebook.run(KEEP)
    names_are_kept(notebook)


def test_panel_interrupt_closes_the_input_box(notebook: LabNotebook) -> None:
    notebook.run(KEEP)
    notebook.begin(NAME)
    await_box(notebook, "name?")
    press_interrupt(notebook)
    await_no_box(notebook)
    names_are_kept(notebook)


def test_input_box_survives_scrolling_away(notebook: LabNotebook) -> None:
    notebook.begin(BREAK)
    await_box(notebook, "[rank 1] ipdb>")
    notebook.js("await panel.content.scrollToItem(panel.content.widgets.length - 1)")
    notebook.page.wait_for_timeout(1000)
    notebook.js("await panel.content.scrollToItem(3)")
    answer(notebook, "[rank 1] ipdb>", "c")
    notebook.await_idle()
    assert "[2.0, 1.5, 0.5]" in notebook.text(BREAK)
