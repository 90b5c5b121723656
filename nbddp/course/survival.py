"""The project of notebook 18: a script is trained under torchrun, and loses ranks on the way.

The script runs twice in folders of its own: undisturbed, and with three faults. The
workers write what they do (``survival_hook``), and ``survival_trace`` compares the two runs.
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
from pathlib import Path
from typing import Any

import torch

from nbddp.child_processes import find_descendants, kill_all
from nbddp.course.grading import RIGHT
from nbddp.course.survival_reference import given_training, hint_to_changes
from nbddp.course.survival_trace import (
    FINAL_FILE,
    RANKS,
    Attempt,
    Resume,
    first_step_of,
    hint_to_resumed,
    hint_to_saves,
    hint_to_shared_file,
    hint_to_undisturbed,
    read_attempt,
)
from nbddp.sigint import sigint_deferred
from nbddp.train import this_rank

ONLY_IN_NOTEBOOK = (
    "Call this in a cell without `%%ddp`: torchrun starts ranks of its own, once and not on each "
    "rank."
)
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
        return {
            "kill": f"rank {self.rank} gets a SIGKILL after step {died}",
            "save": f"rank {self.rank} gets a SIGKILL while it writes a checkpoint, after step "
            f"{died}",
            "raise": f"rank {self.rank} raises an exception after step {died}",
        }[self.kind]

    @property
    def noun(self) -> str:
        return {
            "kill": f"the death of rank {self.rank}",
            "save": f"the death of rank {self.rank} in the middle of a save",
            "raise": f"the exception on rank {self.rank}",
        }[self.kind]


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

    def wait(self) -> Iterator[int | None]:
        """Look again and again. The last exit code is that of torchrun."""
        while True:
            code = self.process.poll()  # first, so that the last look sees everything
            self.look()
            yield code
            if code is not None:
                return
            time.sleep(POLL_INTERVAL)

    def stands_still(self, limit: float) -> bool:
        return time.monotonic() - self.changed > limit

    def agent_error(self) -> str:
        lines = (self.notes / "agent.log").read_text(errors="replace").splitlines()
        return next(
            (line for line in reversed(lines) if "Error" in line), "there is no error message"
        )

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
        return found[0] if found else "there is no error message"


@contextmanager
def _started(script: str, place: Path, faults: Sequence[_PlannedFault] = ()) -> Iterator[_Job]:
    """Start a job, and end all its processes with the block."""
    folder, notes = place / "work", place / "notes"
    folder.mkdir(parents=True)
    notes.mkdir()
    (folder / "train.py").write_text(script)
    hook = Path(__file__).with_name("survival_hook.py").read_text()
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


def survives(script: Any) -> str:
    """Grade a training script, given as a path or as text."""
    if this_rank.world_size() > 1:
        return ONLY_IN_NOTEBOOK
    text, hint = _read_script(script)
    if hint:
        return hint
    place = Path(tempfile.mkdtemp(prefix="nbddp-survival-")).resolve()
    try:
        return _judge(text, place)
    finally:
        with sigint_deferred(raises_second=False):
            shutil.rmtree(place)


def _read_script(script: Any) -> tuple[str, str]:
    """Return the text of a script, and a hint if it cannot be run."""
    if not isinstance(script, str | Path):
        kind = type(script).__name__
        return "", f"Give the path of the script, or its text, not a value of type {kind}."
    text = str(script)
    if "\n" not in text:
        path = Path(text)
        if not path.is_file():
            return "", f"There is no file {text!r} in the folder {Path.cwd()}."
        text = path.read_text()
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return "", f"That is not valid Python: {error.msg}, line {error.lineno}."
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    if any("nbddp" in ast.unparse(node) for node in imports):
        return "", "The script imports nbddp. Here it has to survive with plain torch."
    return text, RIGHT


def _judge(script: str, place: Path) -> str:
    began = time.monotonic()
    _tell("1. Undisturbed, on two ranks")
    with _started(script, place / "undisturbed") as calm:
        hint = _hint_to_first_job(calm)
    if hint:
        return hint
    reference = _longest(calm)
    seconds = time.monotonic() - began
    saver = max(rank for rank, trace in enumerate(reference) if trace.saves)
    _tell(f"   {len(reference[0].steps)} steps on each rank, {seconds:.0f} s")
    _tell("2. The same with three faults, and up to three restarts")
    faults = _plan_for(saver)
    with _started(script, place / "with-faults", faults) as job:
        progress = _JobProgress(reference, faults)
        hint = _hint_to_second_job(job, progress, STANDSTILL + 2 * seconds)
    return hint or _hint_to_weights(job, calm, progress)


def _tell(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the judge takes a while


def _longest(job: _Job) -> Attempt:
    """Return the attempt that has trained: one after an aborted end has nothing left to do."""
    return max(job.attempts, key=lambda attempt: len(attempt[0].steps))


def _hint_to_first_job(job: _Job) -> str:
    for code in job.wait():
        if code is None and job.stands_still(STANDSTILL):
            return _hint_to_standstill(job)
        over = range(len(job.attempts) - (0 if code else 1))
        failed = [number for number in over if not job.is_bad_luck(number)]
        if failed:
            hint = hint_to_shared_file(job.attempts[failed[0]])
            return hint or f"Without any fault, the script fails: {job.error(failed[0])}."
    if job.process.returncode or not job.attempts:
        return f"torchrun failed: {job.agent_error()}"
    attempt = _longest(job)
    hint = hint_to_undisturbed(attempt) or hint_to_changes(attempt, given_training())
    return hint or hint_to_saves(attempt, job.folder) or _hint_to_final_file(job)


def _hint_to_final_file(job: _Job) -> str:
    file = job.folder / FINAL_FILE
    if not file.exists():
        found = ", ".join(sorted(each.name for each in job.folder.iterdir()))
        return f"At its end there is no file {FINAL_FILE}. The folder contains: {found}."
    weights = _load(file)
    if not isinstance(weights, Mapping) or not all(map(torch.is_tensor, weights.values())):
        return f"{FINAL_FILE} is not a `state_dict()`: save that of the net, with `torch.save`."
    return RIGHT


def _load(file: Path) -> Any:
    """Load a file, or return None if that is impossible."""
    try:
        return torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001 - torch raises various errors for a bad file
        return None


def _hint_to_standstill(job: _Job) -> str:
    steps = [len(trace.steps) for trace in job.attempts[-1]] if job.attempts else [0]
    return (
        f"The job stands still after {min(steps)} steps of this attempt. Does one rank wait in a "
        "collective or a barrier that another one leaves out (notebook 06)?"
    )


def _hint_to_second_job(job: _Job, progress: _JobProgress, limit: float) -> str:
    """Follow a job with faults; return at the first mistake."""
    for code in job.wait():
        hint = progress.check(job, has_failed=bool(code))
        if hint:
            return hint
        if code is None and job.stands_still(limit):
            return _hint_to_standstill(job)
    return f"torchrun failed: {job.agent_error()}" if job.process.returncode else RIGHT


@dataclass
class _JobProgress:
    """Checks the attempts of a job, and tells what happens.

    Attributes:
        reference: the undisturbed run.
        faults: the faults, in their order.
        n_fired: the number of faults that have fired.
        n_told: the number of events that are told.
    """

    reference: Attempt
    faults: Sequence[_PlannedFault]
    n_fired: int = 0
    n_told: int = 0

    def check(self, job: _Job, *, has_failed: bool) -> str:
        """Check all attempts from the first on, and return a hint to the first mistake."""
        self.n_fired, died, events, hint = 0, 0, list[str](), RIGHT
        for number, attempt in enumerate(job.attempts):
            fired = self.n_fired
            first = first_step_of(self.reference, attempt)
            if fired and attempt[0].steps:
                events.append(f"restart {fired}: continues with step {first or '?'}")
                fault = self.faults[fired - 1]
                resume = Resume(died, fault.noun, in_save=fault.kind == "save")
                hint = hint_to_resumed(self.reference, attempt, resume)
            is_over = number < len(job.attempts) - 1 or has_failed
            if fired < len(self.faults) and attempt[self.faults[fired].rank].has_fault:
                died = (first or 1) - 1 + len(attempt[self.faults[fired].rank].steps)
                events.append(self.faults[fired].told(died))
                self.n_fired += 1
            elif not hint and is_over and not job.is_bad_luck(number):
                hint = self._hint_to_failure(job, number)
            if hint:
                break
        for event in events[self.n_told :]:
            _tell(f"   {event}")
        self.n_told = len(events)
        return hint

    def _hint_to_failure(self, job: _Job, number: int) -> str:
        """Describe an attempt that has failed without a fault of the judge."""
        error = job.error(number)
        has_begun = any(trace.steps for trace in job.attempts[number])
        last = self.faults[self.n_fired - 1] if self.n_fired else None
        if last and last.kind == "save" and not has_begun and HALF_FILE.search(error):
            return (
                f"After {last.noun}, the script fails at its start: {error}. The file that it "
                "loads is half written. Write to another name, then rename (notebook 04, *Whole or "
                "absent*)."
            )
        after = f", after {last.noun}," if last else ""
        where = f"In attempt {number + 1}{after}"
        return f"{where} the script fails without a fault of the judge: {error}."


def _hint_to_weights(job: _Job, calm: _Job, progress: _JobProgress) -> str:
    """Compare the final weights of both jobs; torchrun has ended both with exit code 0."""
    weights, expected = _load(job.folder / FINAL_FILE), _load(calm.folder / FINAL_FILE)
    is_equal = (
        isinstance(weights, Mapping)
        and weights.keys() == expected.keys()
        and all(torch.is_tensor(each) for each in weights.values())
        and all(torch.equal(weights[name], expected[name]) for name in expected)
    )
    is_restarted = not any(trace.has_fault for trace in job.attempts[-1])
    if not is_equal and not is_restarted:
        return (
            f"After {progress.faults[progress.n_fired - 1].noun}, the script ended with exit code "
            "0, so torchrun took it for a success and started no new attempt. Let the exception "
            "end the process."
        )
    if not is_equal:
        return (
            f"The training is equal, step by step, but {FINAL_FILE} is not. Save the final weights "
            "after the last step."
        )
    if progress.n_fired < len(progress.faults):
        return (
            f"The job ended before {progress.faults[progress.n_fired].noun} could happen. After a "
            "restart, too, save at least every 10 steps."
        )
    _tell("3. The same weights as without faults, to the last bit")
    return RIGHT
