"""Run all checks that need GPUs, one part after the other, and print a report in Markdown.

It ends within ten minutes: parts that do not fit are reported as not run. The exit status is that
of a failure only if a part has failed.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

import torch

ROOT = Path(__file__).parents[1]
TOTAL_SECONDS = 590.0  # seconds
SHOWN_LINES = 60  # last lines of a part that the report shows
PACKAGES = ("nbddp", "ipykernel", "nvidia-ml-py")
ON_GPU = "tests/multiproc/test_gpu.py"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short")


@dataclass(frozen=True)
class Part:
    """A part of the report: its command, its time limit, and the GPUs and package that it needs."""

    title: str
    arguments: Sequence[str]
    limit: float
    gpus: int = 1
    package: str = ""


def pytest_part(title: str, *arguments: str, limit: float, gpus: int = 1) -> Part:
    return Part(title, (*PYTEST, *arguments), limit, gpus)


PARTS = (
    pytest_part("Two Gloo ranks on one GPU", ON_GPU, "-k", "over_gloo", limit=60),
    pytest_part("NCCL with one rank", ON_GPU, "-k", "over_nccl", limit=60),
    pytest_part("Several ranks over NCCL", ON_GPU, "-k", "nccl_ranks", limit=90),
    pytest_part("pytest -m gpu", "-m", "gpu", "tests", limit=150),
    pytest_part(
        "All notebooks on the GPU",
        "tests/notebooks/test_notebooks.py",
        *("-m", "notebook", "-k", "runs_from_start", "-n", "4", "--dist", "load"),
        limit=300,
    ),
    Part(
        "The notebook with a language model",
        (*PYTEST, "tests/multiproc/ecosystem/test_notebook.py", "-m", "ecosystem"),
        limit=240,
        package="trl",
    ),
    Part("Engine", ("benchmarks/engine.py", "--quick", "--device", "cuda"), 90),
    Part("Training", ("benchmarks/training.py", "--quick", "--device", "cuda"), 90),
)


@dataclass(frozen=True)
class Outcome:
    """The verdict of a part, and its output if it ran."""

    part: Part
    verdict: str
    seconds: float = 0.0
    output: str = ""

    @property
    def has_failed(self) -> bool:
        return self.verdict.startswith("FAILED")


def main() -> None:
    """Print the report part by part, so that a partial report is still useful."""
    deadline = time.monotonic() + TOTAL_SECONDS
    gpus = torch.cuda.device_count()
    print(f"# GPU day\n\n{machine(gpus)}\n", flush=True)
    outcomes = []
    for part in PARTS:
        outcomes.append(run(part, gpus, deadline))
        print(section(outcomes[-1]), flush=True)
    print(f"## Summary\n\n{table(outcomes)}", flush=True)
    sys.exit(any(each.has_failed for each in outcomes))


def run(part: Part, gpus: int, deadline: float) -> Outcome:
    if gpus < part.gpus:
        return Outcome(part, "no GPU here" if not gpus else f"needs {part.gpus} GPUs, here is 1")
    if part.package and find_spec(part.package) is None:
        return Outcome(part, f"not run: {part.package} is not installed")
    seconds = min(part.limit, deadline - time.monotonic())
    if seconds < 10:
        return Outcome(part, "not run: the ten minutes are over")
    began = time.monotonic()
    command = [sys.executable, *part.arguments]
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with TemporaryFile("w+") as log:  # not a pipe, which a leftover process would hold open
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        has_ended = ended_in_time(process, seconds)
        log.seek(0)
        output = log.read()
    verdict = f"FAILED: not over after {seconds:.0f} s"
    if has_ended:
        verdict = verdict_of(process.returncode, output)
    return Outcome(part, verdict, time.monotonic() - began, output)


def ended_in_time(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether a process ended in time; terminate it and its ranks if not."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return False
    return True


def verdict_of(status: int, output: str) -> str:
    """Return the outcome in words; pytest's summary if there is one."""
    counted = re.findall(r"^=* ?((?:\d+ \w+,? ?)+)in [\d.]+s", output, re.MULTILINE)
    words = counted[-1].strip().rstrip(",") if counted else ""
    if status:
        return f"FAILED: {words or f'exit status {status}'}"
    return words or "passed"


def machine(gpus: int) -> str:
    """Return the GPUs, versions and cores of the machine."""
    lines = [f"* {name_of(index)}" for index in range(gpus)] or ["* no GPU here"]
    cuda, nccl = torch.version.cuda or "none", "none"
    if gpus and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    packages = ", ".join(f"{name} {version_of(name)}" for name in PACKAGES)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines.append(f"* torch {torch.__version__}, CUDA {cuda}, NCCL {nccl}, driver {driver()}")
    lines.append(f"* Python {platform.python_version()}, {packages}; {cores} cores")
    return "\n".join(lines)


def name_of(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"GPU {index}: {found.name}, {found.total_memory / 2**30:.0f} GiB"


def driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        output = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (output.stdout.splitlines() or ["unknown"])[0]


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def section(outcome: Outcome) -> str:
    """Return a section of the report with the last lines of the output."""
    head = f"## {outcome.part.title}\n\n{outcome.verdict}\n"
    if not outcome.output:
        return head
    command = " ".join(["python", *outcome.part.arguments])
    end = "\n".join(outcome.output.rstrip().splitlines()[-SHOWN_LINES:])
    return f"{head}\n`{command}`\n\n```\n{end}\n```\n"


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [f"| {o.part.title} | {o.verdict} | {o.seconds:.0f} s |" for o in outcomes]
    return "\n".join(["| part | outcome | took |", "|---|---|--:|", *rows])


if __name__ == "__main__":
    main()
