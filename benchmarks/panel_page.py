"""A notebook page with one cell, and the processes behind it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import panel_work
import psutil
from browser.lab import Lab, LabNotebook, write_notebook
from playwright.sync_api import Locator
from processes import marked

HERE = Path(__file__).resolve().parent
SCRIPT = (HERE / "panel_page.js").read_text()
RANKS = panel_work.RANKS
TIMEOUT = 20.0  # seconds that an expected event may take
CELL_LIMIT = 180.0  # seconds
MAX_SKEW = 0.002  # seconds between the page's clock and ours
SETUP = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import panel_work
panel_work.install_hooks()
%load_ext nbddp
"""

T = TypeVar("T")


class BenchError(RuntimeError):
    """A cell failed, or an expected event did not happen."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a cell: seconds, CPU seconds of the kernel, and the delay of the page.

    The ``lag`` of a page that was not finished at the limit is the time until then.
    """

    seconds: float
    cpu: float
    lag: float


class BenchPage:
    """A notebook with a group of ranks: its page, its kernel and its files."""

    def __init__(self, notebook: LabNotebook, folder: Path) -> None:
        self.notebook = notebook
        self.page = notebook.page
        self.folder = folder
        self.page.evaluate(SCRIPT)
        self._check_clock()

    def set_up(self, ranks: int) -> None:
        """Start the ranks and find the processes."""
        self.run(f"{SETUP}%ddp start --nproc {ranks}")
        self.kernel = psutil.Process(int((self.folder / panel_work.PID).read_text()))
        self.server = self.kernel.parent()

    def _check_clock(self) -> None:
        before, there, after = time.time(), self.ask("now()"), time.time()
        if not before - MAX_SKEW < there < after + MAX_SKEW:
            raise BenchError(f"the page's clock is {there - before:.4f} s away from ours")

    def close(self) -> None:
        """Shut down the kernel, and with it the ranks."""
        self._check_clock()
        self.notebook.shut_down_kernel()

    def ask(self, code: str, *arguments: Any) -> Any:
        """Evaluate a function of the script in the page."""
        return self.page.evaluate(f"it => nbddpBench.{code}", *arguments)

    # ---- cells

    def begin(self, source: str) -> None:
        """Start a cell without waiting for it."""
        self.ask("begin(it)", source.strip())

    def finish(self, *, fails: bool = False) -> None:
        """Wait for the end of the cell."""
        found = self.ask("finish(it)", CELL_LIMIT)
        if found["ended"] is None:
            raise BenchError(f"a cell still runs after {CELL_LIMIT:g} s; {self.ask('text()')}")
        if found["errors"] and not fails:
            raise BenchError("\n".join([*found["errors"], self.ask("text()")]))

    def run(self, source: str, *, fails: bool = False) -> None:
        """Run a cell."""
        self.begin(source)
        self.finish(fails=fails)

    def run_metered(self, source: str, *, limit: float) -> Cost:
        """Run a cell, and give the page a limited time to show its whole output."""
        self.begin(source)
        cells = self.folder / panel_work.CELLS
        count = cells.read_text().count("\n")
        deadline = time.monotonic() + CELL_LIMIT
        while cells.read_text().count("\n") == count:  # do not ask the page: that would disturb it
            if time.monotonic() > deadline:
                raise BenchError(f"a cell still runs after {CELL_LIMIT:g} s; {self.ask('text()')}")
            time.sleep(0.1)
        began, cpu, ended, cpu_at_end = json.loads(cells.read_text().splitlines()[-1])
        found = self.ask("finish(it)", limit)
        if found["errors"]:
            raise BenchError("\n".join(found["errors"]))
        lag = (found["ended"] or time.time()) - ended
        return Cost(seconds=ended - began, cpu=cpu_at_end - cpu, lag=lag)

    def wait_for_text(self, text: str, *, count: int) -> None:
        """Wait until the output has this text so many times."""
        self.wait_until(lambda: self.ask("text()").count(text) >= count, f"{text!r} x {count}")

    def wait_for_file(self, name: str) -> Path:
        """Wait until this file exists."""
        path = self.folder / name
        self.wait_until(path.exists, f"the file {name}")
        return path

    def wait_until(self, find: Callable[[], T | None], what: str) -> T:
        """Wait until ``find`` returns a result."""
        deadline = time.monotonic() + TIMEOUT
        while not (found := find()):
            if time.monotonic() > deadline:
                raise BenchError(f"{what}: not within {TIMEOUT:g} s; {self.ask('text()')}")
            time.sleep(0.02)
        return found

    # ---- the mouse

    def press(self, button: Locator) -> float:
        """Click with the mouse; return the time of the press."""
        earlier = len(self.ask("presses"))
        button.click()
        presses = self.ask("presses")
        if len(presses) != earlier + 1:
            raise BenchError(f"one click, and {len(presses) - earlier} times the mouse went down")
        return float(presses[-1])

    def stop_button(self) -> Locator:
        """Return the stop button in JupyterLab's toolbar."""
        place = '.jp-NotebookPanel:not(.lm-mod-hidden) [data-command="notebook:interrupt-kernel"]'
        return self.page.locator(place).first

    # ---- records of the kernel and the ranks

    def handled(self, what: str, pressed: float) -> float:
        """Return the time when the kernel's handler first ran after a press."""
        path = self.folder / panel_work.EVENTS

        def find() -> float | None:
            moves = [json.loads(line) for line in path.read_text().splitlines()]
            return next((at for at, said in moves if said == what and at >= pressed), None)

        return self.wait_until(find, f"the handler of {what!r}")

    def exited(self, rank: int, pressed: float) -> float:
        """Return the time when the kernel recorded the exit of a rank."""

        def find() -> float | None:
            exits = [each for each in self._records("events.jsonl") if each["kind"] == "exit"]
            ends = (each["time"] for each in exits if each["rank"] == rank)
            return next((at for at in ends if at >= pressed), None)

        return self.wait_until(find, f"the exit of rank {rank}")

    def metrics(self, name: str) -> list[tuple[int, int]]:
        """Return rank and step of every line of ``metrics.jsonl`` with this metric."""
        rows = self._records("metrics.jsonl")
        return [(row["rank"], row["step"]) for row in rows if name in row]

    def _records(self, name: str) -> list[dict[str, Any]]:
        lines = (self.run_folder() / name).read_text().splitlines()
        return [json.loads(line) for line in lines]

    def run_folder(self) -> Path:
        """Return the run folder of the group; the newest if there are several."""
        return max((self.folder / ".nbddp" / "runs").iterdir())

    # ---- processes

    def browser_seconds(self) -> float:
        """Return the CPU seconds of the browser."""
        server = {process.pid for process in self.server.children(recursive=True)}
        others = psutil.Process().children(recursive=True)
        browser = [each for each in others if each.pid not in {self.server.pid, *server}]
        return sum(map(_cpu, browser))

    @contextmanager
    def watching_memory(self) -> Iterator[list[int]]:
        """Sample the RSS of the kernel during the block, in bytes."""
        samples = [self.kernel.memory_info().rss]
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(0.05):
                samples.append(self.kernel.memory_info().rss)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield samples
        finally:
            is_over.set()
            thread.join()


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()  # without those of its children
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


@contextmanager
def opened(lab: Lab, name: str, ranks: int = RANKS) -> Iterator[BenchPage]:
    """Open a page with its own kernel in its own folder."""
    folder = lab.notebooks / name
    folder.mkdir()
    write_notebook(folder / "bench.ipynb", "")
    with lab.open(f"{name}/bench.ipynb") as notebook:
        page = BenchPage(notebook, folder)
        page.set_up(ranks)
        yield page
        page.close()
        for problem in notebook.problems:
            print(f"the page of {name} says: {problem}")


def kill_leftovers() -> list[str]:
    """Kill the processes that should have ended with the server; return what they were."""
    deadline = time.monotonic() + 5
    while (leftovers := marked()) and time.monotonic() < deadline:
        time.sleep(0.1)
    descriptions = [
        f"{pid} {' '.join(process.cmdline())[:80]}" for pid, process in leftovers.items()
    ]
    for process in leftovers.values():
        process.kill()
    return descriptions
