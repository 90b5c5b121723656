"""Measure the cost of the timeline: CPU time, and steps per second with and without it.

    python benchmarks/timeline.py [--rounds 12] [--seconds 3] [--ranks 2]

The same ranks train the same network. In every other round the flight recorder is not read, the
main thread is not sampled, and nothing is sent. The cost in steps is the ratio of two successive
rounds. The median of all ratios is printed with the middle half of them, which shows the
precision of this machine. The CPU time of a rank's threads for the timeline is measured too: a
rank that has a core for itself loses no more than that.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from statistics import median, quantiles

from steady import CALIBRATE

from nbddp.group.worker_group import WorkerGroup

SETUP = (
    CALIBRATE
    + """
from nbddp.worker.watch.arrival_recorder import ArrivalRecorder
parts = {name: getattr(ArrivalRecorder, name) for name in ("report", "sample")}
spent = [0.0]

def counted(part):
    def act(self, *args, **options):
        began = time.thread_time()
        try:
            return part(self, *args, **options)
        finally:
            spent[0] += time.thread_time() - began
    return act

def switch(on):
    for name, part in parts.items():
        setattr(ArrivalRecorder, name, counted(part) if on else lambda self, *args, **options: None)

x, calibrated = torch.ones(1000), {}

def work_for(seconds, rate, on):
    if rate not in calibrated:
        calibrated[rate] = calibrate(rate)
    switch(on)
    dist.barrier()
    spent[0], began = 0.0, time.perf_counter()
    steps = round(seconds * rate)
    for _ in range(steps):
        for _ in range(calibrated[rate]):
            work[:64] @ work
        dist.all_reduce(x)
    took = time.perf_counter() - began
    switch(True)
    return steps / took, spent[0] / took
"""
)
RATES = {100: 1, 1000: 5}  # collectives per second, and the allowed cost in percent


def measure(group: WorkerGroup, rate: int, rounds: int, seconds: float) -> None:
    """Print the cost of each pair of rounds, as a share of the steps and of a core."""
    steps, cores, rates, lost = [], [], [], []
    for number in range(rounds):
        speed = {}
        for on in (True, False) if number % 2 else (False, True):
            with contextlib.redirect_stdout(io.StringIO()):
                source = f"work_for({seconds}, {rate}, {on})"
                found = group.run(source, quiet=True, wants_value=True).values()
            speed[on] = min(each[0] for each in found)
            if on:
                cores.append(max(each[1] for each in found))
                rates.append(speed[on])
                history = group._group.session.rank_monitor.collectives.history()
                matched = history.count * len(history.ranks)
                lost.append(history.lost / max(1, history.lost + matched))
        steps.append(1 - speed[True] / speed[False])
    print(
        f"{median(rates):.0f} collectives a second: {middle_half(cores)} of a core, "
        f"{middle_half(steps)} of the steps (at most {RATES[rate]} % are allowed); "
        f"{100 * median(lost):.1f} % were not read"
    )


def middle_half(shares: Sequence[float]) -> str:
    """Return the median and the middle half."""
    low, _, high = quantiles(shares, n=4)
    return f"{100 * median(shares):.2f} % ({100 * low:.2f} to {100 * high:.2f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with WorkerGroup(nproc=args.ranks, threads=1) as group:
        group.run(SETUP, quiet=True)
        for rate in RATES:
            measure(group, rate, args.rounds, args.seconds)


if __name__ == "__main__":
    main()
