"""The work of the ranks of every contender: the same Python for all.

nbddp's ranks and the child processes of spawn import it; torchrun runs it as a script.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

END = "nothing more to come"
LINE_LENGTH = 100
ON_GPU = os.environ.get("BENCHMARK_DEVICE") == "cuda"


def device(rank: int) -> torch.device:
    """Return the device of a rank; ranks share GPUs if there are too few."""
    if not ON_GPU:
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def init_group(rank: int, ranks: int, **how: str) -> None:
    """Form the process group; NCCL needs a GPU for every rank."""
    has_own_gpu = ON_GPU and torch.cuda.device_count() >= ranks
    options = {"device_id": device(rank)} if has_own_gpu else {}
    backend = "nccl" if has_own_gpu else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=ranks, **how, **options)


def up() -> None:
    """Wait for all ranks, then print a line."""
    dist.barrier()
    print(f"up {dist.get_rank()}", flush=True)


def reduce() -> None:
    """Use the process group once, so that it allocates its memory."""
    dist.all_reduce(torch.ones(1, device=device(dist.get_rank())))


def ticks(count: int = 60, period: float = 0.05) -> None:
    """Print the time on rank 0, again and again."""
    for _ in range(count if dist.get_rank() == 0 else 0):
        print(f"tick {time.time()}", flush=True)
        time.sleep(period)
    dist.barrier()


def burst(count: int) -> None:
    """Print as fast as possible on every rank, with plain prints."""
    rank = dist.get_rank()
    dist.barrier()
    if rank == 0:
        print(f"burst {time.time()}", flush=True)
    for number in range(count):
        print(line(rank, number))
    sys.stdout.flush()
    dist.barrier()


def line(rank: int, number: int) -> str:
    """Return a line of 100 characters with its rank and number."""
    return f"line {rank} {number:06d} ".ljust(LINE_LENGTH, "x")


def end() -> None:
    """Print the last line of every rank; it arrives after all other output."""
    dist.barrier()
    print(END, flush=True)


def idle() -> None:
    """Wait until killed; nbddp's ranks do not need this."""
    signal.pause()


def work(phases: list[str]) -> None:
    """Run some of the functions above, each written as ``name`` or ``name=number``."""
    functions: dict[str, Callable[..., None]] = {
        function.__name__: function for function in (up, reduce, ticks, burst, end, idle)
    }
    for phase in phases:
        name, _, number = phase.partition("=")
        functions[name](*[int(number)] if number else [])


def spawned(rank: int, ranks: int, meeting_file: str, phases: list[str]) -> None:
    """Run a child process of ``torch.multiprocessing.spawn``."""
    init_group(rank, ranks, init_method=f"file://{meeting_file}")
    work(phases)


if __name__ == "__main__":  # a rank of torchrun
    init_group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    work(sys.argv[1:])
