"""nbddp and its rivals: one session of each yields one sample of every measure.

A *ready* session starts in a kernel that had time to import its modules, a *fresh* session in a
kernel that has just started.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

from kernel_client import Kernel
from transcript import Transcript

HEAD_START = 5.0  # seconds between %load_ext and the first cell of a ready session
WARM_CELLS = 15
RESTARTS = 3
# as in workload.py; importing it here would import torch and change PSS
UP = "up "
END = "nothing more to come"

# measure, contender and ranks -> samples
Samples = defaultdict[tuple[str, str, int], list[float]]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The number of ranks, the lines that each prints in the burst, and the collected samples."""

    ranks: int
    lines: int
    samples: Samples

    def note(self, measure: str, contender: str, *values: float) -> None:
        """Add samples."""
        self.samples[measure, contender, self.ranks] += values

    def note_output(self, contender: str, transcript: Transcript) -> None:
        """Add the samples of ticks and of a burst of lines."""
        self.note("print", contender, *transcript.tick_delays())
        self.note("burst", contender, transcript.burst_seconds())
        intact = transcript.lines_in_order(ranks=self.ranks, lines=self.lines)
        self.note("intact", contender, intact)


class Nbddp:
    """Ranks that stay between ``%%ddp`` cells."""

    name = "nbddp"

    def ready(self, trial: Trial) -> None:
        """Measure the first cell after a while, memory, warm cells, output and restarts."""
        with Kernel() as kernel:
            kernel.run("%load_ext nbddp")
            time.sleep(HEAD_START)  # part of what is measured: ranks are prepared during the pause
            trial.note("first", self.name, self._first_cell(kernel, trial.ranks))
            kernel.run("%%ddp\nimport workload\nworkload.reduce()")
            trial.note("memory", self.name, kernel.memory())
            self._warm_cells(kernel, trial)
            self._output(kernel, trial)
            for _ in range(RESTARTS):
                trial.note("restart", self.name, self._restart(kernel, trial.ranks))

    def fresh(self, trial: Trial) -> None:
        """Measure ``%load_ext``, the cell right after it, and the import that it waits for."""
        with Kernel() as kernel:
            trial.note("import", self.name, kernel.run("import torch.distributed"))
        with Kernel() as kernel:
            trial.note("load", self.name, kernel.run("%load_ext nbddp"))
            trial.note("fresh", self.name, self._first_cell(kernel, trial.ranks))

    def _first_cell(self, kernel: Kernel, ranks: int) -> float:
        with _until_up(kernel, ranks) as seconds:
            request = kernel.send(f"%%ddp --nproc {ranks}\n{_UP_CELL}")
        kernel.reply(request)
        return seconds[0]

    def _restart(self, kernel: Kernel, ranks: int) -> float:
        with _until_up(kernel, ranks) as seconds:
            kernel.send("%ddp restart")
            request = kernel.send(f"%%ddp\n{_UP_CELL}")
        kernel.reply(request)
        return seconds[0]

    def _warm_cells(self, kernel: Kernel, trial: Trial) -> None:
        for _ in range(WARM_CELLS):
            trial.note("warm", self.name, kernel.run("%%ddp\npass"))
            trial.note("plain", self.name, kernel.run("pass"))

    def _output(self, kernel: Kernel, trial: Trial) -> None:
        phases = ["ticks", f"burst={trial.lines}", "end"]
        request = kernel.send(f"%%ddp\nworkload.work({phases})")
        trial.note_output(self.name, Transcript(kernel.collect(END, trial.ranks)))
        kernel.reply(request)


class Rival:
    """A rival that starts its ranks again in every cell."""

    name: str
    imports: str

    def cell(self, ranks: int, phases: list[str], kernel: Kernel) -> str:
        """Return the source of a cell that runs these phases on the ranks."""
        raise NotImplementedError

    def ready(self, trial: Trial) -> None:
        """Measure the first cell in a kernel that has imported torch, and the output."""
        with Kernel() as kernel:
            kernel.run(self.imports)
            phases = ["up", "ticks", f"burst={trial.lines}", "end", "idle"]
            sent = time.time()
            kernel.send(self.cell(trial.ranks, phases, kernel))
            transcript = Transcript(kernel.collect(END, trial.ranks))
            trial.note("first", self.name, transcript.last_up() - sent)
            trial.note_output(self.name, transcript)

    def fresh(self, trial: Trial) -> None:
        """Measure the first cell in a kernel without imports, and memory after a collective."""
        with Kernel() as kernel:
            sent = time.time()
            kernel.send(self.cell(trial.ranks, ["up", "reduce", "end", "idle"], kernel))
            transcript = Transcript(kernel.collect(END, trial.ranks))
            trial.note("fresh", self.name, transcript.last_up() - sent)
            trial.note("memory", self.name, kernel.memory())


class Spawn(Rival):
    """``torch.multiprocessing.spawn`` of a function in an importable file."""

    name = "spawn"
    imports = "import workload, torch.multiprocessing as mp"

    def cell(self, ranks: int, phases: list[str], kernel: Kernel) -> str:
        """The child processes inherit descriptor 1, which ipykernel reads and shows."""
        args = (ranks, str(kernel.home / "meeting"), phases)
        return f"{self.imports}\nmp.spawn(workload.spawned, args={args}, nprocs={ranks})"


class Torchrun(Rival):
    """``torchrun --standalone`` as a subprocess of the cell."""

    name = "torchrun"
    imports = "import os, subprocess, sys, workload"

    def cell(self, ranks: int, phases: list[str], kernel: Kernel) -> str:  # noqa: ARG002
        """Show output unbuffered as it arrives: a pipe cannot be read sooner."""
        return _TORCHRUN_CELL.format(ranks=ranks, phases=phases)


_UP_CELL = 'dist.barrier()\nprint(f"up {rank}")'

_TORCHRUN_CELL = """
import os, subprocess, sys
from importlib.util import find_spec
launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
program = ["--nproc-per-node", "{ranks}", find_spec("workload").origin, *{phases}]
process = subprocess.Popen(launcher + program, stdout=subprocess.PIPE)
while data := os.read(process.stdout.fileno(), 65536):
    sys.stdout.write(data.decode())
    sys.stdout.flush()
"""

CONTENDERS = (Nbddp(), Spawn(), Torchrun())


@contextmanager
def _until_up(kernel: Kernel, ranks: int) -> Iterator[list[float]]:
    """Measure the time from the start of the block until the line of every rank has arrived."""
    seconds: list[float] = []
    sent = time.time()
    yield seconds
    seconds.append(kernel.collect(UP, ranks)[-1][0] - sent)


def run_round(trial: Trial, turn: int) -> None:
    """Take one sample of everything, in an order that changes from turn to turn."""
    shift = turn % len(CONTENDERS)
    order = CONTENDERS[shift:] + CONTENDERS[:shift]
    for session, contender in product(("ready", "fresh"), order):
        getattr(contender, session)(trial)
