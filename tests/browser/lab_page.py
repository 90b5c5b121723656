"""A page and a kernel that are reused while notebooks are opened and closed.

A new page takes ten seconds of a processor until its notebook can be run, a new kernel seven until
it has ranks. Tests that ask nothing of either share them, one after the other.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from playwright.sync_api import BrowserContext, Error, Page

from browser.lab import IS_LAB, SIZE, Lab, LabNotebook, write_notebook

BLANK = "lab_page.ipynb"
# leftovers of a notebook in its kernel: ranks, widgets, names
_TIDY = """
if "ddp" in get_ipython().magics_manager.magics["line"]:
    get_ipython().run_line_magic("ddp", "auto off")
    get_ipython().run_line_magic("ddp", "stop")
__import__("ipywidgets").Widget.close_all()
get_ipython().run_line_magic("reset", "-f")
"""
# a page that was just loaded may still be starting a kernel, or asking it something
_RUN = """
const session = panel.sessionContext.session;
if (!panel.sessionContext.isReady || (session?.kernel && session.kernel.status !== 'idle'))
  return 'later';
if (!session?.kernel) return '';
const reply = await session.kernel.requestExecute({code: CODE, store_history: false}).done;
return reply.content.status === 'ok' ? session.id : '';
"""
_OPEN = "await window.jupyterapp.commands.execute('docmanager:open', {path: PATH});"
# all of them: a test may have opened more than its own
_CLOSE = """
for (const each of [...window.jupyterapp.shell.widgets('main')]) {
  if (!each.context) continue;
  each.context.model.dirty = false;
  if (IN_LAB) each.dispose();
}
""".replace("IN_LAB", json.dumps(IS_LAB))


class LabPage:
    """Notebooks one after the other, on one page and in one kernel that has no names and no ranks.

    A page on which anything went wrong, and a kernel that a test has ended, are made anew.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._context: BrowserContext | None = None
        self._page: Page | None = None
        self._session = ""  # the server's id of the reused kernel

    @property
    def notebooks(self) -> Path:
        return self.lab.notebooks

    def prepare(self) -> None:
        """See that there is a page, and a kernel: both outlive the test that is the first."""
        if self._page is None or not self._session:
            with self._opened(BLANK):
                pass
            assert self._session, "the kernel that was to stay did not come to rest"

    @contextlib.contextmanager
    def open(self, name: str, *cells: str) -> Iterator[LabNotebook]:
        """Open a new notebook with these cells, or an old one; the page must have no error."""
        if cells:
            write_notebook(self.notebooks / name, *cells)
        self.prepare()
        with self._opened(name) as notebook:
            yield notebook
            assert not notebook.problems, notebook.problems

    @contextlib.contextmanager
    def open_alone(self, name: str, *cells: str) -> Iterator[LabNotebook]:
        """Do the same in a page and with a kernel that share nothing with others."""
        with self.lab.open(name, *cells) as notebook:
            yield notebook
            assert not notebook.problems, notebook.problems

    def saved(self, name: str) -> nbformat.NotebookNode:
        return nbformat.read(self.notebooks / name, as_version=4)

    def exported(self, name: str, **options: str) -> str:
        html: str = HTMLExporter(**options).from_notebook_node(self.saved(name))[0]
        return html

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[LabNotebook]:
        notebook = LabNotebook(self._page or self._new_page(name))
        try:
            if self._page is None:
                self._page = notebook.page
            else:
                self._give_kernel(name)
                self._show(notebook, name)
            notebook.await_ready()
            yield notebook
            self._clear(notebook)
        except BaseException:
            with contextlib.suppress(Error):
                notebook.shut_down_kernel()
            self.close()
            raise
        finally:
            notebook.listen_no_more()

    def _show(self, notebook: LabNotebook, name: str) -> None:
        """Bring a notebook onto the page, which in Notebook 7 has room for one only."""
        if IS_LAB:
            notebook.js(_OPEN.replace("PATH", json.dumps(name)))
        else:
            notebook.page.goto(self.lab.address(name))

    def _new_page(self, name: str) -> Page:
        self._context = self.lab.browser().new_context(viewport=SIZE)
        page = self._context.new_page()
        page.goto(self.lab.address(name))
        return page

    def _give_kernel(self, name: str) -> None:
        """A page asks the server for the kernel that belongs to a notebook's path."""
        if self._session:
            self.lab.request("PATCH", f"/api/sessions/{self._session}", {"path": name})

    def _clear(self, notebook: LabNotebook) -> None:
        """Close the notebook; its kernel is kept if it is there and is rid of all that was left."""
        tidy, until = _RUN.replace("CODE", json.dumps(_TIDY)), time.monotonic() + 30
        while (session := notebook.js(tidy)) == "later" and time.monotonic() < until:
            time.sleep(0.1)
        if session in ("", "later") or session != (self._session or session):
            notebook.shut_down_kernel()
            session = ""
        self._session = session
        notebook.js(_CLOSE)
        self._give_kernel(BLANK)
        notebook.page.set_viewport_size(SIZE)

    def close(self) -> None:
        """Close the page; a kernel ends with its server at the latest."""
        if self._context is not None:
            with contextlib.suppress(Error):
                self._context.close()
        self._context = self._page = None
        self._session = ""
