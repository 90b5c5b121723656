"""Compare a training in nbddp with plain torchrun: steps, checkpoints, and a lost rank.

    python benchmarks/training.py [--rounds 5] [--device cuda] [--quick]

Both train the same network on the same digits with DDP on two ranks, one thread each, in turns
within one run. Only the ratios matter: absolute figures depend on the machine and its load.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from nbddp import WorkerGroup

SETUP = """
import json, os, time
from pathlib import Path
import torch
from torch import nn
import nbddp

def make_model():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(7 * 7 * 32, 10)),
    )

torch.manual_seed(0)
on = torch.device("cpu")
if os.environ["BENCHMARK_DEVICE"] == "cuda":
    on = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
images, labels = torch.rand(32, 1, 28, 28, device=on), torch.randint(10, (32,), device=on)
model = nn.parallel.DistributedDataParallel(make_model().to(on))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train_step(step, log):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    log(step=step, loss=loss.item())
    print(f"step {step} loss {loss.item():.4f}", flush=True)
"""
SPEED = """
def no_log(**values): pass

for step in range(WARM):
    train_step(step, no_log)
torch.distributed.barrier()
began = time.perf_counter()
for step in range(STEPS):
    train_step(step, LOG)
seconds = time.perf_counter() - began
if torch.distributed.get_rank() == 0:
    Path(OUT).write_text(json.dumps(STEPS / seconds))
"""
STALL = """
layers = [nn.Linear(1800, 1800) for _ in range(4)]  # 52 MB with its gradients left out
big = nbddp.prepare(nn.Sequential(*layers))
stalls = {}
for name, saved in (("ConvNet", model), ("52 MB", big)):
    checkpoint = nbddp.Checkpoint(f"{OUT}-{name}", keep=2)
    for kind in (False, True):
        found = []
        for number in range(SAVES):
            checkpoint.save(number, model=saved, asynchronous=kind)
            found.append(checkpoint.stall)
            checkpoint.wait()
        stalls[f"{name}, {'asynchronous' if kind else 'synchronous'}"] = sorted(found)[SAVES // 2]
if torch.distributed.get_rank() == 0:
    Path(OUT).write_text(json.dumps(stalls))
"""
LOSE = """
checkpoint = nbddp.Checkpoint(OUT + "-checkpoints")
resumed = checkpoint.resume(model=model, optimizer=optimizer)
first = resumed.step + 1 if resumed else 0
for step in range(first, 60):
    train_step(step, LOG)
    if torch.distributed.get_rank() == 0:
        with open(OUT, "a") as file:
            file.write(json.dumps([first, step, time.time()]) + "\\n")
    if step % 10 == 9:
        checkpoint.save(step, model=model, optimizer=optimizer)
    torch.distributed.barrier()
    if first == 0 and step == 34 and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), 9)
"""
INIT = "import torch.distributed\ntorch.distributed.init_process_group('BACKEND')\n"
LEAVE = "\ntorch.distributed.destroy_process_group()\n"


def backend() -> str:
    """Return NCCL if each of the two ranks has its own GPU, else Gloo."""
    on_gpu = os.environ["BENCHMARK_DEVICE"] == "cuda"
    return "nccl" if on_gpu and torch.cuda.device_count() >= 2 else "gloo"


def run_in_group(group: WorkerGroup, source: str, *, max_restarts: int = 0) -> None:
    """Run the source in a worker group, with its log of numbers."""
    group.run(source.replace("LOG", "nbddp.log"), quiet=True, max_restarts=max_restarts)


def run_under_torchrun(folder: Path, source: str, *, max_restarts: int = 0) -> None:
    """Run the same source as a script that only prints."""
    script = folder / "script.py"
    meet = INIT.replace("BACKEND", backend())
    script.write_text(meet + SETUP + source.replace("LOG", "(lambda **values: None)") + LEAVE)
    launcher = [sys.executable, "-m", "torch.distributed.run", *_rendezvous_options()]
    options = ["--nproc-per-node", "2", f"--max-restarts={max_restarts}", str(script)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "torchrun.log").open("w+") as log:
        done = subprocess.run(launcher + options, env=env, stdout=log, stderr=log, cwd=folder)
        log.seek(0)
        if done.returncode:
            raise RuntimeError(f"torchrun failed:\n{log.read()[-4000:]}")


def _rendezvous_options() -> list[str]:
    """Return a fixed address: with --standalone the second attempt often dials old ports."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ["--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]


def fill_in(source: str, out: Path, **numbers: int) -> str:
    """Replace the placeholders of the source."""
    for name, value in numbers.items():
        source = source.replace(name, str(value))
    return source.replace("OUT", repr(str(out)))


def steps_per_second(group: WorkerGroup, folder: Path, rounds: int, steps: int) -> list[str]:
    """Compare the steps per second, in turns so that both use the same machine state."""
    ours, theirs = [], []
    out = folder / "speed.json"
    source = fill_in(SPEED, out, WARM=20, STEPS=steps)
    for turn in range(rounds):
        runs: list[tuple[list[float], Callable[[], None]]] = [
            (ours, lambda: run_in_group(group, source)),
            (theirs, lambda: run_under_torchrun(folder, source)),
        ]
        for found, run in runs if turn % 2 == 0 else reversed(runs):
            run()
            found.append(json.loads(out.read_text()))
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return [
        f"steps per second, nbddp:      {spread(ours)}",
        f"steps per second, torchrun:   {spread(theirs)}",
        f"nbddp / torchrun, each round: {spread(ratios)} (target 0.98)",
    ]


def stalls(group: WorkerGroup, folder: Path, saves: int) -> list[str]:
    """Measure how long a save blocks the loop."""
    out = folder / "stalls.json"
    run_in_group(group, fill_in(STALL, out, SAVES=saves))
    found = json.loads(out.read_text())
    return [f"checkpoint stall, {name}: {seconds * 1000:.1f} ms" for name, seconds in found.items()]


def from_kill_to_step(path: Path) -> float:
    """Return the seconds from the last step before the kill to the first step after it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    before = [at for first, _, at in lines if first == 0]
    after = [at for first, _, at in lines if first > 0]
    assert [step for first, step, _ in lines if first > 0] == list(range(30, 60))
    return float(after[0] - before[-1])


def recoveries(group: WorkerGroup, folder: Path, rounds: int) -> list[str]:
    """Kill a rank at step 34; both start again and resume from the checkpoint of step 29."""
    ours, theirs, tries = [], [], 0
    while len(theirs) < rounds:
        tries += 1
        our_losses, their_losses = folder / f"ours{tries}.jsonl", folder / f"theirs{tries}.jsonl"
        try:  # gloo of the second attempt may dial ports of the first; torchrun then fails
            run_under_torchrun(folder, fill_in(LOSE, their_losses), max_restarts=1)
        except RuntimeError:
            if tries > 5 * rounds:
                raise
            continue
        theirs.append(from_kill_to_step(their_losses))
        run_in_group(group, fill_in(LOSE, our_losses), max_restarts=1)
        ours.append(from_kill_to_step(our_losses))
    ratios = [other / one for one, other in zip(ours, theirs, strict=True)]
    return [
        f"kill to resumed step, nbddp:    {spread(ours)} s",
        f"kill to resumed step, torchrun: {spread(theirs)} s",
        f"torchrun / nbddp, each round:   {spread(ratios)} (target 5)",
        f"torchrun did not come back in {tries - rounds} of {tries} runs, nbddp in none",
    ]


def spread(values: Sequence[float]) -> str:
    """Return the median and the range."""
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    os.environ["BENCHMARK_DEVICE"] = args.device  # for the ranks of both
    rounds, steps = (1, 100) if args.quick else (args.rounds, 400)
    with tempfile.TemporaryDirectory(prefix="nbddp-bench-") as name:
        folder = Path(name)
        os.chdir(folder)
        with WorkerGroup(nproc=2, threads=1, backend=backend()) as group:
            group._group.session.launcher.preload_more()  # as %load_ext does
            group.run(SETUP, quiet=True)
            print_lines(steps_per_second(group, folder, rounds, steps))
            print_lines(stalls(group, folder, 5 if args.quick else 15))
            group.restart()  # otherwise the cells above would be replayed below
            group.run(SETUP, quiet=True)
            print_lines(recoveries(group, folder, rounds))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines as soon as they are known."""
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
