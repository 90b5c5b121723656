"""One JupyterLab and one Chromium for all browser tests; separate notebooks for each file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import expect

from browser.desk import BLANK, Desk
from browser.lab import CHROMIUM, Lab, LabNotebook

NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium: install it, or set CHROMIUM"
)

IN_BROWSER = [pytest.mark.browser, pytest.mark.timeout(300), NEEDS_CHROMIUM]
Picture = Callable[[LabNotebook, str], None]
START = "%load_ext nbddp\n%ddp start --nproc 2"

expect.set_options(timeout=30_000)  # as all else on a page; else it is 5 s


def write_notebook(path: Path, *cells: str) -> None:
    """A notebook with these code cells; all files share a folder, so its name must be a new one."""
    if path.exists():
        raise FileExistsError(f"another test has a notebook of this name: {path.name}")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    nbformat.write(notebook, path)


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab server, and the browser that looks at it."""
    with Lab(tmp_path_factory.mktemp("lab") / "root") as lab:
        lab.browser()  # it stays for all tests of all files
        yield lab


@pytest.fixture(scope="package")
def lasting(lab: Lab) -> Iterator[Desk]:
    """The desk for all tests of all files."""
    write_notebook(lab.notebooks / BLANK, "")
    desk = Desk(lab)
    yield desk
    desk.close()


@pytest.fixture
def desk(lasting: Desk) -> Desk:
    """A page and a kernel for notebooks that need none of their own."""
    lasting.prepare()
    return lasting


@pytest.fixture(autouse=True)
def no_process_stays_behind(request: pytest.FixtureRequest) -> None:
    """As everywhere; a page and a kernel that will stay are there before."""
    if "desk" in request.fixturenames:
        request.getfixturevalue("desk")
    request.getfixturevalue("no_process_stays_behind")


@pytest.fixture
def notebook(shared: LabNotebook) -> Iterator[LabNotebook]:
    """The page that a file's tests share, with new ranks; nothing may have gone wrong on it.

    ``shared``, a fixture of that file, has a cell for each.
    """
    shared.run(shared.place_of("%ddp restart"))
    yield shared
    shared.run(shared.place_of("%ddp stop"))
    assert shared.problems == []


@pytest.fixture
def picture() -> Picture:
    """Take a picture, when PICTURES names a folder to look at them in."""

    def take(notebook: LabNotebook, name: str) -> None:
        if "PICTURES" in os.environ:
            notebook.page.screenshot(path=Path(os.environ["PICTURES"]) / f"{name}.png")

    return take
