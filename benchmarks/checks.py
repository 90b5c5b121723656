"""Measure the cost of the checks after each cell, per cell and as a share of a step.

    python benchmarks/checks.py [--pairs 40] [--nproc 2] [--quick]

Each cell runs alternately with and without the checks, on the same ranks, so that disturbances
affect both. On a busy machine CPU time is the better measure: on the ranks, the time to collect
the facts; in the notebook, the time to check them. The checks do nothing while a step runs.
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles

from nbddp.extensions.checks.notebook import QuietChecks
from nbddp.group.worker_group import WorkerGroup
from nbddp.record.cell import CellHandle, CellRequest

SETUP = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import time
import nbddp.worker.main as main_
from nbddp.extensions.checks.facts import RankFacts

seconds_, collect_facts_ = [], main_.collect_facts
def timed_facts_(*args, **options):
    began = time.thread_time()
    facts = collect_facts_(*args, **options)
    facts.to_json()
    seconds_.append(time.thread_time() - began)
    return facts

def no_facts_(*args, **options):
    return RankFacts()

torch.manual_seed(0)
data = TensorDataset(torch.rand(1024, 64), torch.randint(10, (1024,)))
layers = [each for _ in range(24) for each in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
model = DDP(nn.Sequential(*layers, nn.Linear(64, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
sampler = DistributedSampler(data)
train = DataLoader(data, batch_size=32, sampler=sampler)
"""
SHORT = "x = 1 + 1\n"
EPOCH = """
losses = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        print(epoch, sum(losses) / len(losses))
model.eval()
right = torch.zeros(1)
with torch.no_grad():
    for x, y in train:
        right += (model.module(x).argmax(1) == y).sum()
model.train()
dist.all_reduce(right)
"""
NAMES = "rank, model, optimizer, train, sampler, data;\n"
LONG = NAMES + "def f(a, b):\n    return [a + each for each in b if each]\n\n" * 60


def run(group: WorkerGroup, source: str) -> CellHandle:
    """Run a cell to its end."""
    handle = group._group.session.submit(CellRequest(source=source, first_line=2))
    for _ in handle.notices():
        pass
    if handle.result is None:
        raise RuntimeError("the cell has no result")
    handle.result.raise_for_failure()
    return handle


def pair(group: WorkerGroup, source: str, *, checks_first: bool) -> tuple[float, float, float]:
    """Return the seconds of a cell with and without checks, and the CPU seconds in the notebook."""
    taken, looking = {}, 0.0
    for is_on in (checks_first, not checks_first):
        run(group, f"main_.collect_facts = {'timed_facts_' if is_on else 'no_facts_'}")
        began = time.perf_counter()
        handle = run(group, source)
        if is_on:
            checks, busy = QuietChecks(), time.thread_time()
            checks.check(group._group.session, handle)
            looking = time.thread_time() - busy
        taken[is_on] = time.perf_counter() - began
    return taken[True], taken[False], looking


def measure(group: WorkerGroup, title: str, source: str, pairs: int) -> None:
    """Print a row of the table."""
    found, in_ranks = [], []
    for number in range(pairs):
        run(group, "seconds_.clear()")
        found.append(pair(group, source, checks_first=bool(number % 2)))
        in_ranks += group.pull("seconds_[-1]")
    rank, here = (1000 * median(each) for each in (in_ranks, [each for _, _, each in found]))
    without = 1000 * median(off for _, off, _ in found)
    low, middle, high = quantiles([on / off for on, off, _ in found], n=4)
    print(
        f"{title:<34} {without:9.1f} ms {rank:8.2f} ms {here:8.2f} ms "
        f"{(rank + here) / without:8.2%}   {middle:.3f} ({low:.3f} to {high:.3f})   {len(found)}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few pairs, to see that it runs")
    args = parser.parse_args()
    pairs = 4 if args.quick else args.pairs
    with WorkerGroup(nproc=args.nproc) as group:
        run(group, SETUP)
        for source in (SHORT, NAMES, EPOCH, LONG):
            run(group, source)
        print(f"{args.nproc} ranks; a model of 146 parameters; medians of pairs in turns")
        title = ("cell", "without", "a rank", "notebook", "share", "with / without", "pairs")
        print("{:<34} {:>12} {:>11} {:>11} {:>8}   {:<24} {}".format(*title))
        measure(group, "nothing to look at", SHORT, pairs)
        measure(group, "names of a loader, a model ...", NAMES, pairs)
        measure(group, "the same and 180 lines more", LONG, pairs)
        measure(group, "two epochs and a test, 32 steps", EPOCH, max(4, pairs // 4))


if __name__ == "__main__":
    main()
