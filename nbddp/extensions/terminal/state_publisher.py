"""Write the state of a session's run into its folder, for terminals; on a thread of its own."""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import psutil

from nbddp.controller.cell_hooks import SessionHooks
from nbddp.controller.session import Session
from nbddp.extensions.runs import STATE_FILE
from nbddp.extensions.runs.live_index import IndexEntry
from nbddp.extensions.terminal.action_socket import ActionSocket
from nbddp.extensions.terminal.actions import act
from nbddp.extensions.terminal.live_state import describe_run
from nbddp.private_files import open_private_folder
from nbddp.record.run_folder import write_atomic
from nbddp.sigint import Future, start_thread, wait_for_all

PERIOD = 1.0  # seconds between two heartbeats
SOON = 0.05  # seconds between two looks for the folder of a run that starts
START = 10.0  # seconds for which the folder is looked for so often
LAST_WRITE = 2.0  # seconds that the end of a session, or a new start, waits for the last state
logger = logging.getLogger(__name__)


class StatePublisher(SessionHooks):
    """Writes ``state.json`` when something changed, at most once a second.

    The time of the file's last change is the heartbeat: it is set every second. A write may take
    long, as on NFS, so neither the session's thread nor the main thread makes one.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[None], bool]] = SimpleQueue()  # is it the last one?
        self._thread: threading.Thread | None = None
        self._path: Path | None = None  # the folder of the run
        self._is_over = True
        self._written = ""
        self._has_failed = False
        self._soon_until = 0.0  # while a run starts
        self._index = IndexEntry()
        self._socket: ActionSocket | None = None

    def opened(self, session: Session) -> None:
        """Start the thread. Write the last state of the run before, if it was not written yet."""
        self._soon_until = time.monotonic() + START
        if self._thread is None:
            self._open_socket(session)
            work = threading.Thread(
                target=self._publish_until_closed,
                args=(session,),
                name="nbddp-terminal",
                daemon=True,
            )
            start_thread(work)
            self._thread = work
        elif session.event_log.folder is None and not self._is_over:
            self._publish_now(is_last=False)
        else:
            self._calls.put((Future(), False))  # wake the thread

    def closed(self, session: Session) -> None:
        """Write the last state, and end the thread."""
        del session
        if self._thread is not None:
            self._publish_now(is_last=True)
            self._thread = None

    def _publish_now(self, *, is_last: bool) -> None:
        done: Future[None] = Future()
        self._calls.put((done, is_last))
        wait_for_all([done], timeout=LAST_WRITE)

    # ---- on the thread

    def _publish_until_closed(self, session: Session) -> None:
        next_at, is_last = time.monotonic(), False
        while not is_last:
            done, now = None, time.monotonic()
            wait = min(next_at - now, SOON) if now < self._soon_until else next_at - now
            try:
                done, is_last = self._calls.get(timeout=max(0.0, wait))
            except Empty:
                if (now := time.monotonic()) >= next_at:
                    next_at = max(next_at + PERIOD, now)
            self._try_to_publish(session)
            if is_last and self._socket is not None:
                self._socket.close()
                self._socket = None
            if done is not None:
                done.set_result(None)

    def _try_to_publish(self, session: Session) -> None:
        """Write the state. An error is logged once for each run: the next second may go well."""
        try:
            self._publish(session)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception("the state of %s could not be written", self._path)

    def _publish(self, session: Session) -> None:
        log = session.event_log
        path, is_over = log.path, log.is_over
        if log.folder is not None:
            self._soon_until = 0.0
        elif not is_over:  # the next notebook writes the state
            return
        if path is None:
            return
        if path != self._path:
            if not is_over:
                self._index.write(path)
            self._path, self._is_over, self._written, self._has_failed = path, False, "", False
        if self._is_over:
            return
        kernel = {**_kernel(), "socket": str(self._socket.path) if self._socket else ""}
        facts = {**describe_run(session, is_over=is_over), "kernel": kernel}
        text = json.dumps(facts, default=str)
        if text != self._written:
            write_atomic(path / STATE_FILE, text + "\n")
            self._written = text
        else:
            now = time.time()
            with open_private_folder(path) as folder:
                os.utime(STATE_FILE, (now, now), dir_fd=folder, follow_symlinks=False)
        self._is_over = is_over
        if is_over:
            self._index.remove()

    def _open_socket(self, session: Session) -> None:
        """Open the socket. Without it, a terminal can still read the state."""
        try:
            self._socket = ActionSocket(partial(act, session))
        except OSError as error:
            logger.info("a terminal cannot act on these ranks: %s", error)


def _kernel() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "started": round(psutil.Process().create_time(), 2),
        "host": platform.node(),
    }
