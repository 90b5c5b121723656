"""The work of ranks and plain cells for the panel's figures, run by kernel and ranks."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbddp

RANKS = 4
LINES_PER_SECOND = 200
METRICS_PER_SECOND = 50
LINES_PER_METRIC = LINES_PER_SECOND // METRICS_PER_SECOND
LINE_LENGTH = 100
VIEW_DELAY = 1.2  # seconds for a cell's view to appear before lines are timed
FOREVER = 600.0
EVENTS = Path("moves.jsonl")
CELLS = Path("cells.jsonl")
PID = Path("kernel.pid")


def install_hooks() -> None:
    """Record, in the kernel, its process id, its cells, and the calls of its widgets' handlers."""
    import ipywidgets  # only the kernel needs it
    from IPython import get_ipython

    PID.write_text(str(os.getpid()))
    EVENTS.touch()
    begun: list[float] = []
    get_ipython().events.register("pre_run_cell", lambda _: begun.extend(_clocks()))
    get_ipython().events.register("post_run_cell", lambda _: _note_cell(begun))
    for kind in (ipywidgets.ToggleButton, ipywidgets.ToggleButtons):
        _after_init(kind, lambda it: it.observe(lambda change: _note(change["new"]), "value"))
    _after_init(ipywidgets.Button, lambda it: it.on_click(lambda _: _note(it.description)))


def _clocks() -> tuple[float, float]:
    return time.time(), time.process_time()  # of this process, without its children


def _note_cell(begun: list[float]) -> None:
    ends = _clocks()
    if begun:  # not the cell that installs the hooks
        with CELLS.open("a") as file:
            file.write(json.dumps([*begun, *ends]) + "\n")
        begun.clear()


def _after_init(kind: Any, act: Callable[[Any], None]) -> None:
    make = kind.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        act(self)

    kind.__init__ = init


def _note(what: Any) -> None:
    at = time.time()
    with EVENTS.open("a") as file:
        file.write(json.dumps([at, str(what)]) + "\n")


def ticks(count: int, *, flush: bool = False) -> None:
    """Print the time in lines that are so far apart that each is alone.

    The pauses are random, so that they match no period. The first line comes at once.
    """
    for number in range(count + 1):
        print(f"{'tick' if number else 'first'} {time.time():.6f} .", flush=flush)
        time.sleep(random.uniform(0.2, 0.45) if number else VIEW_DELAY)


def idle() -> None:
    """Print a line and wait."""
    print("up", flush=True)
    time.sleep(FOREVER)


def chatter(seconds: float = FOREVER, *, times: int = 1) -> None:
    """Print lines, one or several ``times``, and report numbers, like a talkative training."""
    began = time.perf_counter()
    for number in range(int(seconds * LINES_PER_SECOND)):
        time.sleep(max(0.0, began + number / LINES_PER_SECOND - time.perf_counter()))
        for _ in range(times):
            print(line(number))
        if number % (2 * LINES_PER_METRIC) == 0:  # two metrics at once
            nbddp.log(step=number, loss=1 / (number + 1), accuracy=1 - 1 / (number + 1))


def murmur(seconds: float) -> None:
    """Print and report so little that many ranks print as much as ``RANKS`` chatty ones."""
    import torch.distributed as dist

    share = dist.get_world_size() // RANKS
    pause = share / LINES_PER_SECOND
    began = time.perf_counter()
    for number in range(int(seconds / pause)):
        at = (number + dist.get_rank() / dist.get_world_size()) * pause  # not all ranks at once
        time.sleep(max(0.0, began + at - time.perf_counter()))
        print(line(number))
        if number % (2 * LINES_PER_METRIC) == 0:
            nbddp.log(step=number, loss=1 / (number + 1), accuracy=1 - 1 / (number + 1))


def silence(seconds: float) -> None:
    """Sleep for a while."""
    time.sleep(seconds)


def flood(lines: int = 10**9) -> None:
    """Print as fast as possible, and report a number with every second line."""
    for number in range(lines):
        print(line(number))
        if number % 2 == 0:
            nbddp.log(step=number, flood=1 / (number + 1))


def line(number: int) -> str:
    """Return a line of 100 characters with its number."""
    return f"line {number:06d} ".ljust(LINE_LENGTH, "x")


def wait_for_interrupt(path: str, work: Callable[[], None]) -> None:
    """Work until interrupted; record the start and the time of the interrupt."""
    Path(f"{path}.up").touch()
    try:
        work()
    except KeyboardInterrupt:
        Path(path).write_text(repr(time.time()))
