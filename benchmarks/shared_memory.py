"""Compare ``--backend shm`` with torchrun and Gloo, and with copies in memory.

    python benchmarks/shared_memory.py [--rounds 5] [--ranks 2,4]

Both run the same script, nbddp by ``%ddp run``, with one thread for each rank. It trains models
with DDP and makes an all_reduce. They take turns. Only the ratios matter: absolute figures depend
on the machine and its load.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from nbddp import WorkerGroup

BLOCKS = 9  # the fastest counts, because other programs may disturb the others
SCRIPT = """
import json, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group()

def train(widths, steps):
    torch.manual_seed(0)
    layers = [nn.Linear(before, after) for before, after in zip(widths, widths[1:])]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(32, widths[0])
    def step():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    step(), step()
    return fastest(step, count=steps)[0]

def fastest(*acts, count=1):
    # in blocks in which they take turns
    times = [[seconds(act, count) for act in acts] for _ in range(BLOCKS)]
    return [min(of_act) for of_act in zip(*times)]

def seconds(act, count):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        act()
    dist.barrier()
    return (time.perf_counter() - began) / count

def measure():
    x, y = (torch.empty(16 << 20).fill_(0) for _ in range(2))
    reduced, copied = fastest(lambda: dist.all_reduce(x), lambda: [y.copy_(x) for _ in range(3)])
    return {
        "MLP": train([256, 256, 10], 25),
        "25 million parameters": train([2500] * 5, 1),
        "all_reduce of 64 MiB": reduced,
        "three copies of 64 MiB": copied,
    }

found = measure()
if dist.get_rank() == 0:
    Path(OUT).write_text(json.dumps(found))
dist.destroy_process_group()
"""


def run_under_torchrun(script: Path, ranks: int) -> None:
    """Run the script over Gloo, which torch chooses on CPUs."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(ranks), str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"torchrun failed:\n{done.stderr[-4000:]}")


def compare(folder: Path, ranks: int, rounds: int) -> list[str]:
    """Return a row of the table for each measure: the ratios of all rounds."""
    out = folder / "found.json"
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("OUT", repr(str(out))).replace("BLOCKS", str(BLOCKS)))
    gloo, shm = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with WorkerGroup(nproc=ranks, threads=1, backend="shm") as group:
        for turn in range(rounds):
            runs = [
                (shm, lambda: group.run_script(script, quiet=True)),
                (gloo, lambda: run_under_torchrun(script, ranks)),
            ]
            for times, run in runs if turn % 2 == 0 else reversed(runs):
                run()
                for name, seconds in json.loads(out.read_text()).items():
                    times[name].append(seconds)
    reduced, copied = list(gloo)[-2:]
    pairs = {name: (gloo[name], shm[name]) for name in [*gloo][:-1]}
    rows = [row(f"{name}: Gloo / shm", ranks, *pair) for name, pair in pairs.items()]
    return [*rows, row("all_reduce over shm / three copies", ranks, shm[reduced], shm[copied])]


def row(name: str, ranks: int, above: list[float], below: list[float]) -> str:
    """Return the medians, and the median and range of the ratios of the rounds."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    times = f"{1e3 * median(above):.3g} / {1e3 * median(below):.3g} ms"
    spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {name} | {ranks} | {times} | {spread} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="2,4")
    args = parser.parse_args()
    print("| | ranks | medians | ratio, and its range |\n|---|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory(prefix="nbddp-bench-") as name:
        folder = Path(name)
        os.chdir(folder)
        for ranks in map(int, args.ranks.split(",")):
            print("\n".join(compare(folder, ranks, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
