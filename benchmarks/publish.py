"""Measure the cost of publishing a training: `nbddp.log` and steps per second, with and without it.

    python benchmarks/publish.py [--kind tensorboard] [--rounds 12] [--seconds 3] [--ranks 2]

The same ranks train in every round and report each step; a process publishes their run. In every
other round that process is stopped. In the rounds between, it therefore has to send the steps of
two rounds, more than usual. The cost is the ratio of two successive rounds. The median of all
ratios is printed with the middle half of them, which shows the precision of this machine. Needs
the package of the tracker; sends nothing to a server (`WANDB_MODE=offline`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

from steady import CALIBRATE

from nbddp.extensions.publish.publication import Publication
from nbddp.extensions.publish.tracker import TRACKER_CLASSES, Target, require_package
from nbddp.group.worker_group import WorkerGroup

SETUP = (
    CALIBRATE
    + """
counter, portion = [0], calibrate(100)

def work_for(seconds):
    dist.barrier()
    steps, logging, began = round(seconds * 100), 0.0, time.perf_counter()
    for _ in range(steps):
        for _ in range(portion):
            work[:64] @ work
        counter[0] += 1
        asked = time.perf_counter()
        nbddp.log(step=counter[0], loss=1 / counter[0], accuracy=0.5, rate=0.1)
        logging += time.perf_counter() - asked
    dist.barrier()
    return steps / (time.perf_counter() - began), logging / steps
"""
)


def measure(group: WorkerGroup, published: Publication, rounds: int, seconds: float) -> None:
    """Print the ratios of pairs of rounds."""
    speeds, logs = [], []
    for number in range(rounds):
        speed, log = {}, {}
        for on in (True, False) if number % 2 else (False, True):
            os.kill(published._process.pid, signal.SIGCONT if on else signal.SIGSTOP)
            with contextlib.redirect_stdout(io.StringIO()):
                found = group.run(f"work_for({seconds})", quiet=True, wants_value=True).values()
            speed[on] = min(each[0] for each in found)
            log[on] = max(each[1] for each in found)
        speeds.append(speed[True] / speed[False])
        logs.append(log[True] / log[False])
    os.kill(published._process.pid, signal.SIGCONT)
    print(f"steps a second with it / without: {format_ratios(speeds)}")
    ratios = format_ratios(logs)
    print(f"seconds of an nbddp.log with it / without: {ratios}; {1e6 * log[False]:.0f} µs")


def format_ratios(ratios: Sequence[float]) -> str:
    """Return the median and the middle half."""
    low, _, high = quantiles(ratios, n=4)
    return f"{median(ratios):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=TRACKER_CLASSES, default="tensorboard")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    require_package(args.kind)
    place = tempfile.mkdtemp(prefix="nbddp-publish-")
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": place, "TRACKIO_DIR": place}
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{place}/mlflow.db"
    os.chdir(place)
    with WorkerGroup(nproc=args.ranks, threads=1) as group:
        group.run(SETUP, quiet=True)
        folder = group.folder
        assert folder is not None
        to = Target(args.kind, str(Path(place) / "logs") if args.kind == "tensorboard" else "")
        published = Publication(to, folder, folder.name, is_live=True)
        published.follow(print, lambda: group.is_live)
        group.run("work_for(1)", quiet=True)
        time.sleep(10)  # the process loads its package
        measure(group, published, args.rounds, args.seconds)
    assert published.follower is not None
    published.follower.join()


if __name__ == "__main__":
    main()
