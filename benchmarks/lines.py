"""Measure how soon a printed line reaches the client, and the CPU time of idle ranks.

    python benchmarks/lines.py [--ranks 4] [--seconds 5] [--rounds 3]

Each rank prints 20 lines per second, all ranks at the same moments or evenly spread; or one line
per second, or 200. The CPU time of the notebook and of the ranks is measured in the same seconds.
The time of a line is from its print to its receipt by a client of a real kernel.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import psutil
from kernel_client import Kernel
from transcript import Transcript

DEFINE = """%%ddp --nproc {ranks} --timeout 120
import time, workload

def say(period, shift, seconds):
    dist.barrier()
    begin = time.time() // 1 + 2 + shift * rank / world_size
    for number in range(round(seconds / period)):
        time.sleep(max(0.0, begin + number * period - time.time()))
        print(f"said {{rank}} {{time.time()}}", flush=True)
"""
SAID = re.compile(r"said (\d+) (\d+\.\d+)")
CASES = {  # period and shift, in seconds
    "at once": (0.05, 0.0),
    "spread": (0.05, 0.05),
    "after a pause": (1.0, 0.0),
    "200 lines a second": (0.005, 0.0),
}
END = "nothing more to come"
IDLE = 15.0  # seconds
GLOO = "gloo_tcp_loop"  # a thread of Gloo that wakes 100 times a second

Found = dict[str, list[float]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: Found = defaultdict(list)
    for _ in range(args.rounds):
        with Kernel() as kernel:
            kernel.run("%load_ext nbddp")
            time.sleep(5.0)
            measure(kernel, args, found)
    for name, values in found.items():
        high = quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
        print(f"{name:40} {median(values):8.2f}   (95 %: {high:.2f}, n {len(values)})")


def measure(kernel: Kernel, args: argparse.Namespace, found: Found) -> None:
    """Add the samples of one kernel."""
    kernel.run(DEFINE.format(ranks=args.ranks))
    ranks = processes(kernel, args.ranks)
    for case, (period, shift) in CASES.items():
        with cpu_noted(case, kernel.process(), ranks, found):
            request = kernel.send(f"%%ddp\nsay({period}, {shift}, {args.seconds})\nworkload.end()")
            lines = Transcript(kernel.collect(END, args.ranks)).lines
            kernel.reply(request)
        matches = ((at, SAID.search(line)) for at, line in lines)
        found[f"{case}: ms to the client"] += [
            1000 * (at - float(it[2])) for at, it in matches if it
        ]
    request = kernel.send(f"%%ddp\nworkload.work(['burst={args.lines}', 'end'])")
    flood = Transcript(kernel.collect(END, args.ranks))
    kernel.reply(request)
    found["flood: s"].append(flood.burst_seconds())
    intact = flood.lines_in_order(ranks=args.ranks, lines=args.lines)
    found["flood: share of the lines"].append(intact)
    time.sleep(2.0)
    with cpu_noted("idle", kernel.process(), ranks, found):
        gloo = sum(map(cpu_of_gloo, ranks))
        time.sleep(IDLE)
        gloo = sum(map(cpu_of_gloo, ranks)) - gloo
    found["idle: of these, Gloo's own thread, %"].append(100 * gloo / IDLE)


def processes(kernel: Kernel, count: int) -> list[psutil.Process]:
    """Return the processes of the ranks."""
    request = kernel.send("%%ddp\nimport os\nprint('pid', os.getpid())\nworkload.end()")
    text = "\n".join(line for _, line in Transcript(kernel.collect(END, count)).lines)
    kernel.reply(request)
    return [psutil.Process(int(pid)) for pid in re.findall(r"pid (\d+)", text)]


@contextmanager
def cpu_noted(
    case: str, notebook: psutil.Process, ranks: list[psutil.Process], found: Found
) -> Iterator[None]:
    """Record the CPU time that the processes use in the block, in percent of a core."""
    before, began = (cpu(notebook), sum(map(cpu, ranks))), time.monotonic()
    yield
    seconds = time.monotonic() - began
    found[f"{case}: notebook, %"].append(100 * (cpu(notebook) - before[0]) / seconds)
    found[f"{case}: all ranks, %"].append(100 * (sum(map(cpu, ranks)) - before[1]) / seconds)


def cpu(process: psutil.Process) -> float:
    """Return the CPU seconds of a process, with those of ended threads."""
    used = process.cpu_times()
    return float(used.user + used.system)


def cpu_of_gloo(process: psutil.Process) -> float:
    """Return the CPU seconds of Gloo's thread, which polls."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    found = [task for task in tasks if (task / "comm").read_text().strip() == GLOO]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in found) / 1e9


if __name__ == "__main__":
    main()
