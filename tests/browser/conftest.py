"""One JupyterLab and one Chromium for all browser tests; separate notebooks for each file."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from browser.lab import CHROMIUM, Lab, LabNotebook, write_notebook
from browser.lab_page import BLANK, LabPage

NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium: install it, or set CHROMIUM"
)

IN_BROWSER = [pytest.mark.browser, pytest.mark.timeout(300), NEEDS_CHROMIUM]
LOAD = "%reload_ext nbddp"
START = "%load_ext nbddp\n%ddp start --nproc 2"
TRAIN = """%%ddp
import time
from pathlib import Path
kept = rank
for step in nbddp.track(range(2000)):
    time.sleep(0.05)
    nbddp.log(step=step, loss=2 / (step + 1), accuracy=step, rate=step, norm=step)
    if step % 10 == 0:
        print("step", step)
        if Path("enough").exists():
            break
"""

expect.set_options(timeout=30_000)  # as all else on a page; else it is 5 s


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab") / "root") as lab:
        lab.browser()  # it stays for all tests of all files
        yield lab


@pytest.fixture(scope="package")
def lasting(lab: Lab) -> Iterator[LabPage]:
    """The page for all tests of all files."""
    write_notebook(lab.notebooks / BLANK, "")
    lab_page = LabPage(lab)
    yield lab_page
    lab_page.close()


@pytest.fixture
def lab_page(lasting: LabPage) -> LabPage:
    """A page and a kernel for notebooks that need none of their own."""
    lasting.prepare()
    (lasting.notebooks / "enough").unlink(missing_ok=True)
    return lasting


@pytest.fixture(autouse=True)
def no_process_stays_behind(request: pytest.FixtureRequest) -> None:
    """As everywhere; a page and a kernel that will stay are there before."""
    if "lab_page" in request.fixturenames:
        request.getfixturevalue("lab_page")
    request.getfixturevalue("no_process_stays_behind")


@pytest.fixture(scope="module")
def shared(lasting: LabPage, request: pytest.FixtureRequest) -> Iterator[LabNotebook]:
    """One page and one kernel for all tests of a file, with its ``CELLS``."""
    cells = [*request.module.CELLS, LOAD, "%ddp stop"]
    with lasting.open(f"{request.path.stem}.ipynb", *cells) as notebook:
        notebook.run(notebook.place_of(LOAD))
        yield notebook


@pytest.fixture
def notebook(shared: LabNotebook) -> Iterator[LabNotebook]:
    """The page of the file's tests, with new ranks; nothing may have gone wrong on it."""
    shared.run(shared.place_of("%ddp restart"))
    yield shared
    shared.run(shared.place_of("%ddp stop"))
    assert shared.problems == []


@pytest.fixture
def training(lab_page: LabPage, request: pytest.FixtureRequest) -> Iterator[LabNotebook]:
    """A page whose cell 1 has done ten steps; it goes on until there is a file ``enough``."""
    cells = [START, TRAIN, "1 + 1", "%%ddp\nkept", *["'below'"] * 6]
    with lab_page.open(f"{request.node.name}.ipynb", *cells) as notebook:
        notebook.run(0)
        notebook.begin(1)
        notebook.await_text(1, r"step 10$")
        expect(notebook.code_cell(1).locator(".nbddp-panel")).to_be_visible()
        yield notebook
