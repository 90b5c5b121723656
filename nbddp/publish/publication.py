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
from nbddp.publish.publisher_process import PATIENCE
from nbddp.publish.tracker import Target
from nbddp.sigint import start_thread

LOOK = 0.5  # seconds between two looks at whether the run goes on
GRACE = 5.0  # seconds that a process gets to end, once nobody waits for it


class Publication:
    """A process that publishes one run to one tracker.

    What the tracker prints is in ``publish-KIND.log`` in the run's folder.

    Args:
        target: where to.
        folder: the run's.
        name: what it is called there.
        is_live: whether it follows the run until :meth:`close`, or until this process is gone.
        patience: seconds that the tracker may take for an answer.

    Raises:
        RequestError: it cannot be started.
    """

    def __init__(
        self, target: Target, folder: Path, name: str, *, is_live: bool, patience: float = PATIENCE
    ) -> None:
        self.target, self.folder = target, folder
        self.log = folder / f"publish-{target.kind}.log"
        words = [sys.executable, "-m", "nbddp.publish", str(target), str(folder.resolve()), name]
        words += ["--patience", str(patience), *(["--live", str(os.getpid())] if is_live else [])]
        try:
            with os.fdopen(os.open(self.log, _APPENDS, 0o600), "ab") as log:
                self._process = subprocess.Popen(
                    words,
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
    def is_over(self) -> bool:
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
            for said in self._reports():
                if "failed" in said:
                    raise RequestError(self._say_failed(said["failed"]))
                if "is_over" in said:
                    return said
            raise RuntimeError("a process that publishes ended without a report")
        except KeyboardInterrupt:
            self._process.terminate()
            raise
        finally:
            self._end()

    def follow(self, tell: Callable[[str], None], goes_on: Callable[[], bool]) -> None:
        """Hear it on a thread, while the notebook goes on.

        Args:
            tell: told where the run is, and, once, what went wrong.
            goes_on: whether the run does.
        """
        self.follower = threading.Thread(
            target=self._follow, args=(tell, goes_on), name="nbddp-published", daemon=True
        )
        start_thread(self.follower)

    def _say_failed(self, why: str) -> str:
        return f"publishing to {self.target.kind} failed: {why} (more in {self.log})"

    def _follow(self, tell: Callable[[str], None], goes_on: Callable[[], bool]) -> None:
        is_told = False
        for said in self._reports(goes_on):
            if "where" in said and not is_told:
                is_told = True
                tell(f"published to {self.target.kind}: {said['where']}")
            if "warned" in said:
                tell(f"{self.target.kind}: {said['warned']}")
            if "failed" in said:
                later = f"`%ddp publish {self.target} {self.folder.name} --again` tries it later"
                tell(f"{self._say_failed(said['failed'])}; the run goes on without. {later}")
        self._end()

    def _reports(self, goes_on: Callable[[], bool] = lambda: True) -> Iterator[dict[str, Any]]:
        """Yield what the process reports until it has ended; the last report says how it went.

        Args:
            goes_on: returns whether the run does; once it does not, the process is told to end.
        """
        rest, is_explained = b"", False
        while True:
            if not goes_on():
                self.close()
            is_over = self.is_over  # asked first: what it wrote before its end is read below
            data = self._read(0 if is_over else LOOK)
            if is_over and not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for said in map(json.loads, lines):
                is_explained = is_explained or "failed" in said or "is_over" in said
                yield said
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
                self._process.wait(LOOK / 10)
        return data

    def _end(self) -> None:
        """Leave nothing of it."""
        if not self.is_over:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        if not self.is_over:
            self._process.kill()
            self._process.wait()
        self.close()
        if self._process.stdout is not None:
            self._process.stdout.close()


_APPENDS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
