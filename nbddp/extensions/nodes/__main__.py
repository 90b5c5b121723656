"""The program of a node: ``torchrun ... -m nbddp.nodes --join FILE --ranks N``.

torchrun starts one such process on each machine, and this process starts the ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from nbddp.errors import RequestError, as_request_error
from nbddp.extensions.nodes import ORPHAN_TIMEOUT
from nbddp.extensions.nodes.join_file import JoinFile
from nbddp.private_files import make_private_folders


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the node's agent. Return the exit status."""
    args = _parse(arguments)
    try:
        reason = _run_agent(args)
    except RequestError as error:
        _print_line(str(error))
        return 2
    if reason:
        _print_line(reason)
    return 1 if reason else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nbddp.nodes",
        description="Run ranks of a notebook on this machine; torchrun starts this program.",
    )
    parser.add_argument(
        "--join",
        required=True,
        help="the join file that `%%ddp nodes` wrote, or - to type its content",
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks on this machine (1)")
    parser.add_argument(
        "--orphan-timeout",
        type=float,
        default=ORPHAN_TIMEOUT,
        help="seconds without a notebook after which the node ends (60)",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="the notebook is on this machine; remove all files at the end",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.home() / ".nbddp" / "nodes",
        help="folder for the logs of this node's ranks (~/.nbddp/nodes)",
    )
    return parser.parse_args(arguments)


def _print_line(text: str) -> None:
    sys.stderr.write(f"nbddp: {text}\n")


def _run_agent(args: argparse.Namespace) -> str:
    """Run until the agent ends. Return the reason, or an empty string if it ended normally."""
    from nbddp.extensions.nodes.node_agent import NodeAgent

    started = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if started > 1:
        raise RequestError(
            f"torchrun started {started} processes, and nbddp needs one on each machine: write "
            f"--nproc-per-node=1 before -m nbddp.nodes, and --ranks={started} after it"
        )
    path = Path(args.join).expanduser()
    if args.join == "-":
        token = getpass.getpass("content of the join file that `%ddp nodes` wrote: ")
        join = JoinFile.from_token(token)
    else:
        join = JoinFile.load(path)
    folder = args.folder / f"{socket.gethostname()}-{os.getpid()}"
    way_out = "; use --folder for another one"
    with as_request_error(f"cannot create the log folder {folder}", way_out):
        args.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private_folders(args.folder, folder.name)

    has_joined = False

    async def run() -> str:
        nonlocal has_joined
        agent = NodeAgent(
            join,
            nproc=args.ranks,
            folder=folder,
            torchrun_pid=os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0,
            orphan_timeout=args.orphan_timeout,
            kept_join_file=path if args.keep else None,
        )
        reason = await agent.run()
        has_joined = agent.has_joined
        return reason

    reason = asyncio.run(run())
    if args.keep and has_joined:
        shutil.rmtree(folder)
        for file in (path, *(path.parent.parent / "agents").glob(f"{path.name}-*.log")):
            file.unlink(missing_ok=True)
    return reason


if __name__ == "__main__":
    sys.exit(main())
