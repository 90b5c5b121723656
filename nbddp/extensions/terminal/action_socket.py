"""The socket through which a terminal of the same user interrupts, stops or kills ranks."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nbddp.errors import NbddpError, RequestError
from nbddp.extensions.runs.live_index import remove_files_of_dead_kernels
from nbddp.private_files import is_private_folder, make_private_folders
from nbddp.sigint import run_in_thread, start_thread

MAX_PATH = 107  # bytes of a socket's path on Linux
MAX_REQUEST = 4096  # bytes
TIMEOUT = 60.0  # seconds: a stop waits until all ranks have exited
_FOLDER = "nbddp-{}"  # in the temporary folder, with the user's id
logger = logging.getLogger(__name__)

Json = dict[str, Any]


class ActionSocket:
    """Serves requests until it is closed, each on a thread of its own.

    Args:
        act: carries out a request; a NbddpError refuses it.

    Raises:
        OSError: there is no private folder for it, or the system does not report a peer's user.
    """

    def __init__(self, act: Callable[[Json], str]) -> None:
        self._act = act
        folder = _folder()
        remove_files_of_dead_kernels(folder)
        self.path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="nbddp-actions", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """End the thread and remove the socket."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close() alone would not end accept()
        self._listener.close()
        self._thread.join(TIMEOUT)
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # it was closed
                return
            run_in_thread("nbddp-action", partial(self._answer, peer))

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            peer.settimeout(TIMEOUT)
            if _user_of(peer) != os.geteuid():
                logger.warning("a request of another user was refused")
                return
            try:
                answer = {"done": self._act(json.loads(peer.recv(MAX_REQUEST)))}
            except (NbddpError, ValueError) as error:
                answer = {"error": str(error)}
            with suppress(OSError):  # the command has ended
                peer.sendall(json.dumps(answer).encode())


def ask(path: str, request: Json) -> str:
    """Send a request to a socket of this user; return what was done.

    Raises:
        RequestError: it was refused, or nothing answers.
    """
    folder = Path(path).parent
    if not path or not is_private_folder(folder):
        raise RequestError("the kernel has no socket that only you can use; act in the notebook")
    try:
        with socket.socket(socket.AF_UNIX) as kernel:
            kernel.settimeout(TIMEOUT)
            kernel.connect(path)
            if _user_of(kernel) != os.geteuid():
                raise PermissionError(1, "it belongs to another user")
            kernel.sendall(json.dumps(request).encode())
            answer = json.loads(kernel.recv(1 << 16) or "{}")
    except (OSError, ValueError) as error:
        raise RequestError(f"the kernel does not answer: {error}") from None
    if "done" not in answer:
        raise RequestError(str(answer.get("error", "the kernel refused the request")))
    return str(answer["done"])


def _folder() -> Path:
    """Return a private folder whose path is short enough for a socket."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise OSError("this system does not report which user connects to a socket")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if 0 < len(os.fsencode(runtime)) < MAX_PATH - 40:  # room for "/nbddp/PID-TOKEN"
        with suppress(OSError):
            return make_private_folders(Path(runtime), "nbddp")
    return make_private_folders(Path("/tmp"), _FOLDER.format(os.geteuid()))


def _user_of(peer: socket.socket) -> int:
    """Return the id of the user at the other end."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)
