"""Measure the time from the kill of a rank until the ranks are ready again, in three ways.

    python benchmarks/heal.py [--repeats 20] [--ranks 4] [--megabytes 1]

The three ways take turns in each round. In each, a random rank, 0 included, is killed in a
training loop. *Healed* and *restarted* end when every rank is idle again and has the names of the
cells; after a restart the training itself would have to run again. torchrun ends its workers and
starts new ones, which load a checkpoint: its time ends with the first step after that. It runs
with its defaults: the second attempt then often uses the store of the first attempt, under the
same keys, and does not come back. It also runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which
gives each attempt its own store.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles

from nbddp import CellFailedError, WorkerGroup

SETUP = """
torch.manual_seed(0)
width = {width}
net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
model = nbddp.prepare(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = nbddp.loader(torch.randn(4096, 64), 16)
step = 0
model(torch.randn(4, 64)).sum().backward()
optimizer.step()
print("begun")
"""
TRAIN = """
while True:
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        step += 1
"""
SAME = """
import hashlib
hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
"""
TIMEOUT = 90.0  # seconds for torchrun to come back
SCRIPT = """
import datetime, json, os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
path, width = sys.argv[1], int(sys.argv[2])
first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0
net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if not first:
    state = torch.load(path + ".pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
for step in range(12 if first else 1):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    if first and step == 10 and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path + ".pt")
    if first and step == 11 and dist.get_rank() == 1:
        open(path, "w").write(json.dumps(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
if not first and dist.get_rank() == 0:
    open(path, "a").write(" " + json.dumps(time.time()))
dist.barrier()
dist.destroy_process_group()
"""


def kill_random_rank(group: WorkerGroup) -> float:
    """Kill a random rank in the middle of training; return the time of the kill."""
    victim = random.choice(group.alive)
    pid = group._group.session.process_ids()[victim]
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(random.uniform(0.2, 0.6), kill)
    timer.start()
    try:
        group.run(TRAIN, quiet=True)
    except CellFailedError:
        timer.join()
        return killed[0]
    raise RuntimeError("the training has ended")


def ranks_are_equal(group: WorkerGroup) -> bool:
    """Return whether all ranks have the same parameters, bit for bit."""
    return len(set(group.run(SAME, quiet=True, wants_value=True).values())) == 1


def time_heal(group: WorkerGroup) -> tuple[float, float]:
    """Return the seconds from the kill until the cell ends, and until all ranks are healed."""
    killed = kill_random_rank(group)
    noticed = time.monotonic() - killed
    group.heal()
    seconds = time.monotonic() - killed
    if not ranks_are_equal(group):
        raise RuntimeError("the ranks differ")
    return noticed, seconds


def time_restart(group: WorkerGroup, width: int) -> float:
    """Return the seconds from the kill until the ranks are new and the cells have run again."""
    killed = kill_random_rank(group)
    group.restart()
    group.run(SETUP.format(width=width), quiet=True)
    return time.monotonic() - killed


def time_torchrun(folder: Path, ranks: int, width: int, *, shares: bool) -> float | None:
    """Return the seconds from the kill to the first step after it; None if there is none.

    With ``shares`` all attempts use one store, which is torchrun's default.
    """
    script, out = folder / "script.py", folder / "times"
    script.write_text(SCRIPT)
    where = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--local-addr",
        "127.0.0.1",
    ]
    options = [*where, "--nproc-per-node", str(ranks), "--max-restarts", "1"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0" if shares else "1"
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(out)]
    if not succeeds([*command, str(width)], env):
        return None
    killed, resumed = map(json.loads, out.read_text().split())
    return float(resumed - killed)


def succeeds(command: list[str], env: dict[str, str]) -> bool:
    """Run a command; return whether it succeeds in time. Terminate it and its workers if not."""
    agent = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return agent.wait(TIMEOUT) == 0
    except subprocess.TimeoutExpired:
        agent.terminate()  # it then ends its workers
        agent.wait()
        return False


def spread(name: str, seconds: Sequence[float]) -> str:
    """Return the median and the 95th percentile."""
    late = quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0]
    return f"{name:<28}{median(seconds):>8.2f} s{late:>8.2f} s"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=1.0, help="of parameters")
    parser.add_argument("--alone", action="store_true", help="only heal")
    args = parser.parse_args()
    random.seed(0)
    width = max(1, int(args.megabytes * 2**20 / 4 / 66))
    heal_times, restart_times = [], []
    torchrun_times: dict[bool, list[float | None]] = {True: [], False: []}
    with WorkerGroup(nproc=args.ranks) as group, tempfile.TemporaryDirectory() as folder:
        group.run(SETUP.format(width=width), quiet=True)
        group._group.session.launcher.preload_more()  # or the first new rank imports all
        for _ in range(args.repeats):
            heal_times.append(time_heal(group))
            if not args.alone:
                restart_times.append(time_restart(group, width))
                for shares, times in torchrun_times.items():
                    times.append(time_torchrun(Path(folder), args.ranks, width, shares=shares))
    print(
        f"{os.cpu_count()} cores, python {platform.python_version()}, torch {version('torch')}; "
        f"{args.ranks} ranks, {args.megabytes:g} MB of parameters, {args.repeats} kills\n"
    )
    print(f"{'from the kill to ready':<28}{'median':>10}{'95 %':>10}")
    for name, seconds in zip(
        ("the cell is over", "healed"), zip(*heal_times, strict=True), strict=True
    ):
        print(spread(name, seconds))
    if not args.alone:
        print(spread("restarted and replayed", restart_times))
        for shares, times in torchrun_times.items():
            came = [each for each in times if each is not None]
            name = "torchrun" if shares else "torchrun, a store each"
            print(f"{name} came back in {len(came)} of {len(times)} runs")
            if came:
                print(spread(name, came))


if __name__ == "__main__":
    main()
