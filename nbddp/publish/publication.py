"""The notebook's side: starts the publishing process and reads its reports."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError
from nbddp.formatting import describe_exit
from nbddp.publish.publisher_process import ANSWER_TIMEOUT
from nbddp.publish.tracker import Target
from nbddp.sigint import start_thread

POLL_INTERVAL = 0.5  # seconds between two checks of whether the run goes on
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
EXIT_TIMEOUT = 5.0  # seconds until a process that should have ended is killed


class Publication:
    """A process that publishes one run to one tracker.

    The output of the tracker goes to ``publish-KIND.log`` in the run's folder.

    Args:
        target: the tracker and its project.
        folder: the folder of the run.
        name: the name of the run in the tracker.
        is_live: whether it follows the run until :meth:`close`, or until this process ends.
        timeout: the seconds that the tracker may take for an answer.

    Raises:
        RequestError: the process cannot be started.
    """

    def __init__(
        self,
        target: Target,
        folder: Path,
        name: str,
        *,
        is_live: bool,
        timeout: float = ANSWER_TIMEOUT,
    ) -> None:
        self.target, self.folder = target, folder
        self.log = folder / f"publish-{target.kind}.log"
        command = [sys.executable, "-m", "nbddp.publish", str(target), str(folder.resolve()), name]
        command += ["--patience", str(timeout), *(["--live", str(os.getpid())] if is_live else [])]
        try:
            with os.fdopen(os.open(self.log, _APPEND, 0o600), "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # protects it from an interrupt of the cell
                )
        except OSError as error:
            raise RequestError(f"publishing cannot be started: {error.strerror}") from None
        self.follower: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Tell the process that the run is over: it publishes the rest and ends."""
        if self._process.stdin is not None:
            with suppress(OSError):  # the process has ended
                self._process.stdin.close()

    def wait(self) -> dict[str, Any]:
        """Wait until the whole run is published.

        Returns:
            A dict: ``where`` the run is, the number of published ``steps``, and the number of
            values that arrived too ``late``.

        Raises:
            RequestError: publishing failed; the message has the tracker's error.
            KeyboardInterrupt: the user interrupted the wait; the process is terminated.
        """
        self.close()
        try:
            for message in self._reports():
                if "failed" in message:
                    raise RequestError(self._failure_text(message["failed"]))
                if "is_over" in message:
                    return message
            raise RuntimeError("a process that publishes ended without a report")
        except KeyboardInterrupt:
            self._process.terminate()
            raise
        finally:
            self._stop_process()

    def follow(self, notify: Callable[[str], None], is_running: Callable[[], bool]) -> None:
        """Read the reports on a thread while the notebook continues.

        Args:
            notify: called with a text: where the run is published, a warning, or a failure.
            is_running: returns whether the run goes on.
        """
        self.follower = threading.Thread(
            target=self._follow, args=(notify, is_running), name="nbddp-published", daemon=True
        )
        start_thread(self.follower)

    def _failure_text(self, why: str) -> str:
        return f"publishing to {self.target.kind} failed: {why} (more in {self.log})"

    def _follow(self, notify: Callable[[str], None], is_running: Callable[[], bool]) -> None:
        is_reported = False
        for message in self._reports(is_running):
            if "where" in message and not is_reported:
                is_reported = True
                notify(f"published to {self.target.kind}: {message['where']}")
            if "warned" in message:
                notify(f"{self.target.kind}: {message['warned']}")
            if "failed" in message:
                later = f"To try again: `%ddp publish {self.target} {self.folder.name} --again`"
                notify(f"{self._failure_text(message['failed'])}; the run continues. {later}")
        self._stop_process()

    def _reports(self, is_running: Callable[[], bool] = lambda: True) -> Iterator[dict[str, Any]]:
        """Yield the reports of the process until it has ended; the last one is its result.

        Args:
            is_running: returns whether the run goes on; if not, the process is told to end.
        """
        rest, is_explained = b"", False
        while True:
            if not is_running():
                self.close()
            is_over = self.has_ended  # checked first: its last output is read below
            data = self._read(0 if is_over else POLL_INTERVAL)
            if is_over and not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for message in map(json.loads, lines):
                is_explained = is_explained or "failed" in message or "is_over" in message
                yield message
        if not is_explained:
            yield {"failed": f"its process {describe_exit(self._process.returncode)}"}

    def _read(self, seconds: float) -> bytes:
        """Return the output that arrives within some seconds, at most 64 KiB."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return b""
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:  # it has closed its output and is about to end
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_INTERVAL / 10)
        return data

    def _stop_process(self) -> None:
        """Wait for the process, kill it if it does not end, and close its pipes."""
        try:
            self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
