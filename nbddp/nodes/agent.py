"""``torchrun ... -m nbddp.worker --join FILE``: what each process does that torchrun starts.

The one with local rank 0 keeps the node. The others stand in their places until it ends: torchrun
then sees all of them end, well or not, as it would see ranks end.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nbddp.errors import RequestError
from nbddp.nodes.joining import Join

ORPHAN_TIMEOUT = 60.0
MEETING = 30.0  # seconds until the keeper of this node listens
_WELL = b"0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep this node, or stand in a place of it; the exit status."""
    asked = _parse(arguments)
    try:
        return _do(asked)
    except RequestError as error:
        _say(str(error))
        return 2


def _do(asked: argparse.Namespace) -> int:
    is_started = "TORCHELASTIC_RUN_ID" in os.environ
    address = _address()
    if int(os.environ.get("LOCAL_RANK", "0")):
        return _stand(address)
    path = Path(asked.join).expanduser()
    join = Join.read_token(_ask()) if asked.join == "-" else Join.load(path)
    nproc = asked.nproc_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return _keep(join, address, asked, nproc=nproc, agent_pid=os.getppid() if is_started else 0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nbddp.worker",
        description="Give this machine's ranks to a notebook; started by torchrun.",
    )
    parser.add_argument(
        "--join", required=True, help="the file that `%%ddp nodes` has written, - to be asked"
    )
    parser.add_argument(
        "--nproc-per-node", type=int, default=0, help="ranks, if torchrun does not say"
    )
    parser.add_argument(
        "--orphan-timeout",
        type=float,
        default=ORPHAN_TIMEOUT,
        help="seconds after which all ends when the notebook is gone (60)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.home() / ".nbddp" / "nodes",
        help="where ranks write their logs first (~/.nbddp/nodes)",
    )
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    sys.stderr.write(f"nbddp: {text}\n")


def _ask() -> str:
    return getpass.getpass("what `%ddp nodes` has written into its join file: ")


def _keep(
    join: Join, address: str, asked: argparse.Namespace, *, nproc: int, agent_pid: int
) -> int:
    from nbddp.nodes.keeper import Keeper

    folder = asked.folder / f"{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"no folder for logs at {folder}: {error.strerror}; --folder names another place"
        ) from error
    keeper = Keeper(
        join,
        nproc=nproc,
        folder=folder,
        agent_pid=agent_pid,
        orphan_timeout=asked.orphan_timeout,
    )
    with socket.socket(socket.AF_UNIX) as meeting:
        meeting.bind(address)
        meeting.listen(128)
        reason = asyncio.run(keeper.keep())
        if reason:
            _say(reason)
        _dismiss(meeting, well=not reason)
    if not address.startswith("\0"):
        Path(address).unlink(missing_ok=True)
    return 1 if reason else 0


def _dismiss(meeting: socket.socket, *, well: bool) -> None:
    """Tell those who stand in the other places how it ended."""
    meeting.settimeout(0)
    with suppress(BlockingIOError):
        while True:
            other, _ = meeting.accept()
            with other, suppress(OSError):  # it has ended already
                other.sendall(_WELL if well else b"1")


def _stand(address: str) -> int:
    """Wait until the keeper says how it ended; it ends without a word if it is killed."""
    deadline = time.monotonic() + MEETING
    while True:
        with socket.socket(socket.AF_UNIX) as other:
            try:
                other.connect(address)
            except OSError:
                if time.monotonic() > deadline:
                    _say("local rank 0 of this node did not come")
                    return 1
                time.sleep(0.1)
            else:
                return 0 if other.recv(1) == _WELL else 1


def _address() -> str:
    """Where the processes of one agent meet."""
    name = f"nbddp-{os.getuid()}-{os.getppid()}"
    return f"\0{name}" if sys.platform == "linux" else str(Path(tempfile.gettempdir()) / name)
