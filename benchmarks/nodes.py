"""Measure what many ranks on many nodes cost the notebook: its CPU, and the round trip of a cell.

    python benchmarks/nodes.py [--nodes 16] [--ranks 8] [--seconds 20]

All nodes run on this machine, each as if on its own: a node agent, a forkserver, encrypted
connections to the notebook. In the silent and in the logging part the ranks form no process
group, so that only the process of the notebook is measured: first silent, then with each rank
logging ten numbers per second. The round trip is that of an empty cell on all ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from statistics import median, quantiles

import psutil

from nbddp.errors import CellFailedError
from nbddp.extensions.nodes.node_pool import NodesSpec
from nbddp.group.recovery import show_cell
from nbddp.group.worker_group import WorkerGroup
from nbddp.record.cell import CellRequest
from nbddp.ui.frontend import StreamTarget
from nbddp.ui.text_view import TextView

LOGGING = """
import time
step = 0
while True:
    began = time.monotonic()
    step += 1
    nbddp.log(step=step, value=step)
    time.sleep(max(0.0, 0.1 - (time.monotonic() - began)))
"""
JOIN_TIMEOUT = 300.0  # seconds for all nodes to join


def start_nodes(
    group: WorkerGroup, node_count: int, ranks: int, *, most: int = 0
) -> list[subprocess.Popen[bytes]]:
    """Listen for nodes and start node agents, which torchrun would start on a node.

    ``most``: the largest number of nodes that may join.
    """
    nodes = group._group.open_nodes(
        NodesSpec(min_nodes=node_count, max_nodes=most or node_count, nproc_per_node=ranks)
    )
    command = [sys.executable, "-m", "nbddp.nodes", "--join", str(nodes.join_file)]
    command += ["--ranks", str(ranks)]
    agents = []
    for number in range(node_count):
        scratch = tempfile.mkdtemp(prefix=f"node{number}-")
        agents.append(
            subprocess.Popen(
                [*command, "--folder", scratch],
                start_new_session=True,
                stderr=subprocess.DEVNULL,
            )
        )
    nodes.wait(JOIN_TIMEOUT)
    group._group.spec = nodes.fit(group._group.spec)
    return agents


def cpu_share(process: psutil.Process, seconds: float) -> float:
    """Return the CPU time of a process over this time, in percent of one core."""
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return 100 * used / (time.monotonic() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home
        os.chdir(home)
        measure(args.nodes, args.ranks, args.seconds)


def measure(node_count: int, ranks: int, seconds: float) -> None:
    """Print the costs of this many nodes and ranks."""
    group = WorkerGroup(nproc=1, threads=1)
    me = psutil.Process()
    try:
        began = time.monotonic()
        agents = start_nodes(group, node_count, ranks)
        print(
            f"{node_count} nodes of {ranks} ranks are here after {time.monotonic() - began:.0f} s"
        )
        began = time.monotonic()
        group.start()
        print(f"all ranks are ready after {time.monotonic() - began:.1f} s more")
        time.sleep(5)
        print(f"silent:       {cpu_share(me, seconds):5.1f} % of a core")
        handle = group._group.session.submit(CellRequest(source=LOGGING, needs_group=False))
        time.sleep(5)
        print(f"10 numbers/s: {cpu_share(me, seconds):5.1f} % of a core, without a view")
        group.interrupt()
        with suppress(CellFailedError, KeyboardInterrupt):
            show_cell(group._group.session, handle, TextView(StreamTarget()))
        group.run("pass", quiet=True)  # forms the process group
        trips = []
        for _ in range(20):
            began = time.monotonic()
            group.run("pass", quiet=True)
            trips.append(time.monotonic() - began)
        print(f"empty cell:   {median(trips):.3f} s (95 %: {quantiles(trips, n=20)[-1]:.3f})")
    finally:
        group.close()
    for agent in agents:
        agent.wait(30)


if __name__ == "__main__":
    main()
