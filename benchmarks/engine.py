"""Compare nbddp with ``torch.multiprocessing.spawn`` and ``torchrun``: speed, output, memory.

    python benchmarks/engine.py [--ranks 2 4] [--repeats 7] [--device cuda] [--json FILE]

A client of a real kernel measures everything, from its request to its receipt. Contenders take
turns, so that noise affects all of them. PSS divides the cost of a page among all processes that
map it, including those of other users: compare only figures of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import report
from contenders import Samples, Trial, run_round

LINES = 20_000
QUICK_LINES = 2_000
PACKAGES = ("nbddp", "torch", "ipykernel", "jupyter_client")

NOTES = (
    "Rivals start their ranks again in every cell: that is their restart. torchrun's output is "
    "shown as soon as it is in the pipe; the usual `print(line, end='')` takes 100 to 200 ms "
    "instead. Each rank uses plain prints; a line is whole if no other rank wrote into it."
)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write samples and table to this file")
    parser.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    parser.add_argument("--quick", action="store_true", help="2 ranks, once, a short burst")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.repeats = [2], 1
    os.environ["BENCHMARK_DEVICE"] = args.device  # for the kernels and their child processes
    args.lines = QUICK_LINES if args.quick else LINES
    return args


def measure(args: argparse.Namespace) -> Samples:
    """Return all samples; print the progress on stderr."""
    samples: Samples = defaultdict(list)
    began = time.monotonic()
    for turn in range(args.repeats):
        for ranks in args.ranks:
            run_round(Trial(ranks=ranks, lines=args.lines, samples=samples), turn)
            seconds = time.monotonic() - began
            print(f"{seconds:4.0f} s: round {turn + 1}, {ranks} ranks", file=sys.stderr)
    return samples


def machine() -> dict[str, Any]:
    """Return the facts of the machine and the versions."""
    versions = {name: version(name) for name in PACKAGES}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        **versions,
    }


def caption(facts: dict[str, Any], repeats: int) -> str:
    """Return the line above the table."""
    names = ", ".join(f"{name} {facts[name]}" for name in ("python", *PACKAGES))
    return f"{facts['cores']} cores, {names}; medians of {repeats} rounds"


def as_json(facts: dict[str, Any], found: list[dict[str, Any]], samples: Samples) -> str:
    """Return everything as JSON, to compare runs."""
    raw = [
        {"measure": name, "contender": contender, "ranks": ranks, "values": values}
        for (name, contender, ranks), values in samples.items()
    ]
    return json.dumps({"machine": facts, "table": found, "samples": raw}, indent=1) + "\n"


def main() -> None:
    """Measure, print and write the results."""
    args = parse()
    facts = machine()
    samples = measure(args)
    found = report.records(samples, args.ranks, args.lines)
    show = report.as_markdown if args.markdown else report.as_text
    print(f"{caption(facts, args.repeats)}\n\n{show(report.rows(found))}\n\n{NOTES}")
    if args.json:
        args.json.write_text(as_json(facts, found, samples))


if __name__ == "__main__":
    main()
