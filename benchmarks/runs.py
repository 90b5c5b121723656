"""Measure a list of 200 runs and a comparison of four, in a process that has read none of them.

    python benchmarks/runs.py [--rounds 7] [--runs 200] [--rows 10000]

Each round is a separate process that has IPython and nbddp's magics, like a kernel after
``%load_ext``, and nothing else. The time is from the magic to its output. The list is measured
twice: for runs with all their facts, and for runs whose kernel was killed. Before each round the
files are dropped from the system's cache, so that they are read from the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from runs_on_disk import make_run, rows_of  # noqa: E402

PROGRAM = """
import sys, time
from unittest.mock import Mock
from IPython.core.interactiveshell import InteractiveShell
import nbddp.magics.presenter as presenter
import nbddp.magics.line_magic
from nbddp.magics.line_magic import run_command
published = []
presenter.publish_display_data = lambda data, *more: published.append(data)
shown = presenter.Presenter(Mock())
shown.choice = presenter.ViewChoice.PANEL
notebook = Mock(presenter=shown, current_run=None)
began = time.perf_counter()
run_command(notebook, sys.argv[1])
took = time.perf_counter() - began
[data] = published
print(took, len(data["text/html"]))
"""


def measure(folder: Path, line: str, rounds: int) -> None:
    """Print the median, the fastest and the slowest round."""
    took, size = [], 0
    for _ in range(rounds):
        forget(folder)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, line],
            check=True,
            capture_output=True,
            text=True,
            cwd=folder,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        )
        seconds, size = float(done.stdout.split()[0]), int(done.stdout.split()[1])
        took.append(seconds)
    print(
        f"%ddp {line[:24]:<24} {median(took):.2f} s ({min(took):.2f} to {max(took):.2f}), "
        f"{size / 1000:.0f} kB of HTML",
        flush=True,
    )


def forget(folder: Path) -> None:
    """Drop all files below a folder from the system's cache."""
    for path in folder.rglob("*.json*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only pages that are on the disk can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def kill(path: Path) -> None:
    """Change a run as if its kernel had been killed in the middle of the first cell."""
    facts = json.loads((path / "run.json").read_text())
    del facts["ended"]
    (path / "run.json").write_text(json.dumps(facts))
    lines = (path / "events.jsonl").read_text().splitlines()
    (path / "events.jsonl").write_text("\n".join(lines[:3]) + "\n")


def main() -> None:
    """Create the runs, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rows", type=int, default=10_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        paths = []
        for number in range(args.runs):
            rows = rows_of(args.rows // 2, begin=2.0 + number / 100)
            name = f"20270115-{number:06}-run"
            source = f"for batch in loader:\n    train({number})\n" * 20
            cells = [(source, "ok")]
            paths.append(make_run(folder, name, cells=cells, rows=rows, config={"lr": number}))
        measure(folder, "runs", args.rounds)
        measure(folder, "runs lr<100 --sort loss", args.rounds)
        four = " ".join(path.name for path in paths[:4])
        measure(folder, f"compare {four}", args.rounds)
        for path in paths:
            kill(path)
        print("the same runs, killed:")
        measure(folder, "runs", args.rounds)


if __name__ == "__main__":
    main()
