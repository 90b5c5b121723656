"""Start and end a real JupyterLab and a real Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nbformat
import psutil
from playwright.sync_api import Browser, Locator, Page, Playwright, ViewportSize, sync_playwright
from playwright.sync_api import TimeoutError as OutOfTime
from processes import wait_until

from nbddp.ui.panel.controls import DOUBLE_CLICK_SECONDS

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
IS_LAB = os.environ.get("FRONT_END", "lab") == "lab"  # else it is Notebook 7
CHROMIUM_ARGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
]
SIZE: ViewportSize = {"width": 1200, "height": 1000}
SERVER = (
    *("jupyterlab" if IS_LAB else "notebook", "--port=0", "--expose-app-in-browser"),
    *("--IdentityProvider.token={token}", "--ServerApp.root_dir={folder}"),
)
OPTIONS = ("--no-browser", "--allow-root", "--ip=127.0.0.1")  # of any server
# what Notebook 7 complains of by itself, with any notebook: it has neither of the two
_OF_NOTEBOOK_7 = re.compile(r"404 \(Not Found\) \S*/lsp/status|undefined \(reading 'schema'\)")
_IDLE = (
    "return panel.sessionContext.session.kernel.status === 'idle' && "
    "!panel.content.widgets.some(c => (c.promptNode?.innerText || '').includes('[*]'))"
)
_LAST_HAS_RUN = (
    "return panel.content.widgets.filter(c => c.model.type === 'code').at(-1)"
    ".model.executionCount !== null"
)
_PANEL = "const panel = window.jupyterapp?.shell?.currentWidget;"
# the notebook in front: a page may hold others behind it
_FRONT = ".jp-NotebookPanel:not(.lm-mod-hidden)"
_SHOWS = "return panel?.context?.path === PATH && panel.content.widgets.length > 0"


def write_notebook(path: Path, *cells: str) -> None:
    """Write a notebook with these code cells; all tests share a folder, so the name must be new."""
    if path.exists():
        raise FileExistsError(f"another test has a notebook of this name: {path.name}")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    nbformat.write(notebook, path)


def accessibility_problems(page: Page, *places: str, **options: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe  # absent where hosted pages are tried

    results: dict[str, Any] = (
        Axe().run(page, context={"include": [[each] for each in places]}, options=options).response
    )
    assert results["passes"], "it has looked at something"
    return [
        f"{violation['id']}: {node['failureSummary']} {node['html']}"
        for violation in results["violations"]
        for node in violation["nodes"]
    ]


class Lab:
    """A JupyterLab server on loopback, with all its files in one folder.

    ``browser`` is another's, which stays; without it there will be one of its own. ``server`` is
    the module of another server, with its options.
    """

    def __init__(
        self, root: Path, *, browser: Browser | None = None, server: Sequence[str] = SERVER
    ) -> None:
        self.notebooks = root / "notebooks"
        self.token = secrets.token_hex(16)
        self._root = root
        command = (*server, *OPTIONS)
        self._command = [each.format(token=self.token, folder=self.notebooks) for each in command]
        self._browser = browser
        self._playwright: Playwright | None = None

    def __enter__(self) -> Lab:
        self.notebooks.mkdir(parents=True, exist_ok=True)
        self._log = (self._root / "lab.log").open("w")
        self._server = subprocess.Popen(
            [sys.executable, "-m", *self._command],
            env=self._environment(),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.url = self._await_url()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._playwright is not None and self._browser is not None:
                self._browser.close()
                self._playwright.stop()
        finally:
            self._end_server()

    def _end_server(self) -> None:
        children = psutil.Process(self._server.pid).children(recursive=True)
        with contextlib.suppress(OSError):  # it may hang up before it answers
            self.request("POST", "/api/shutdown")
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        for child in psutil.wait_procs(children, timeout=20)[1]:
            child.kill()
        self._log.close()

    def _environment(self) -> dict[str, str]:
        names = ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
        folders = {name: str(self._root / name.lower()) for name in names}
        settings = {
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
            "apputils-extension/themes": {"theme": os.environ.get("LAB_THEME", "JupyterLab Light")},
            "notebook-extension/tracker": {"windowingMode": "none"},  # draw every cell
        }
        base = Path(folders["JUPYTER_CONFIG_DIR"], "lab", "user-settings", "@jupyterlab")
        for name, value in settings.items():
            path = base / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value))
        return os.environ | folders

    def _await_url(self) -> str:
        """The address that the server itself wrote down when it was ready."""
        found: list[str] = []

        def is_ready() -> bool:
            for path in (self._root / "jupyter_runtime_dir").glob("*server-*.json"):
                with contextlib.suppress(ValueError):  # half written
                    found.append(str(json.loads(path.read_text())["url"]).rstrip("/"))
            return bool(found) or self._server.poll() is not None

        wait_until(is_ready, timeout=60)
        if not found:
            raise RuntimeError(f"no server:\n{(self._root / 'lab.log').read_text()}")
        return found[0]

    def request(self, method: str, path: str, body: dict[str, str] | None = None) -> None:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            headers={"Authorization": f"token {self.token}"},
            data=json.dumps(body).encode() if body else None,
        )
        urllib.request.urlopen(request, timeout=60).close()

    def address(self, name: str) -> str:
        place = "lab/tree" if IS_LAB else "notebooks"
        return f"{self.url}/{place}/{name}?token={self.token}&reset"

    def open(self, name: str, *cells: str, scale: float = 1) -> AbstractContextManager[LabNotebook]:
        """Open a notebook, a new one if it has cells, in a page and with a kernel of its own."""
        if cells:
            write_notebook(self.notebooks / name, *cells)
        return self._open(self.address(name), scale=scale)

    def open_first_page(self) -> AbstractContextManager[LabNotebook]:
        """Open the page that the server itself leads to, which has to be a notebook."""
        return self._open(f"{self.url}/?token={self.token}")

    @contextlib.contextmanager
    def _open(self, address: str, *, scale: float = 1) -> Iterator[LabNotebook]:
        context = self.browser().new_context(viewport=SIZE, device_scale_factor=scale)
        try:
            page = context.new_page()
            notebook = LabNotebook(page)
            page.goto(address)
            notebook.await_ready()
            try:
                yield notebook
            finally:
                notebook.shut_down_kernel()
        finally:
            context.close()

    def browser(self) -> Browser:
        if self._browser is None:
            self._playwright = sync_playwright().start()
            self._browser = self._playwright.chromium.launch(
                executable_path=CHROMIUM, args=CHROMIUM_ARGS
            )
        return self._browser


class LabNotebook:
    def __init__(self, page: Page) -> None:
        self.page = page
        self._pictures = 0
        self.problems: list[str] = []
        page.on("pageerror", self._note_error)
        page.on("console", self._note)

    def listen_no_more(self) -> None:
        self.page.remove_listener("pageerror", self._note_error)
        self.page.remove_listener("console", self._note)

    def _note_error(self, error: Any) -> None:
        self._complain(f"page: {error}")

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self._complain(f"console: {message.text} {message.location.get('url', '')}")

    def _complain(self, problem: str) -> None:
        if IS_LAB or not _OF_NOTEBOOK_7.search(problem):
            self.problems.append(problem)

    def js(self, body: str) -> Any:
        """Run JavaScript with ``panel``, the current notebook."""
        return self.page.evaluate(f"async () => {{ {_PANEL} {body} }}")

    def await_ready(self) -> None:
        self.page.wait_for_selector(f"{_FRONT} .jp-Cell", timeout=60_000)
        self.await_js("return panel?.sessionContext?.session?.kernel?.status === 'idle'", 60)

    def run_all(self, *, timeout: float = 120) -> None:
        """Run all cells, as the menu does, and wait for the last."""
        self.js("await window.jupyterapp.commands.execute('notebook:run-all-cells')")
        # the command ends at a cell that fails, also where it is meant to and the others go on
        self.await_js(_LAST_HAS_RUN, timeout)
        self.await_idle(timeout)

    def begin(self, cell: int) -> None:
        """Run one code cell, as Shift+Enter does, and do not wait for it; a folded one stays so."""
        self.code_cell(cell).locator(".cm-content, .jp-Placeholder-prompt").first.click()
        self.page.keyboard.press("Shift+Enter")

    def run(self, cell: int, *, timeout: float = 60) -> None:
        self.begin(cell)
        self.await_idle(timeout)

    def await_idle(self, timeout: float = 60) -> None:
        self.await_js(_IDLE, timeout)
        self._take_picture()

    def await_kernel(self, timeout: float = 60) -> None:
        """Wait until the kernel is idle.

        While a page that was loaded again asks for its widgets, it shows the kernel as idle for a
        few milliseconds, now and then, though a cell runs.
        """
        late = f"new Promise((_, refuse) => setTimeout(refuse, {1000 * timeout}, 'no answer'))"
        answer = "panel.sessionContext.session.kernel.requestKernelInfo()"
        self.js(f"await Promise.race([{answer}, {late}])")

    def code_cell(self, cell: int) -> Locator:
        return self.page.locator(f"{_FRONT} .jp-CodeCell").nth(cell)

    def place_of(self, source: str) -> int:
        """Return the index of the code cell that begins with this text."""
        [place] = [at for at, each in enumerate(self.sources()) if each.startswith(source)]
        return place

    def _of_code_cells(self, make: str) -> list[str]:
        code_cells = "panel.content.widgets.filter(c => c.model.type === 'code')"
        return list(self.js(f"return {code_cells}{make}"))

    def sources(self) -> list[str]:
        return self._of_code_cells(".map(c => c.model.sharedModel.source)")

    def outputs(self) -> list[str]:
        return self._of_code_cells(".map(c => c.outputArea.node.innerText)")

    def errors(self) -> list[str]:
        """Return the exceptions that cells show, and the refusals, which are lines of text."""
        return self._of_code_cells(
            ".flatMap(c => c.model.outputs.toJSON())"
            ".filter(o => o.output_type === 'error' || String(o.text).startsWith('UsageError: '))"
            ".map(o => o.text ?? `${o.ename}: ${o.evalue}`)"
        )

    def text(self, cell: int) -> str:
        return self.code_cell(cell).locator(".jp-Cell-outputArea").inner_text().strip()

    def await_text(self, cell: int, pattern: str, *, timeout: float = 60) -> re.Match[str]:
        found: list[re.Match[str]] = []

        def is_shown() -> bool:
            found.extend(re.finditer(pattern, self.text(cell), re.MULTILINE))
            return bool(found)

        if not wait_until(is_shown, timeout=timeout):
            raise TimeoutError(f"{pattern!r} is not in:\n{self.text(cell)}")
        self._take_picture()
        return found[0]

    def button(self, label: str) -> Locator:
        return self.page.locator("button.jupyter-button", has_text=re.compile(rf"^\s*{label}\s*$"))

    def press_twice(self, label: str) -> None:
        """Press a button that asks first, and answer; on a slow page it may take that back."""
        for _ in range(9):
            self.button(label).click()
            self.page.wait_for_timeout(2000 * DOUBLE_CLICK_SECONDS)
            with contextlib.suppress(OutOfTime):
                self.button(rf"{label}\?").click(timeout=6_000)
                return
        raise TimeoutError(f"{label} asked, and took it back before it was answered")

    def save(self) -> None:
        self.js("await window.jupyterapp.commands.execute('docmanager:save')")

    def shut_down_kernel(self) -> None:
        self.js("await panel.sessionContext.shutdown()")

    def reload(self) -> None:
        """Load the page again, as F5 does; the kernel may be busy.

        JupyterLab saves most of a second late, and not always, which notebooks a page holds, and F5
        would open those too: ``reset`` has it open the page's own alone.
        """
        path = self.js("return panel.context.path")
        if IS_LAB:
            self.page.goto(re.sub(r"/tree\b.*", f"/tree/{quote(path)}?reset", self.page.url))
        else:
            self.page.reload()
        self.await_js(_SHOWS.replace("PATH", json.dumps(path)))
        self.page.wait_for_selector(f"{_FRONT} .jp-Cell", timeout=60_000)

    def await_js(self, condition: str, timeout: float = 60) -> None:
        if not wait_until(lambda: bool(self.js(condition)), timeout=timeout):
            raise TimeoutError(condition)

    def _take_picture(self) -> None:
        """Write a picture of the page to the folder ``PICTURES``, if the variable is set."""
        if "PICTURES" in os.environ:
            self._pictures += 1
            test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].partition(" ")[0]
            name = f"{test}-{self._pictures}.png"
            self.page.screenshot(path=Path(os.environ["PICTURES"], name))
