"""Compare ``%ddp run`` with ``!torchrun``: the same script, to its first line and its end.

    python benchmarks/script.py [--repeats 10] [--ranks 2]

A client of a real kernel measures everything, from its request to its receipt. The two take
turns. The forkserver is warm: one script has run before.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from importlib.metadata import version
from statistics import median

from kernel_client import Kernel

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
print("first line", flush=True)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def measure(kernel: Kernel, code: str, ranks: int) -> tuple[float, float]:
    """Return the seconds from the request to the first line, and to the reply."""
    sent = time.time()
    request = kernel.send(code)
    first, _ = kernel.collect("first line", ranks)[0]
    return first - sent, kernel.reply(request) - sent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    contenders = {
        "%ddp run": f"%ddp run --nproc {args.ranks} script.py",
        "!torchrun": f"!torchrun --standalone --nproc-per-node={args.ranks} script.py",
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    with Kernel() as kernel:
        (kernel.home / "script.py").write_text(SCRIPT)
        kernel.run("%load_ext nbddp")
        measure(kernel, contenders["%ddp run"], args.ranks)
        for _ in range(args.repeats):
            for name, code in contenders.items():
                found[name].append(measure(kernel, code, args.ranks))
    print(
        f"{os.cpu_count()} cores, python {platform.python_version()}, torch {version('torch')}; "
        f"{args.ranks} ranks, medians of {args.repeats}\n"
    )
    print(f"{'':<12}{'first line':>12}{'end':>12}")
    middles = {
        name: tuple(median(times) for times in zip(*values, strict=True))
        for name, values in found.items()
    }
    for name, (first, end) in middles.items():
        print(f"{name:<12}{first:>10.3f} s{end:>10.3f} s")
    ours, theirs = middles.values()
    print(f"{'ratio':<12}{theirs[0] / ours[0]:>11.0f}x{theirs[1] / ours[1]:>11.0f}x")


if __name__ == "__main__":
    main()
