"""Compare ranks on nodes with torchrun (steps) and with local ranks (cells); measure joining.

    python benchmarks/nodes_speed.py [--rounds 5] [--steps 300] [--joins 20]

Two nodes with one rank each run on this machine. The same training runs alternately on them and
under two torchrun agents; the same empty cell runs alternately on them and on two local ranks.
Then a third node joins and leaves several times. Its time is from the start of its process, which
torchrun would start, until a cell has run on it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from nodes import start_nodes
from training import INIT, LEAVE, SETUP, SPEED, _rendezvous_options, fill_in

from nbddp import WorkerGroup

WARM = 20  # steps


def steps_on_nodes(group: WorkerGroup, source: str, out: Path) -> float:
    """Return the steps per second of the training on the nodes."""
    group.run(source.replace("LOG", "no_log"), quiet=True)
    return float(out.read_text())


def steps_under_torchrun(folder: Path, source: str, out: Path) -> float:
    """Return the steps per second of the same training as a script under two agents."""
    script = folder / "script.py"
    meet = INIT.replace("BACKEND", "gloo")
    script.write_text(meet + SETUP + source.replace("LOG", "no_log") + LEAVE)
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    rendezvous = [each if each != "1" else "2" for each in _rendezvous_options()]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", "1"]
    agents = [
        subprocess.Popen([*command, "--node-rank", node, str(script)], env=env, cwd=folder)
        for node in ("0", "1")
    ]
    if any(agent.wait(300) for agent in agents):
        raise RuntimeError("torchrun failed")
    return float(out.read_text())


def report_steps(group: WorkerGroup, rounds: int, steps: int) -> None:
    """Compare the steps per second, in turns so that both use the same machine state."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "speed.json"
        source = fill_in(SPEED, out, WARM=WARM, STEPS=steps)
        group.run(SETUP, quiet=True)
        for _ in range(rounds):
            ours.append(steps_on_nodes(group, source, out))
            theirs.append(steps_under_torchrun(Path(folder), source, out))
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    print(
        f"steps/s:      {median(ours):.0f} on nodes, {median(theirs):.0f} under torchrun; "
        f"ratio {median(ratios):.3f} (each: {', '.join(f'{each:.3f}' for each in ratios)})"
    )


def trip(group: WorkerGroup) -> float:
    """Return the seconds of an empty cell."""
    began = time.perf_counter()
    group.run("pass", quiet=True)
    return time.perf_counter() - began


def report_trips(group: WorkerGroup, rounds: int) -> None:
    """Compare an empty cell on nodes and on local ranks."""
    with WorkerGroup(nproc=2, threads=1) as local:
        trips = [(trip(group), trip(local)) for _ in range(40 * rounds)][10:]
    far, near = median(each for each, _ in trips), median(each for _, each in trips)
    print(
        f"empty cell:   {1000 * far:.1f} ms on nodes, {1000 * near:.1f} ms on local ranks; "
        f"ratio {far / near:.2f}"
    )


def report_joins(group: WorkerGroup, joins: int) -> None:
    """Let a node join, use it after the next start, and release it, several times."""
    nodes = group._group.nodes
    assert nodes is not None
    seconds = []
    for number in range(joins):
        scratch = tempfile.mkdtemp(prefix="joining-")
        began = time.monotonic()
        command = [sys.executable, "-m", "nbddp.nodes", "--join", str(nodes.join_file)]
        agent = subprocess.Popen(
            [*command, "--folder", scratch],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        while len(nodes.listener.nodes) < 3:
            time.sleep(0.01)
        group._group.spec = nodes.fit(group._group.spec)
        group.restart()
        group.run("assert dist.get_world_size() == 3", quiet=True)
        seconds.append(time.monotonic() - began)
        nodes.release(nodes.listener.nodes[-1].name)
        agent.wait(30)
        group._group.spec = nodes.fit(group._group.spec)
        group.restart()
        print(f"join {number + 1:2}:      {seconds[-1]:.2f} s", flush=True)
    print(f"usable after: {median(seconds):.2f} s (worst {max(seconds):.2f})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--joins", type=int, default=20)
    args = parser.parse_args()
    os.environ["BENCHMARK_DEVICE"] = "cpu"
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home
        os.chdir(home)
        group = WorkerGroup(nproc=1, threads=1)
        try:
            start_nodes(group, 2, 1, most=3)
            began = time.monotonic()
            group.start()
            group.run("pass", quiet=True)
            print(f"first cell:   {time.monotonic() - began:.2f} s after the last node is here")
            report_trips(group, args.rounds)
            report_steps(group, args.rounds, args.steps)
            report_joins(group, args.joins)
        finally:
            group.close()


if __name__ == "__main__":
    main()
