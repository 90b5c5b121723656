"""The notebook's side: starts the publishing process and reads its reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbddp.errors import RequestError, as_request_error
from nbddp.extensions.publish.publisher_process import ANSWER_TIMEOUT
from nbddp.extensions.publish.tracker import Target
from nbddp.formatting import describe_exit
from nbddp.private_files import open_private_file
from nbddp.sigint import run_in_thread, wait_for_result

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Publication:
    """A process that publishes one run to one tracker.

    The output of the tracker goes to ``publish-KIND.log`` in the run's folder.

    Args:
        target: the tracker and its project.
        folder: the folder of the run.
        name: the name of the run in the tracker.
        notify: if the run goes on, called on a thread with a text: where the run is published, a
            warning, or a failure. The process then follows the run until it stops, or until this
            process ends. None if the run is over.
        timeout: the seconds that the tracker may take for an answer.

    Attributes:
        result: where the run is, the number of published ``steps``, and the number of values that
            arrived too ``late``; or a RequestError with the reason of a failure.

    Raises:
        RequestError: the process cannot be started.
    """

    def __init__(
        self,
        target: Target,
        folder: Path,
        name: str,
        notify: Callable[[str], None] | None = None,
        *,
        timeout: float = ANSWER_TIMEOUT,
    ) -> None:
        self.target, self.folder = target, folder
        self.log = folder / f"publish-{target.kind}.log"
        self._notify = notify
        command = [
            sys.executable,
            "-m",
            "nbddp.extensions.publish",
            str(target),
            str(folder.resolve()),
            name,
        ]
        command += ["--patience", str(timeout), *(["--live", str(os.getpid())] if notify else [])]
        with (
            as_request_error("publishing cannot be started"),
            os.fdopen(open_private_file(self.log, _APPEND), "ab") as log,
        ):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # protects it from an interrupt of the cell
            )
        self.result = run_in_thread("nbddp-published", self._read_reports)

    def wait(self) -> dict[str, Any]:
        """Wait until the whole run is published; return the result.

        Raises:
            RequestError: publishing failed; the message has the tracker's error.
            KeyboardInterrupt: the user interrupted the wait; the process is terminated.
        """
        try:
            return wait_for_result(self.result)
        except KeyboardInterrupt:
            self._process.terminate()
            raise

    def _read_reports(self) -> dict[str, Any]:
        """Pass on the notices of the process, and return its result."""
        assert self._process.stdout is not None
        report: dict[str, Any] = {}
        with self._process:  # waits for its end
            for report in map(json.loads, self._process.stdout):
                if "notice" not in report:
                    break
                if self._notify is not None:
                    self._notify(report["notice"])
        if "steps" in report:
            return report
        why = report.get("failed") or f"its process {describe_exit(self._process.returncode)}"
        failure = f"publishing to {self.target.kind} failed: {why} (more in {self.log})"
        if self._notify is not None:
            later = f"To try again: `%ddp publish {self.target} {self.folder.name} --again`"
            self._notify(f"{failure}; the run continues. {later}")
        raise RequestError(failure)
