"""Kill a process that writes checkpoints, again and again, and load the newest each time."""

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch

from nbddp.extensions.train.checkpoint.checkpoint import Checkpoint

VALUES = 250_000  # 1 MB


def write_forever(folder: Path, step: int, told: int) -> None:
    checkpoint = Checkpoint(folder)
    while True:
        step += 1
        is_later = step % 3 == 0
        checkpoint.save(step, extra=torch.full((VALUES,), step), asynchronous=is_later)
        if not is_later:
            os.write(told, step.to_bytes(8, "big"))


def kill_one(folder: Path, step: int) -> int:
    """Kill a child that writes checkpoints. Return the last step that it reported."""
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(heard)
        write_forever(folder, step, told)
    os.close(told)
    select.select([heard], [], [], 10.0)
    time.sleep(random.uniform(0.0, 0.04))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(heard, "rb") as pipe:
        words = pipe.read()
    return int.from_bytes(words[-8:], "big")


def main(folder: Path, times: int) -> None:
    """Print the number of leftover drafts and the last step."""
    torch.set_num_threads(1)
    step, n_drafts = 0, 0
    for _ in range(times):
        told = kill_one(folder, step)
        if any(folder.glob(".step-*")):
            n_drafts += 1
        resumed = Checkpoint(folder).resume()
        assert resumed, "no checkpoint is complete"
        assert resumed.step >= told > step, (resumed.step, told, step)
        assert bool((resumed["extra"] == resumed.step).all()), "the checkpoint has another step"
        step = resumed.step
    sys.stdout.write(f"{n_drafts} {step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
