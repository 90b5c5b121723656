"""Tab and Shift+Tab complete nbddp commands in a real JupyterLab."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from browser.conftest import IN_BROWSER, Picture, write_notebook
from browser.desk import Desk

pytestmark = [pytest.mark.full, *IN_BROWSER]


def test_tab_and_shift_tab_complete_options_kinds_and_names(desk: Desk, picture: Picture) -> None:
    define = "%%ddp --nproc 2\ndef train(steps, rate=0.1):\n    'Trains a little.'"
    write_notebook(desk.notebooks / "found.ipynb", "%load_ext nbddp", define, "", "", "")
    with desk.open("found.ipynb") as notebook:
        notebook.run(0)
        notebook.run(1)
        offered = notebook.page.locator(".jp-Completer-item")
        tip = notebook.page.locator(".jp-Tooltip")

        notebook.type(2, "%ddp fault ")
        notebook.page.keyboard.press("Tab")
        kind = offered.filter(has_text=re.compile("^.?segfault"))
        expect(kind).to_be_visible()
        picture(notebook, "tab")
        notebook.page.keyboard.press("Escape")

        notebook.type(3, "%%ddp --timeout")
        notebook.page.keyboard.press("Shift+Tab")
        expect(tip).to_contain_text("1800")
        picture(notebook, "shift-tab")
        notebook.page.keyboard.press("Escape")

        notebook.type(4, "%%ddp\ntrain(")
        notebook.page.keyboard.press("Shift+Tab")
        expect(tip).to_contain_text("train(steps, rate=0.1)")
        expect(tip).to_contain_text("Trains a little.")
        assert notebook.problems == []
