"""Measure the time from ``breakpoint()`` to its prompt, and from an answer to the rank that asked.

    python benchmarks/asking.py [--repeats 20] [--ranks 2]

A client of a real kernel types the answers. All clocks belong to this machine. The ranks are
warm: a rank has asked before.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import time
from importlib.metadata import version
from statistics import median, quantiles

from kernel_client import Kernel

BREAK = """%%ddp --nproc {ranks}
import time
print("at", repr(time.time()), flush=True) if rank == 0 else None
breakpoint()
dist.barrier()"""
NUMBER = r"(\d+\.\d+)"


def ask(kernel: Kernel, ranks: int) -> tuple[float, float]:
    """Return the seconds until the prompt came, and until the rank had the answer."""
    request = kernel.send(BREAK.format(ranks=ranks), asks=True)
    prompted = kernel.question()
    reached = number_after(kernel, "at ")
    sent = time.time()
    kernel.answer("p ('had', time.time())")
    answered = number_after(kernel, "('had', ")
    kernel.question()
    kernel.answer("c")
    kernel.reply(request)
    return prompted - reached, answered - sent


def number_after(kernel: Kernel, words: str) -> float:
    """Return the number that a rank prints after these words."""
    text = ""
    while not (found := re.search(rf"{re.escape(words)}{NUMBER}\D", text)):
        text += "".join(chunk for _, chunk in kernel.collect("\n"))
    return float(found[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with Kernel() as kernel:
        kernel.run("%load_ext nbddp")
        ask(kernel, args.ranks)
        found = [ask(kernel, args.ranks) for _ in range(args.repeats)]
    print(
        f"{os.cpu_count()} cores, python {platform.python_version()}, torch {version('torch')}; "
        f"{args.ranks} ranks, {args.repeats} times\n"
    )
    print(f"{'':<24}{'median':>10}{'95 %':>10}")
    names = ("breakpoint to prompt", "answer to rank")
    for name, times in zip(names, zip(*found, strict=True), strict=True):
        late = quantiles(times, n=20)[-1]
        print(f"{name:<24}{1000 * median(times):>7.0f} ms{1000 * late:>7.0f} ms")


if __name__ == "__main__":
    main()
