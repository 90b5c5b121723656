"""The notebook's side: starts the process that publishes, and hears it."""

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

from nbddp.errors import RequestError, describe_exit
from nbddp.publish.publisher_process import ANSWER_TIMEOUT
from nbddp.publish.tracker import Target
from nbddp.sigint import start_thread

POLL_INTERVAL = 0.5  # seconds between two looks at whether the run goes on
EXIT_TIMEOUT = 5.0  # seconds that a process gets to end, once nobody waits for it


class Publication:
    """A process that publishes one run to one tracker.

    What the tracker prints is in ``publish-KIND.log`` in the run's folder.

    Args:
        target: where to.
        folder: the run's.
        name: what it is called there.
        is_live: whether it follows the run until :meth:`close`, or until this process is gone.
        timeout: seconds that the tracker may take for an answer.

    Raises:
        RequestError: it cannot be started.
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
                    start_new_session=True,  # an interrupt of the cell is none of it
                )
        except OSError as error:
            raise RequestError(f"nothing can be published: {error.strerror}") from None
        self.follower: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """The run is over: what is left is published, and the process ends."""
        if self._process.stdin is not None:
            with suppress(OSError):  # it has ended
                self._process.stdin.close()

    def wait(self) -> dict[str, Any]:
        """Until all of the run is published.

        Returns:
            ``where`` it is, how many ``steps``, and how many values came too ``late``.

        Raises:
            RequestError: it failed; what the tracker says.
            KeyboardInterrupt: the user has ended it; the process is ended then.
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
        """Hear it on a thread, while the notebook goes on.

        Args:
            notify: told where the run is, and, once, what went wrong.
            is_running: whether the run goes on.
        """
        self.follower = threading.Thread(
            target=self._follow, args=(notify, is_running), name="nbddp-published", daemon=True
        )
        start_thread(self.follower)

    def _failure_text(self, why: str) -> str:
        return f"publishing to {self.target.kind} failed: {why} (more in {self.log})"

    def _follow(self, notify: Callable[[str], None], is_running: Callable[[], bool]) -> None:
        is_place_told = False
        for message in self._reports(is_running):
            if "where" in message and not is_place_told:
                is_place_told = True
                notify(f"published to {self.target.kind}: {message['where']}")
            if "warned" in message:
                notify(f"{self.target.kind}: {message['warned']}")
            if "failed" in message:
                later = f"`%ddp publish {self.target} {self.folder.name} --again` tries it later"
                notify(f"{self._failure_text(message['failed'])}; the run goes on without. {later}")
        self._stop_process()

    def _reports(self, is_running: Callable[[], bool] = lambda: True) -> Iterator[dict[str, Any]]:
        """Yield what the process reports until it has ended; the last report says how it went.

        Args:
            is_running: returns whether the run goes on; if not, the process is told to end.
        """
        rest, is_explained = b"", False
        while True:
            if not is_running():
                self.close()
            is_over = self.has_ended  # asked first: what it wrote before its end is read below
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
        """Return what arrives in this time, at most one piece."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return b""
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:  # it has closed its output, and is about to end
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_INTERVAL / 10)
        return data

    def _stop_process(self) -> None:
        """Leave nothing of it."""
        if not self.has_ended:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_TIMEOUT)
        if not self.has_ended:
            self._process.kill()
            self._process.wait()
        self.close()
        if self._process.stdout is not None:
            self._process.stdout.close()


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
