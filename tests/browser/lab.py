"""A real JupyterLab in a real Chromium, both started here and ended here."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
_CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
_PANEL = "const panel = window.jupyterapp.shell.currentWidget;"


class Lab:
    """A JupyterLab server on loopback, with all its files in one folder."""

    def __init__(self, root: Path) -> None:
        self.notebooks = root / "notebooks"
        self._root = root
        self._token = secrets.token_hex(16)

    def __enter__(self) -> Lab:
        self.notebooks.mkdir(parents=True)
        self._log = (self._root / "lab.log").open("w")
        self._server = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
                *("--ip=127.0.0.1", "--port=0", "--expose-app-in-browser"),
                f"--IdentityProvider.token={self._token}",
                f"--ServerApp.root_dir={self.notebooks}",
            ],
            env=self._environment(),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.url = self._await_url()
        return self

    def __exit__(self, *_: object) -> None:
        children = psutil.Process(self._server.pid).children(recursive=True)
        with contextlib.suppress(OSError):  # it may hang up before it answers
            self._request("POST", "/api/shutdown")
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        for child in psutil.wait_procs(children, timeout=5)[1]:
            child.kill()
        self._log.close()

    def _environment(self) -> dict[str, str]:
        folders = {
            name: str(self._root / name.lower())
            for name in (
                "JUPYTER_CONFIG_DIR",
                "JUPYTER_RUNTIME_DIR",
                "JUPYTER_DATA_DIR",
                "JUPYTERLAB_SETTINGS_DIR",
                "JUPYTERLAB_WORKSPACES_DIR",
                "IPYTHONDIR",
            )
        }
        settings = {
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
            "apputils-extension/themes": {"theme": os.environ.get("LAB_THEME", "JupyterLab Light")},
            "notebook-extension/tracker": {"windowingMode": "none"},  # draw every cell
        }
        base = Path(folders["JUPYTERLAB_SETTINGS_DIR"], "@jupyterlab")
        for name, value in settings.items():
            path = base / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value))
        return os.environ | folders

    def _await_url(self) -> str:
        """The address that the server itself wrote down when it was ready."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for path in (self._root / "jupyter_runtime_dir").glob("jpserver-*.json"):
                with contextlib.suppress(ValueError):  # half written
                    return str(json.loads(path.read_text())["url"]).rstrip("/")
            if self._server.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"JupyterLab did not start:\n{(self._root / 'lab.log').read_text()}")

    def _request(self, method: str, path: str) -> None:
        request = urllib.request.Request(
            self.url + path, method=method, headers={"Authorization": f"token {self._token}"}
        )
        urllib.request.urlopen(request, timeout=10).close()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[LabNotebook]:
        """Open a notebook in a browser of its own."""
        with sync_playwright() as playwright:
            browser: Browser = playwright.chromium.launch(
                executable_path=CHROMIUM, args=_CHROMIUM_ARGS
            )
            try:
                page = browser.new_page(viewport={"width": 1200, "height": 1000})
                notebook = LabNotebook(page)
                page.goto(f"{self.url}/lab/tree/{name}?token={self._token}&reset")
                notebook.await_ready()
                yield notebook
            finally:
                browser.close()


class LabNotebook:
    """A notebook on the page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(f"page: {error}"))
        page.on("console", self._note)

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(f"console: {message.text} {message.location.get('url', '')}")

    def js(self, body: str) -> Any:
        """Run JavaScript with ``panel``, the current notebook."""
        return self.page.evaluate(f"async () => {{ {_PANEL} {body} }}")

    def await_ready(self) -> None:
        """Until the notebook is shown and its kernel idle."""
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
        self._await("return panel?.sessionContext?.session?.kernel?.status === 'idle'", 60)

    def run_all(self, *, timeout: float = 120) -> None:
        """Run all cells, as the menu does, and wait for the last."""
        self.js("await window.jupyterapp.commands.execute('notebook:run-all-cells')")
        self._await(
            "return panel.sessionContext.session.kernel.status === 'idle' && "
            "!panel.content.widgets.some(c => (c.promptNode?.innerText || '').includes('[*]'))",
            timeout,
        )

    def _await(self, condition: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self.js(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(condition)
            time.sleep(0.1)

    def outputs(self) -> list[str]:
        """The text under each code cell."""
        return list(
            self.js(
                "return panel.content.widgets.filter(c => c.model.type === 'code')"
                ".map(c => c.outputArea.node.innerText)"
            )
        )

    def shot(self, path: Path, *, cell: int) -> None:
        """A picture with this code cell in the middle."""
        self.page.locator(".jp-CodeCell").nth(cell).scroll_into_view_if_needed()
        self.page.screenshot(path=path)
