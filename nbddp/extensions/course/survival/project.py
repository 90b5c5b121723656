"""The project of notebook 2.6: a script is trained under torchrun, and loses ranks on the way.

The script runs twice in folders of its own: undisturbed, and with three faults. The
workers write what they do (``hook``), and ``trace`` compares the two runs.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from nbddp.child_processes import find_descendants, kill_all
from nbddp.extensions.course.grading import WrongError, judge, require, require_none, say
from nbddp.extensions.course.survival.reference import given_training, judge_changes
from nbddp.extensions.course.survival.trace import (
    FINAL_FILE,
    RANKS,
    Attempt,
    Resume,
    first_step_of,
    judge_resumed,
    judge_saves,
    judge_shared_file,
    judge_steps,
    read_attempt,
)
from nbddp.reporting import this_rank
from nbddp.sigint import sigint_deferred

POLL_INTERVAL = 0.1  # seconds
STANDSTILL = 90.0  # seconds without an event; on a busy machine, importing torch takes half of it
SPARE_RESTARTS = 2  # for attempts that fail without a fault of the script
OWN_VARIABLES = re.compile(
    r"(TORCHELASTIC|PET)_|((GROUP|LOCAL|ROLE)_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$"
)


# torch puts the rank in front of a traceback when there is a process group
ERROR = re.compile(
    r"^(?:\[rank\d+\]: ?)?(\w[\w.]*(?:Error|Exception|Interrupt|Iteration)\b.*)", re.MULTILINE
)
HALF_FILE = re.compile("PytorchStreamReader|EOFError|OSError|Unpickling|BadZipFile")  # torch.load
# torch 2.13 can abort when Python ends a process with Gloo threads (2 of 10 jobs, on two ranks)
ABORTED = "terminate called without an active exception"
LOST_CONNECTION = re.compile("connection|closed by peer|gloo", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _PlannedFault:
    """A fault, which ends an attempt.

    Attributes:
        kind: "kill" or "raise" after a number of steps, or "save": kill in a call of torch.save.
        rank: the rank that gets it.
        at: the number of the step, or of the call, counted in this attempt.
    """

    kind: str
    rank: int
    at: int

    def told(self, died: int) -> str:
        """Return what happens, for the learner."""
        return say(f"2.6a event {self.kind}", rank=self.rank, died=died)

    @property
    def noun(self) -> str:
        return say(f"2.6a fault {self.kind}", rank=self.rank)


def _plan_for(saver: int) -> list[_PlannedFault]:
    """Return the faults: in the middle of an epoch, in the middle of a save, and an exception."""
    return [
        _PlannedFault("kill", 1, 37),
        _PlannedFault("save", saver, 2),
        _PlannedFault("raise", 1, 12),
    ]


@dataclass
class _Job:
    """A job of torchrun in a folder of its own.

    Attributes:
        folder: the current folder of the script.
        notes: the folder with the hook, and with the files that it writes.
        process: torchrun's agent.
    """

    folder: Path
    notes: Path
    process: subprocess.Popen[bytes]
    attempts: list[Attempt] = field(default_factory=list)
    n_events: int = 0
    changed: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Read what the workers have written."""
        found: list[Attempt] = []
        while (attempt := read_attempt(self.notes, len(found))) is not None:
            found.append(attempt)
        self.attempts = found
        n_events = sum(len(trace.events) for attempt in found for trace in attempt)
        if n_events != self.n_events:
            self.n_events, self.changed = n_events, time.monotonic()

    def wait(self, limit: float) -> Iterator[int | None]:
        """Look again and again. The last exit code is that of torchrun, and must be 0.

        Raises:
            WrongError: there was no event for so many seconds, or torchrun failed.
        """
        while True:
            code = self.process.poll()  # first, so that the last look sees everything
            self.look()
            yield code
            if code is not None:
                break
            if time.monotonic() - self.changed > limit:
                steps = [len(trace.steps) for trace in self.attempts[-1]] if self.attempts else [0]
                raise WrongError(say("2.6a stands still", steps=min(steps)))
            time.sleep(POLL_INTERVAL)
        if code or not self.attempts:
            raise WrongError(say("2.6a torchrun failed", error=self.agent_error()))

    @property
    def n_fired(self) -> int:
        """The number of faults that have fired."""
        return sum(trace.has_fault for attempt in self.attempts for trace in attempt)

    def agent_error(self) -> str:
        lines = (self.notes / "agent.log").read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if "Error" in line), say("2.6a no error"))

    def logs(self, attempt: int) -> list[Path]:
        """Return what each rank has written to stderr."""
        return sorted(self.notes.glob(f"logs/*/attempt_{attempt}/*/stderr.log"))

    def is_bad_luck(self, number: int) -> bool:
        """Return whether an attempt has failed without a fault of the script.

        Either its port was taken: the agent chooses a free port, and rank 0 listens on it seconds
        later. Or a process has aborted at its end.
        """
        texts = [log.read_text(errors="replace") for log in self.logs(number)]
        has_begun = any(trace.steps for trace in self.attempts[number])
        if not has_begun and any("EADDRINUSE" in text for text in texts):
            return True
        return any(ABORTED in text for text in texts) and "Traceback" not in "".join(texts)

    def error(self, attempt: int) -> str:
        """Return the error of an attempt: not a lost connection, if there is another one."""
        found = []
        for log in self.logs(attempt):
            text = log.read_text(errors="replace")
            errors = ERROR.findall(text)
            lines = re.findall(r'File ".*train\.py", line (\d+)', text)
            if errors:
                at = f", line {lines[-1]}" if lines else ""
                found.append(f"`{errors[0][:200]}`{at}, on rank {log.parent.name}")
        found.sort(key=lambda error: bool(LOST_CONNECTION.search(error)))
        return found[0] if found else say("2.6a no error")


@contextmanager
def _started(script: str, place: Path, faults: Sequence[_PlannedFault] = ()) -> Iterator[_Job]:
    """Start a job, and end all its processes with the block."""
    folder, notes = place / "work", place / "notes"
    folder.mkdir(parents=True)
    notes.mkdir()
    (folder / "train.py").write_text(script)
    hook = Path(__file__).with_name("hook.py").read_text()
    (notes / "sitecustomize.py").write_text(hook)
    (notes / "plan.json").write_text(json.dumps([asdict(fault) for fault in faults]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "--max-restarts", str(len(faults) + SPARE_RESTARTS)]
    command += ["--log-dir", str(notes / "logs"), "--redirects", "3", "train.py"]
    process = None
    try:
        with sigint_deferred(raises_second=False), (notes / "agent.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=_environment(notes),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupt in the notebook is not for torchrun
            )
        yield _Job(folder, notes, process)
    finally:
        with sigint_deferred(raises_second=False):
            if process is not None:
                _end(process)


def _environment(notes: Path) -> dict[str, str]:
    """Return this process's variables for a job: without those that place it in another one."""
    kept = {name: value for name, value in os.environ.items() if not OWN_VARIABLES.match(name)}
    paths = [str(notes), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else Gloo meets addresses of dead ranks
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)  # else it starts new workers
        kill_all(lambda: find_descendants(process.pid))
        process.kill()
    process.wait()


@judge("2.6a", limited=False)  # it limits the runs of the script
def survives(script: Any) -> None:
    """Judge a training script, given as a path or as text."""
    require(this_rank.world_size() == 1, "2.6a on ranks")
    text = _read_script(script)
    place = Path(tempfile.mkdtemp(prefix="nbddp-survival-")).resolve()
    try:
        _judge(text, place)
    finally:
        with sigint_deferred(raises_second=False):
            shutil.rmtree(place)


def _read_script(script: Any) -> str:
    """Return the text of a script that can be run."""
    require(isinstance(script, str | Path), "2.6a no script", kind=type(script).__name__)
    text = str(script)
    if "\n" not in text:
        path = Path(text)
        require(path.is_file(), "2.6a no file", name=text, folder=Path.cwd())
        text = path.read_text()
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise WrongError(say("any no Python", error=error.msg, line=error.lineno)) from error
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    require(not any("nbddp" in ast.unparse(node) for node in imports), "2.6a imports nbddp")
    return text


def _judge(script: str, place: Path) -> None:
    began = time.monotonic()
    _tell("1. Undisturbed, on two ranks")
    with _started(script, place / "undisturbed") as calm:
        reference = _judge_undisturbed(calm)
    seconds = time.monotonic() - began
    _tell(f"   {len(reference[0].steps)} steps on each rank, {seconds:.0f} s")
    _tell("2. The same with three faults, and up to three restarts")
    faults = _plan_for(max(rank for rank, trace in enumerate(reference) if trace.saves))
    n_told = 0
    with _started(script, place / "with-faults", faults) as job:
        for code in job.wait(STANDSTILL + 2 * seconds):
            events = _events(job, reference, faults, has_failed=bool(code))
            for event in islice(events, n_told, None):
                _tell(f"   {event}")
                n_told += 1
    _judge_weights(job, calm, faults)
    _tell("3. The same weights as without faults, to the last bit")


def _tell(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the judge takes a while


def _judge_undisturbed(job: _Job) -> Attempt:
    """Judge the job without faults. Return the attempt that has trained."""
    for code in job.wait(STANDSTILL):
        over = range(len(job.attempts) - (0 if code else 1))
        failed = [number for number in over if not job.is_bad_luck(number)]
        if failed:
            judge_shared_file(job.attempts[failed[0]])
            raise WrongError(say("2.6a fails undisturbed", error=job.error(failed[0])))
    # an attempt after an aborted end has nothing left to do
    attempt = max(job.attempts, key=lambda attempt: len(attempt[0].steps))
    judge_steps(attempt)
    judge_changes(attempt, given_training())
    judge_saves(attempt, job.folder)
    file = job.folder / FINAL_FILE
    found = ", ".join(sorted(each.name for each in job.folder.iterdir()))
    require(file.exists(), "2.6a no weights", file=FINAL_FILE, found=found)
    weights = _load(file)
    is_state = isinstance(weights, Mapping) and all(map(torch.is_tensor, weights.values()))
    require(is_state, "2.6a no state_dict", file=FINAL_FILE)
    return attempt


def _load(file: Path) -> Any:
    """Load a file, or return None if that is impossible."""
    try:
        return torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001 - torch raises various errors for a bad file
        return None


def _events(
    job: _Job, reference: Attempt, faults: Sequence[_PlannedFault], *, has_failed: bool
) -> Iterator[str]:
    """Yield what has happened in a job with faults.

    Raises:
        WrongError: there is a mistake; the events before it are its context.
    """
    died = fired = 0
    for number, attempt in enumerate(job.attempts):
        first = first_step_of(reference, attempt)
        if fired and attempt[0].steps:
            yield say("2.6a event restart", restart=fired, step=first or "?")
            fault = faults[fired - 1]
            resume = Resume(died, fault.noun, in_save=fault.kind == "save")
            judge_resumed(reference, attempt, resume)
        is_over = number < len(job.attempts) - 1 or has_failed
        if fired < len(faults) and attempt[faults[fired].rank].has_fault:
            died = (first or 1) - 1 + len(attempt[faults[fired].rank].steps)
            if faults[fired].kind == "raise" and is_over and job.is_bad_luck(number):
                # torchrun has restarted for an abort, not for the exception
                raise WrongError(say("2.6a exit code 0", fault=faults[fired].noun))
            yield faults[fired].told(died)
            fired += 1
        elif is_over and not job.is_bad_luck(number):
            raise WrongError(_failure(job, number, faults[fired - 1] if fired else None))


def _failure(job: _Job, number: int, last: _PlannedFault | None) -> str:
    """Describe an attempt that has failed without a fault of the judge."""
    error = job.error(number)
    has_begun = any(trace.steps for trace in job.attempts[number])
    if last and last.kind == "save" and not has_begun and HALF_FILE.search(error):
        return say("2.6a half written file", fault=last.noun, error=error)
    after = f", after {last.noun}," if last else ""
    return say("2.6a fails", attempt=number + 1, after=after, error=error)


def _judge_weights(job: _Job, calm: _Job, faults: Sequence[_PlannedFault]) -> None:
    """Compare the final weights of both jobs; torchrun has ended both with exit code 0."""
    weights, expected = _load(job.folder / FINAL_FILE), _load(calm.folder / FINAL_FILE)
    is_equal = (
        isinstance(weights, Mapping)
        and weights.keys() == expected.keys()
        and all(torch.is_tensor(each) for each in weights.values())
        and all(torch.equal(weights[name], expected[name]) for name in expected)
    )
    is_restarted = not any(trace.has_fault for trace in job.attempts[-1])
    nouns = [fault.noun for fault in faults]
    require(is_equal or is_restarted, "2.6a exit code 0", fault=nouns[job.n_fired - 1])
    require(is_equal, "2.6a other weights", file=FINAL_FILE)
    require_none(nouns[job.n_fired :], "2.6a ended early")
