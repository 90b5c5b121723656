"""A real ipykernel: the output that its client receives, and the memory of its processes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

HERE = Path(__file__).resolve().parent
TIMEOUT = 120.0  # seconds; a contender that takes longer is broken
ARGV = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]

Chunk = tuple[float, str]  # the time of its arrival, and the text


class KernelError(RuntimeError):
    """A cell failed, or an expected message did not arrive."""


class Kernel:
    """A kernel on loopback in its own folder; at the end all its processes are killed."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="nbddp-bench-"))
        self._manager = KernelManager(connection_file=str(self.home / "kernel.json"))
        self._manager.kernel_spec.argv = (
            ARGV  # this Python, even if another one is installed as "python3"
        )
        self._errors = ""

    def __enter__(self) -> Kernel:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _start(self) -> None:
        with (self.home / "kernel.log").open("w") as log:
            self._manager.start_kernel(
                cwd=str(self.home), env=_environment(self.home), stdout=log, stderr=log
            )
        self._client = self._manager.client()
        self._client.start_channels(hb=False)
        self._client.wait_for_ready(timeout=TIMEOUT)

    def _end(self) -> None:
        started = self.children() if self._manager.has_kernel else []
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)
        if hasattr(self, "_client"):
            self._client.stop_channels()
        _end_all(started)
        shutil.rmtree(self.home)

    # ---- cells

    def send(self, code: str, *, asks: bool = False) -> str:
        """Send a cell that may or may not ask for input; return the id of the request."""
        return str(self._client.execute(code, allow_stdin=asks))

    def question(self) -> float:
        """Wait until the kernel asks for input; return the time."""
        self._receive(self._client.get_stdin_msg, time.time() + TIMEOUT)
        return time.time()

    def answer(self, text: str) -> None:
        """Send the answer to a question."""
        self._client.input(text)

    def reply(self, request: str) -> float:
        """Wait for the reply to a cell; return the time of its arrival."""
        deadline = time.time() + TIMEOUT
        while True:
            message = self._receive(self._client.get_shell_msg, deadline)
            at = time.time()
            if message["parent_header"].get("msg_id") == request:
                break
        if message["content"]["status"] != "ok":
            raise KernelError("\n".join(message["content"].get("traceback", ["aborted"])))
        return at

    def run(self, code: str) -> float:
        """Run a cell; return the seconds from the request to its reply."""
        sent = time.time()
        return self.reply(self.send(code)) - sent

    def collect(self, marker: str, count: int = 1) -> list[Chunk]:
        """Return the printed chunks and their times, until ``marker`` has come ``count`` times."""
        chunks: list[Chunk] = []
        deadline, tail = time.time() + TIMEOUT, ""
        while count > 0:
            text = self._next_text(deadline)
            chunks.append((time.time(), text))
            window = tail + text
            count -= window.count(marker)
            tail = window[1 - len(marker) :]  # the start of a marker that is cut in two
        return chunks

    def _next_text(self, deadline: float) -> str:
        while True:
            message = self._receive(self._client.get_iopub_msg, deadline)
            content = message["content"]
            if message["msg_type"] == "error":
                raise KernelError("\n".join(content["traceback"]))
            if message["msg_type"] == "stream":
                if content["name"] == "stdout":
                    return str(content["text"])
                self._errors += content["text"]

    def _receive(self, get: Any, deadline: float) -> dict[str, Any]:
        try:
            message: dict[str, Any] = get(timeout=max(0.0, deadline - time.time()))
        except Empty:
            raise KernelError(f"nothing for {TIMEOUT:.0f} s; stderr: {self._errors}") from None
        return message

    # ---- processes

    def process(self) -> psutil.Process:
        """Return the process of the kernel."""
        return psutil.Process(self._manager.provisioner.pid)

    def children(self) -> list[psutil.Process]:
        """Return all descendants of the kernel."""
        return self.process().children(recursive=True)

    def memory(self) -> float:
        """Return the PSS of all descendants together, in MiB."""
        return sum(map(_pss, self.children())) / 2**20


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0  # the process has ended


def _environment(home: Path) -> dict[str, str]:
    private = {
        name: str(home / name.lower())
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    equal = {  # equal for all; without it torchrun warns and gloo searches an interface
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
    }
    return os.environ | private | equal


def _end_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue  # it ended with its kernel
    _, alive = psutil.wait_procs(processes, timeout=10)
    if alive:
        raise KernelError(f"these outlived SIGKILL: {alive}")
