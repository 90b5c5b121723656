"""Measure the live panel in a real JupyterLab: its speed, its reactions, and its cost.

    python benchmarks/panel.py [--quick] [--rounds 5] [--cases print cpu] [--json FILE]

Print to DOM is the time from a rank's ``print`` to a MutationObserver in the page, for single
lines. A button is timed from the press of the mouse button. In every round contenders take turns,
so that noise affects all of them. Needs Chromium, and ends all processes that it starts.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import panel_table
import panel_trials as trials
from browser.lab import CHROMIUM, Lab
from panel_page import BenchError, BenchPage, kill_leftovers, opened
from panel_trials import Samples

CASES = ("print", "buttons", "cpu", "crowd", "flood")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--quick", action="store_true", help="once, and less of everything")
    parser.add_argument("--json", type=Path, help="write samples and table to this file")
    args = parser.parse_args()
    args.sizes = trials.QUICK if args.quick else trials.FULL
    if args.quick:
        args.rounds = 1
    return args


@contextmanager
def started_lab() -> Iterator[Lab]:
    """Start a JupyterLab; at the end, kill its processes and fail if any outlived it."""
    with tempfile.TemporaryDirectory(prefix="nbddp-panel-") as folder:
        leftovers: list[str] = []
        try:
            with Lab(Path(folder) / "root") as lab:
                yield lab
        finally:
            leftovers = kill_leftovers()
        if leftovers:
            raise BenchError(f"these outlived JupyterLab: {leftovers}")


def run_round(lab: Lab, args: argparse.Namespace, turn: int, samples: Samples) -> None:
    """Run every case once; all but crowd and flood share a kernel."""
    if set(args.cases) - {"crowd", "flood"}:
        with opened(lab, f"shared-{turn}") as page:
            run_shared(page, args, turn, samples)
    if "crowd" in args.cases:
        trials.meter_crowd(lab, f"crowd-{turn}", args.sizes, samples)
    if "flood" in args.cases:
        for number, contender in enumerate(turned((trials.PANEL, trials.TEXT), turn)):
            trials.flood(lab, f"flood-{turn}-{number}", contender, args.sizes, samples)


def run_shared(page: BenchPage, args: argparse.Namespace, turn: int, samples: Samples) -> None:
    """Run the cases print, buttons and CPU."""
    if "print" in args.cases:
        for contender in turned((trials.PANEL, trials.TEXT, trials.PLAIN), turn):
            trials.time_prints(page, contender, args.sizes, samples)
    for number in range(args.sizes.presses if "buttons" in args.cases else 0):
        trials.time_buttons(page, f"{turn}-{number}", samples)
    if "cpu" in args.cases:
        trials.warm_up(page)
        others = turned((trials.PANEL, trials.QUIET, trials.SILENT, trials.PLAIN), turn)
        for contender in (*others, trials.TEXT):  # last: it may keep the page busy for minutes
            trials.meter_cpu(page, contender, args.sizes, samples)


def turned(contenders: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """Return the contenders in an order that starts with another one in each turn."""
    first = turn % len(contenders)
    return contenders[first:] + contenders[:first]


def measure(args: argparse.Namespace) -> Samples:
    """Return all samples; print the progress on stderr."""
    samples: Samples = defaultdict(list)
    began = time.monotonic()
    with started_lab() as lab:
        for turn in range(args.rounds):
            run_round(lab, args, turn, samples)
            print(f"{time.monotonic() - began:4.0f} s: round {turn + 1}", file=sys.stderr)
    return samples


def main() -> None:
    """Measure, print and write the results."""
    args = parse()
    if CHROMIUM is None:
        sys.exit("there is no Chromium: install it, or set CHROMIUM")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are ended
    facts = panel_table.machine()
    samples = measure(args)
    found = panel_table.records(samples, args.sizes)
    table = panel_table.as_text(found)
    print(f"{panel_table.caption(facts, args.rounds)}\n\n{table}\n\n{panel_table.NOTES}")
    if args.json:
        raw = [
            {"measure": name, "how": how, "values": values}
            for (name, how), values in samples.items()
        ]
        text = json.dumps({"machine": facts, "table": found, "samples": raw}, indent=1)
        args.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
